"""An image has the same place and hash in a chat, in Messages passed on or translated, and in Responses."""

from __future__ import annotations

import base64
import json
import tracemalloc
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from kvrouter.core import IMPLEMENTATION, Scope, local_hashes, multimodal_hash
from kvrouter.frontend.edge.messages_request import MessagesRequest
from kvrouter.frontend.edge.responses_request import ResponsesRequest
from kvrouter.frontend.edge.translated_request import TranslatedRequest
from kvrouter.frontend.packed_prompt import hash_prompt
from kvrouter.frontend.proxy.forwarding import generate_request
from kvrouter.frontend.proxy.routed_body import RoutedBody
from kvrouter.frontend.text.client_work import completed
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.net.model_files import read_model_files
from kvrouter.v1.errors import BadRequest
from msgspec.structs import replace

from ....byte_tokenizer import write_byte_tokenizer

LIMIT = 100_000
RECORDED = json.loads((Path(__file__).parents[2] / "engines" / "image_ids.json").read_text())
IMAGES = RECORDED["images"][:3]
WORDS = st.text(alphabet="abc é", min_size=1, max_size=9).filter(str.strip)
PARTS = st.lists(st.tuples(WORDS, st.none() | st.sampled_from(IMAGES) | st.just("https://a/b.png")), min_size=1)


@cache
def text(*, media: bool = True) -> ModelText:
    with TemporaryDirectory() as directory:
        files = read_model_files(write_byte_tokenizer(Path(directory) / "model", media=media))
        return ModelText(files, cache_bytes=1 << 20, engine="vllm", engine_model=RECORDED["model"])


def tokenized(body: dict[str, Any] | bytes, api: type[TranslatedRequest] | None = None) -> RoutedBody:
    encoded = body if isinstance(body, bytes) else json.dumps({"model": "m"} | body).encode()
    return rendered(RoutedBody.parse(encoded, max_prompt_tokens=LIMIT, api=api))


def rendered(routed: RoutedBody) -> RoutedBody:
    assert routed.source is not None
    return replace(routed, token_ids=completed(routed.source.slices(text(), LIMIT)), source=None)


def hashes(routed: RoutedBody, block_size: int) -> bytes:
    return hash_prompt(routed.token_ids, generate_request(routed, "r"), block_size)


@settings(deadline=None)
@given(parts=PARTS, block_size=st.integers(1, 40))
def test_all_apis_agree(parts: list[tuple[str, Any]], block_size: int) -> None:
    chat: list[Any] = []
    blocks: list[Any] = []
    items: list[Any] = []
    for words, image in parts:
        chat.append({"type": "text", "text": words})
        blocks.append({"type": "text", "text": words})
        items.append({"type": "input_text", "text": words})
        if image is not None:
            url = image if isinstance(image, str) else f"data:image/png;base64,{image['file']}"
            embedded = {"type": "base64", "media_type": "image/png", "data": "" if image == url else image["file"]}
            chat.append({"type": "image_url", "image_url": {"url": url}})
            blocks.append({"type": "image", "source": {"type": "url", "url": url} if image == url else embedded})
            items.append({"type": "input_image", "image_url": url})
    messages = json.dumps({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": blocks}]}).encode()
    response = {"input": [{"role": "user", "content": items}]}
    expected = tokenized({"messages": [{"role": "user", "content": chat}]})
    assert expected.media is not None
    parsed = RoutedBody.parse(messages, max_prompt_tokens=LIMIT, api=MessagesRequest)
    translated, _, sent = parsed.as_chat(messages, api=MessagesRequest, max_prompt_tokens=LIMIT)
    for routed in (
        tokenized(messages, MessagesRequest),
        rendered(translated),
        tokenized(sent),
        tokenized(response, ResponsesRequest),
    ):
        assert routed.token_ids == expected.token_ids
        assert hashes(routed, block_size) == hashes(expected, block_size)
    places = [(item.token_index // block_size, item.hash) for item in expected.media.hashes]
    assert hashes(expected, block_size) == local_hashes(expected.token_ids, block_size, Scope(), places)
    images = [image for _, image in parts if image is not None]
    for image, item in zip(images, expected.media.hashes, strict=True):
        assert isinstance(image, str) or item.hash == multimodal_hash(image["id"])


def test_an_image_in_the_result_of_a_tool_is_found() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": IMAGES[0]["file"]}
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": source}]}
    messages = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    routed = tokenized({"max_tokens": 9, "messages": messages}, MessagesRequest)
    assert routed.media is not None
    assert [item.hash for item in routed.media.hashes] == [multimodal_hash(IMAGES[0]["id"])]


def test_a_template_for_texts_takes_no_media() -> None:
    content = [{"type": "image_url", "image_url": {"url": "https://a"}}]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    source = RoutedBody.parse(body, max_prompt_tokens=LIMIT).source
    assert source is not None
    with pytest.raises(BadRequest):
        completed(source.slices(text(media=False), LIMIT))


SIZE = 4 << 20
SHAPES = {
    "an image": b"data:image/png;base64," + base64.b64encode(base64.b64decode(IMAGES[0]["file"]) + bytes(SIZE)),
    "a JPEG without a picture": b"data:;base64," + base64.b64encode(b"\xff\xd8" + b"\xff\xe1\0\2" * (SIZE // 4)),
    "no base64": b"data:;base64," + b"%" * SIZE,
    "a mark at the end": b"data:" + b";" * SIZE + b";base64,",
    "a URL": b"https://a/" + b"x" * SIZE,
}


@pytest.mark.skipif(IMPLEMENTATION != "native", reason="the reference reads JSON with more memory")
@pytest.mark.parametrize("shape", [*SHAPES, "many images"])
def test_hostile_media_cost_little_memory(shape: str) -> None:
    part = b'{"type": "image_url", "image_url": {"url": "%b"}}'
    parts = part % SHAPES[shape] if shape in SHAPES else b",".join([part % b"a"] * (SIZE // len(part)))
    body = b'{"model": "m", "messages": [{"role": "user", "content": [%b]}]}' % parts
    text()
    tracemalloc.start()
    try:
        with suppress(BadRequest):
            tokenized(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 12 * len(body)
