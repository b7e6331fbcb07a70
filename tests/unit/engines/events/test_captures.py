"""Recordings of real engines: after every message the index equals what the engine held."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from kvrouter.core import Scope, multimodal_hash
from kvrouter.engines.events.vllm_sglang_events import Dialect, decode_batch
from kvrouter.engines.events.zmq_frames import EventMessage, read_published, read_replayed

from ....captures import read_capture
from .engine_frames import Engine

BLOCK = 16
VLLM_BLOCKS = 11
"""Usable blocks of the recorded vLLM's pool."""
PROMPT = list(range(100, 180))


def published(name: str) -> list[EventMessage]:
    return [message for frames in read_capture(name) if (message := read_published(frames))]


def replayed(name: str) -> list[EventMessage]:
    *frames, end = read_capture(name)
    assert read_replayed(end) is None
    return [message for each in frames if (message := read_replayed(each))]


def held_after(messages: list[EventMessage]) -> Counter[int]:
    """Returns the copies of each block after messages, by a naive reading of them."""
    held: Counter[int] = Counter()
    for message in messages:
        for event in msgspec.msgpack.decode(message.payload)[1]:
            match event["type"]:
                case "AllBlocksCleared":
                    held.clear()
                case "BlockStored" if "session_id" not in event:
                    held.update(each % (1 << 64) for each in event["block_hashes"])
                case "BlockRemoved":
                    held.subtract(each % (1 << 64) for each in event["block_hashes"])
    assert min(held.values(), default=0) >= 0
    return +held


def copies(engine: Engine) -> Counter[int]:
    return Counter(
        {block.engine_hash: block.copies[0].copies for chunk in engine.rank.state_chunks() for block in chunk.blocks}
    )


@pytest.mark.parametrize(("name", "dialect"), [("capture_vllm.bin", "vllm"), ("capture_sglang.bin", "sglang")])
def test_the_index_equals_the_engine_after_every_message(name: str, dialect: Dialect) -> None:
    engine = Engine(dialect, block_size=BLOCK)
    messages = published(name)
    for number, message in enumerate(messages, start=1):
        engine.receive(message.payload)
        assert copies(engine) == held_after(messages[:number])
        engine.index()
        if dialect == "vllm":
            assert copies(engine).total() <= VLLM_BLOCKS
    assert engine.left_out == {}
    assert engine.rank.stats().unknown_removals == 0
    assert engine.rank.stats().blocks == 0  # the recordings end with a clear


def test_overlaps_equal_the_blocks_of_the_recorded_vllm() -> None:
    engine = Engine(block_size=BLOCK)
    messages = published("capture_vllm.bin")
    found = []
    image = [(0, multimodal_hash("img-hash-aa"))]
    for message in messages:
        engine.receive(message.payload)
        found.append(
            (
                engine.overlap(PROMPT),
                engine.overlap(list(range(3000, 3032))),
                engine.overlap(PROMPT, scope=Scope(lora_name="my-lora")),
                engine.overlap(PROMPT, scope=Scope(cache_salt="tenant-42")),
                engine.overlap(PROMPT, multimodal=image),
            )
        )
    assert found == [
        (4, 0, 0, 0, 0),
        (4, 0, 0, 0, 0),
        (4, 0, 0, 0, 0),  # the fifth block has generated tokens
        (1, 0, 0, 0, 0),
        (0, 2, 0, 0, 0),  # stored twice
        (0, 2, 0, 0, 0),  # one copy evicted
        (3, 0, 0, 0, 0),
        (3, 0, 3, 0, 0),
        (3, 0, 3, 3, 0),
        (0, 0, 3, 3, 5),
        (0, 0, 2, 3, 5),
        (0, 0, 0, 0, 0),
    ]


def test_overlaps_equal_the_blocks_of_the_recorded_sglang() -> None:
    engine = Engine("sglang", block_size=BLOCK)
    found = []
    for message in published("capture_sglang.bin"):
        engine.receive(message.payload)
        found.append(
            (
                engine.overlap(PROMPT),
                engine.overlap(PROMPT, scope=Scope(cache_salt="tenant-42")),
                engine.overlap(PROMPT, scope=Scope(lora_name="my-lora2")),
            )
        )
    assert (5, 3, 3) in found
    assert found[0] == found[-1] == (0, 0, 0)


@pytest.mark.parametrize(
    ("live", "replay", "first"),
    [
        ("capture_vllm.bin", "capture_vllm_replay_from3.bin", 3),
        ("capture_sglang.bin", "capture_sglang_replay_from2.bin", 2),
    ],
)
def test_a_replay_repeats_what_was_published(live: str, replay: str, first: int) -> None:
    assert replayed(replay) == published(live)[first:]


def test_a_restarted_engine_counts_from_the_start_and_clears_nothing() -> None:
    (message,) = published("capture_vllm_restart.bin")
    assert message.sequence == 0
    last = decode_batch(published("capture_vllm.bin")[-1].payload)
    first = decode_batch(message.payload)
    assert first.timestamp is not None
    assert last.timestamp is not None
    assert first.timestamp > last.timestamp
