"""The key of a prompt has its images, sounds and videos: at their places, with their lengths once these are known."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from kvrouter.core import Scope, local_hashes, multimodal_hash
from kvrouter.frontend.text import prompt_media
from kvrouter.frontend.text.client_work import completed
from kvrouter.frontend.text.prompt_media import (
    ASSUMED_TOKENS,
    MAX_LENGTHS,
    MAX_MEDIA,
    MediaLengths,
    MediaRules,
    PromptMedia,
)
from kvrouter.runtime.requests import content_in_blocks
from kvrouter.v1.common_pb2 import MultimodalHash
from kvrouter.v1.errors import BadRequest, PromptTooLong

IMAGE, AUDIO = 1000, 1001
BLOCK = 4
LIMIT = 100_000
RECORDED = json.loads((Path(__file__).parents[2] / "engines" / "image_ids.json").read_text())
FILES = {image["name"]: image for image in RECORDED["images"]}
PNG, GREY = FILES["PNG"], FILES["grey PNG"]


def rules(engine: str = "vllm") -> MediaRules:
    return MediaRules({"image": (IMAGE,), "audio": (AUDIO,)}, MediaLengths(), engine, RECORDED["model"])


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def embedded(file: str) -> dict[str, Any]:
    return image(f"data:image/png;base64,{file}")


def placed(
    parts: Sequence[int | dict[str, Any]], known: MediaRules, options: bytes = b""
) -> tuple[PromptMedia, list[int]]:
    """Returns the media and the tokens of a prompt of text tokens and media."""
    media, tokens = PromptMedia(options), []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            taken = media.take(part)
            assert taken is not None
            tokens.append({"image": IMAGE, "audio": AUDIO}[taken["type"]])
    completed(media.identify(known))
    return media, array("I", media.place(array("I", tokens).tobytes(), known, LIMIT)).tolist()


def learned(known: MediaRules, part: dict[str, Any], length: int) -> None:
    """Lets the length of a medium be known."""
    media, tokens = placed([part], known)
    media.learn(len(tokens), length)


def key(media: PromptMedia, tokens: Sequence[int]) -> list[int]:
    content = content_in_blocks(media.hashes, BLOCK)
    return array("Q", local_hashes(tokens, BLOCK, Scope(), content)).tolist()


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_an_image_is_known_by_the_id_of_vllms_events_at_its_first_token() -> None:
    known = rules()
    learned(known, embedded(PNG["file"]), 6)
    media, tokens = placed([1, 2, embedded(PNG["file"]), 3], known)
    assert tokens == [1, 2, *[IMAGE] * 6, 3]
    assert media.hashes == [MultimodalHash(token_index=2, hash=multimodal_hash(PNG["id"]))]
    assert media.is_counted


def test_a_client_can_name_an_image_to_vllm() -> None:
    for part in (embedded(PNG["file"]), image("https://a/b.png"), {"type": "image_url", "image_url": None}):
        media, _ = placed([part | {"uuid": "cat"}], rules())
        assert media.hashes == [MultimodalHash(token_index=0, hash=multimodal_hash("cat"))]
    media, _ = placed([image("https://a/b.png") | {"uuid": "cat"}], rules("sglang"))
    assert media.hashes[0].hash != multimodal_hash("cat")


MEDIA = (
    *(embedded(each["file"]) for each in FILES.values()),
    *(image(f"https://a/{number}") for number in range(3)),
    image("data:image/png;base64,%%%"),
    image("data:image/png;base64,QUJD"),
    {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
    {"type": "input_audio", "input_audio": {"data": "QUJE", "format": "wav"}},
    {"type": "audio_url", "audio_url": {"url": "https://a/0"}},
)


@pytest.mark.parametrize("engine", ["vllm", "sglang", ""])
def test_equal_media_have_equal_keys_and_others_others(engine: str) -> None:
    keys = [
        [key(*placed([1, 2, part, *range(20)], rules(engine))) for part in MEDIA],
        [key(*placed([1, 2, part, *range(20)], rules(engine))) for part in MEDIA],
    ]
    assert keys[0] == keys[1]
    assert len({tuple(each) for each in keys[0]}) == len(MEDIA)
    assert len({each[0] for each in keys[0]}) == len(MEDIA)  # Not even the block with the first token is equal.


def test_options_that_change_media_change_their_key() -> None:
    ids = {placed([embedded(PNG["file"])], rules(), options)[0].hashes[0].hash for options in (b"", b"{}", b'{"a":1}')}
    assert len(ids) == 3


@pytest.mark.parametrize("characters", [0, 1, 3, 1000])
def test_the_id_of_a_long_image_is_computed_in_slices(characters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    file = base64.b64encode(base64.b64decode(FILES["JPEG"]["file"]) + b"x" * characters).decode()
    whole = placed([embedded(file)], rules())[0].hashes
    monkeypatch.setattr(prompt_media, "_PIECE", 4)
    monkeypatch.setattr(prompt_media, "_PIECES_OF_SLICE", 2)
    monkeypatch.setattr(prompt_media, "_HEAD_PIECES", 250)
    assert placed([embedded(file)], rules())[0].hashes == whole


PARTS = st.lists(st.one_of(st.integers(0, 3), st.sampled_from(MEDIA)), min_size=1, max_size=12)


def computed(parts: Sequence[int | dict[str, Any]], lengths: Sequence[int]) -> list[int]:
    """Returns the key of the blocks that an engine caches, of which each medium has a length and the id known here."""
    tokens: list[int] = []
    hashes: list[tuple[int, int]] = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
            continue
        media, (placeholder, *_) = placed([part], rules())
        hashes.append((len(tokens) // BLOCK, media.hashes[0].hash))
        tokens += [placeholder] * lengths[MEDIA.index(part)]
    return array("Q", local_hashes(tokens, BLOCK, Scope(), hashes)).tolist()


@given(
    cached=PARTS,
    shared=st.integers(0, 12),
    rest=PARTS,
    lengths=st.lists(st.integers(1, 300), min_size=len(MEDIA), max_size=len(MEDIA)),
    believed=st.lists(st.none() | st.integers(1, 300), min_size=len(MEDIA), max_size=len(MEDIA)),
)
def test_the_predicted_overlap_is_never_too_long(
    cached: list[Any], shared: int, rest: list[Any], lengths: list[int], believed: list[int | None]
) -> None:
    prompt = [*cached[:shared], *rest]
    known = rules()
    for part, length in zip(MEDIA, believed, strict=True):
        if length is not None:
            learned(known, part, length)
    true = common(computed(prompt, lengths), computed(cached, lengths))
    predicted = common(key(*placed(prompt, known)), computed(cached, lengths))
    assert predicted <= true
    if not any(isinstance(part, dict) for part in prompt):
        assert predicted == true


@given(parts=PARTS, lengths=st.lists(st.integers(1, 300), min_size=len(MEDIA), max_size=len(MEDIA)))
def test_lengths_are_learned_from_the_engines_counts(parts: list[Any], lengths: list[int]) -> None:
    known = rules()
    sizes: dict[Any, int] = {}
    counts = []
    for part, length in zip(MEDIA, lengths, strict=True):
        media, tokens = placed([7, part], known)
        size = media._media[0].size
        counts.append(sizes.setdefault(size, length))
        media.learn(len(tokens), 1 + counts[-1])
    media, tokens = placed(parts, known)
    assert media.is_counted
    assert len(tokens) == sum(1 if isinstance(part, int) else counts[MEDIA.index(part)] for part in parts)
    assert key(media, tokens) == computed(parts, counts)


def test_overlaps_are_predicted_only_if_all_lengths_are_known() -> None:
    known = rules()
    parts = [1, embedded(PNG["file"]), image("https://a")]
    assert not any(item.unindexed for item in placed(parts, known)[0].hashes)
    media, tokens = placed([image("https://a")], known)
    media.learn(len(tokens), 9)
    assert [item.unindexed for item in placed([image("https://a")], known)[0].hashes] == [True]
    assert not any(item.unindexed for item in placed(parts, known)[0].hashes)
    media, tokens = placed(parts, known)
    media.learn(len(tokens), 1 + 4 + 9)
    assert [item.unindexed for item in placed(parts, known)[0].hashes] == [False, True]


def test_several_unknown_media_are_learned_if_they_are_of_one_size() -> None:
    known = rules()
    media, tokens = placed([1, embedded(PNG["file"]), 2, embedded(GREY["file"])], known)
    media.learn(len(tokens), 2 + 2 * 9)
    assert placed([embedded(GREY["file"])], known)[1] == [IMAGE] * 9
    two = [image("https://a"), image("https://b")]
    media, tokens = placed(two, known)
    media.learn(len(tokens), 30)
    assert not placed(two, known)[0].is_counted
    media, tokens = placed([two[0], two[0]], known)
    media.learn(len(tokens), 31)  # An odd number is not that of two.
    assert not placed(two[:1], known)[0].is_counted
    media.learn(len(tokens), 30)
    assert placed(two[:1], known)[1] == [IMAGE] * 15


def test_a_length_that_came_out_wrong_is_forgotten() -> None:
    known = rules()
    learned(known, embedded(PNG["file"]), 6)
    media, tokens = placed([embedded(PNG["file"])], known)
    media.learn(len(tokens), 6)
    assert placed([embedded(PNG["file"])], known)[0].is_counted
    media.learn(len(tokens), 8)
    assert not placed([embedded(PNG["file"])], known)[0].is_counted


def test_isolated_callers_learn_nothing_of_each_other() -> None:
    known = rules()
    media, tokens = placed([image("https://a")], replace(known, domain="one"))
    media.learn(len(tokens), 9)
    assert placed([image("https://a")], replace(known, domain="one"))[0].is_counted
    assert not placed([image("https://a")], replace(known, domain="other"))[0].is_counted


def test_assumed_lengths_are_small() -> None:
    assert len(placed([image("https://a")], rules())[1]) == ASSUMED_TOKENS
    assert len(placed([embedded(PNG["file"])], rules())[1]) == 1


def test_bounds() -> None:
    media = PromptMedia()
    for _ in range(MAX_MEDIA):
        media.take(image("https://a"))
    with pytest.raises(BadRequest):
        media.take(image("https://a"))
    lengths = MediaLengths()
    for number in range(MAX_LENGTHS + 1):
        lengths.learn(number.to_bytes(2), 1)
    assert len(lengths) == MAX_LENGTHS
    assert (lengths.get(bytes(2)), lengths.get(b"\0\1")) == (None, 1)
    media, known = PromptMedia(), rules()
    media.take(image("https://a"))
    completed(media.identify(known))
    with pytest.raises(PromptTooLong):
        media.place(array("I", [IMAGE]).tobytes(), known, ASSUMED_TOKENS - 1)


@pytest.mark.parametrize("tokens", [[], [IMAGE, IMAGE], [AUDIO], [IMAGE << 8, IMAGE << 16]])
def test_each_medium_needs_one_placeholder(tokens: list[int]) -> None:
    media, known = PromptMedia(), rules()
    media.take(image("https://a"))
    completed(media.identify(known))
    with pytest.raises(BadRequest):
        media.place(array("I", tokens).tobytes(), known, LIMIT)
