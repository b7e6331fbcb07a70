"""Images have the ids of vLLM's KV events, and media are found in the parts of messages."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from kvrouter.engines.media import ImageHeader, Medium, VllmImageId, read_image_header, read_medium

RECORDED = json.loads((Path(__file__).parent / "image_ids.json").read_text())
"""Images with the ids that vLLM computes of them."""
IMAGES = {image["name"]: image for image in RECORDED["images"]}


def file_of(name: str) -> bytes:
    return base64.b64decode(IMAGES[name]["file"])


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_has_the_id_of_vllms_events(name: str) -> None:
    content = file_of(name)
    header = read_image_header(content)
    assert header is not None
    assert [header.width, header.height] == IMAGES[name]["size"]
    image_id = VllmImageId(RECORDED["model"], header, len(content))
    for at in range(0, len(content), 100):
        image_id.update(content[at : at + 100])
    assert image_id.hexdigest() == IMAGES[name]["id"]


def test_an_id_depends_on_the_model() -> None:
    header = ImageHeader(1, 1, is_rgb=True)
    assert VllmImageId("a", header, 0).hexdigest() != VllmImageId("b", header, 0).hexdigest()


@given(name=st.sampled_from(list(IMAGES)), size=st.integers(0, 400), tail=st.binary(max_size=50))
def test_a_damaged_image_has_a_header_or_none(name: str, size: int, tail: bytes) -> None:
    read_image_header(file_of(name)[:size] + tail)


@given(st.binary(max_size=100))
def test_other_content_has_no_header(content: bytes) -> None:
    assert read_image_header(b"%PDF" + content) is None


def test_the_header_of_a_photograph_follows_its_metadata() -> None:
    content = file_of("JPEG")
    metadata = b"\xff\xe1" + (60_000).to_bytes(2, "big") + bytes(59_998)
    assert read_image_header(content[:2] + 2 * metadata + content[2:]) == ImageHeader(9, 5, is_rgb=True)


def test_a_jpeg_of_endless_segments_is_given_up() -> None:
    assert read_image_header(b"\xff\xd8" + b"\xff\xe1\x00\x02" * 100_000) is None


@pytest.mark.parametrize(
    ("part", "medium"),
    [
        ({"type": "image_url", "image_url": {"url": "https://a/b.png"}}, Medium("image", url="https://a/b.png")),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}, Medium("image", base64="QUJD")),
        ({"type": "image_url", "image_url": {"url": "DATA:;base64,QUJD"}}, Medium("image", base64="QUJD")),
        ({"type": "image_url", "image_url": {"url": "data:,x"}}, Medium("image", url="data:,x")),
        ({"type": "input_image", "image_url": "https://a"}, Medium("image", url="https://a")),
        ({"type": "image_url", "image_url": None, "uuid": "u"}, Medium("image", uuid="u")),
        ({"type": "image_url", "image_url": {"url": "https://a"}, "uuid": "u"}, Medium("image", "https://a", uuid="u")),
        ({"type": "image_url", "image_url": None}, None),
        ({"type": "image_url", "image_url": 7, "uuid": "u"}, None),
        ({"type": "image_url"}, None),
        ({"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}}, Medium("audio", base64="QUJD")),
        ({"type": "audio_url", "audio_url": {"url": "https://a"}}, Medium("audio", url="https://a")),
        ({"type": "video_url", "video_url": {"url": "https://a"}}, Medium("video", url="https://a")),
        ({"type": "text", "text": "x"}, None),
        ({"type": ["image_url"]}, None),
        ({}, None),
    ],
)
def test_parts_of_messages(part: dict[str, Any], medium: Medium | None) -> None:
    assert read_medium(part) == medium
