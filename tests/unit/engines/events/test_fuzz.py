"""Damaged input of any kind: it is applied or counted, never raised, and the index still equals the publisher.

The effort is bounded, so that it fits into the gate.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from kvrouter.engines.events.tensorrt_llm import TensorRtLlmEvents
from kvrouter.engines.events.vllm_sglang_events import MAX_EVENTS, UndecodableBatch, decode_batch
from kvrouter.engines.events.zmq_frames import (
    MalformedMessage,
    read_published,
    read_replay_request,
    read_replayed,
)

from .engine_frames import BLOCK, CLEARED, Engine, payload, removed, stored, tokens

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
CHAIN = [
    stored([1, 2], 0, extra_keys=[["salt", ["image", 2]], None], group_idx=0, kv_cache_spec_kind="full_attention"),
    stored([3], 8, parent=2, lora_name="adapter"),
    stored([1, 2], 0, token_ids=[], block_size=0, medium="CPU"),
    removed([2]),
]
NAMES = st.sampled_from([*CHAIN[0], "locality", "session_id", "cache_salt", "lora_name"])
EVENTS = st.builds(
    lambda event, fields: event | fields,
    st.sampled_from([*CHAIN, CLEARED]),
    st.dictionaries(NAMES, VALUES, max_size=2),
)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Draws a payload of which bytes are changed, missing or repeated."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["change", "cut", "repeat", "end"])):
            case "change":
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=5))
            case "cut":
                del data[at : at + draw(st.integers(1, 8))]
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 16))]
            case _:
                del data[at:]
    return bytes(data)


@settings(max_examples=200)
@given(damaged(payload(*CHAIN)) | damaged(payload(*(list(event.values()) for event in CHAIN))))
def test_damaged_payloads(encoded: bytes) -> None:
    engine = Engine()
    engine.publish(*CHAIN)
    with contextlib.suppress(UndecodableBatch):
        engine.receive(encoded)
    engine.publish(*CHAIN)
    engine.index()


@settings(max_examples=200)
@given(st.lists(EVENTS, min_size=1, max_size=3))
def test_fields_of_any_value(events: list[dict[str, Any]]) -> None:
    engine = Engine(lora_names={1: "adapter"}, offloaded_blocks=2)
    engine.publish(stored([7], 100), *events, stored([8], 104, parent=7))
    left_out = sum(engine.translator.left_out.values())
    assert engine.translator.applied + left_out >= len(events) + 2
    assert min(engine.translator.left_out.values(), default=1) > 0
    engine.index()


FRAMES = st.lists(
    st.sampled_from([b"", b"topic", bytes(8), b"\xff" * 8, b"\xff" * 7]) | st.binary(max_size=12), max_size=5
)


@given(FRAMES)
def test_frames_of_any_number_and_size(frames: list[bytes]) -> None:
    for read in (read_published, read_replayed, read_replay_request):
        with contextlib.suppress(MalformedMessage):
            read(frames)


UNIQUE = [{"token_id": token, "token_extra_id": 0} for token in tokens(0, 1)]
DATA = [
    {"type": "created", "num_blocks_per_cache_level": [10, 5]},
    {"type": "stored", "parent_hash": None, "blocks": [{"block_hash": 1, "tokens": UNIQUE, "cache_level": 0}]},
    {"type": "removed", "block_hashes": [1]},
    {"type": "updated", "block_hash": 1, "cache_level": {"old_value": 0, "new_value": 1}},
]
POLLED = st.builds(
    lambda event, fields, event_id: {"event_id": event_id, "window_size": 9, "data": event | fields},
    st.sampled_from(DATA),
    st.dictionaries(
        st.sampled_from([*DATA[1], "block_hashes", "block_hash", "cache_level", "type"]), VALUES, max_size=2
    ),
    st.integers(0, 3),
)


@settings(max_examples=200)
@given(st.lists(POLLED | st.dictionaries(st.sampled_from(["event_id", "data", "window_size"]), VALUES), max_size=4))
def test_polled_events_of_any_value(events: list[dict[str, Any]]) -> None:
    engine = Engine()
    adapter = TensorRtLlmEvents({0: engine.rank}, block_size=BLOCK)
    for event in events:
        adapter.apply(event)
    engine.index()


def test_a_batch_may_have_ten_thousand_events_but_not_any_number() -> None:
    engine = Engine()
    engine.publish(*(stored([number + 1], number * BLOCK) for number in range(10_000)))
    assert engine.rank.stats().blocks == 10_000
    count = MAX_EVENTS + 1
    for head in (b"\x92" + msgspec.msgpack.encode(1.0), b"\x82\xa2ts\x00\xa6events"):
        with pytest.raises(UndecodableBatch, match=f"received {count}"):
            decode_batch(head + b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count)
    assert len(decode_batch(b"\x92\x00\xdc" + (1000).to_bytes(2, "big") + b"\x90" * 1000).events) == 1000
