"""Event lists as TensorRT-LLM returns them, compared with an index of what was published."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, strategies as st
from kvrouter.core import Scope, multimodal_hash
from kvrouter.engines.events.tensorrt_llm import TensorRtLlmEvents
from kvrouter.v1.common_pb2 import Tier

from .engine_frames import BLOCK, Engine, tokens

HOST = Tier.TIER_HOST


class Trt:
    """The events of an engine, numbered, with the adapter and the rank that they are applied to."""

    def __init__(self, **options: Any) -> None:
        self.engine = Engine()
        self.adapter = TensorRtLlmEvents({0: self.engine.rank}, block_size=BLOCK, **options)
        self.numbers = itertools.count()

    def emit(self, *data: dict[str, Any], window: int | None = 4096) -> None:
        for each in data:
            event = {"event_id": next(self.numbers), "data": each}
            self.adapter.apply(event if window is None else event | {"window_size": window})

    @property
    def left_out(self) -> dict[str, int]:
        return dict(self.adapter.left_out)

    def overlap(self, blocks: int, **options: Any) -> int:
        return self.engine.overlap(tokens(0, blocks), **options)


def block(engine_hash: int | str, token_ids: Iterable[int], level: int = 0, **fields: Any) -> dict[str, Any]:
    unique = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in token_ids]
    known = {"type": "stored_block", "block_hash": engine_hash, "tokens": unique, "cache_level": level, "priority": 35}
    return known | fields


def stored(*blocks: dict[str, Any], parent: int | str | None = None, **fields: Any) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks)} | fields


def removed(*hashes: int | str) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": list(hashes)}


def updated(engine_hash: int | str, old: int, new: int) -> dict[str, Any]:
    level = {"type": "event_diff", "old_value": old, "new_value": new}
    return {"type": "updated", "block_hash": engine_hash, "cache_level": level, "priority": None}


CREATED = {"type": "created", "num_blocks_per_cache_level": [100, 50]}


def test_a_chain_is_stored_extended_and_removed() -> None:
    trt = Trt()
    trt.emit(CREATED, stored(block(1, tokens(0, 1)), block(2, tokens(4, 1))), stored(block(3, tokens(8, 1)), parent=2))
    assert trt.overlap(3) == 3
    trt.emit(removed(3, 2))
    assert trt.overlap(3) == 1
    assert trt.adapter.applied == 4
    assert not trt.engine.rank.stats().partial


def test_a_partial_block_ends_a_chain_and_its_removal_is_swallowed() -> None:
    trt = Trt()
    trt.emit(CREATED, stored(block(1, tokens(0, 1)), block(9, [4, 5]), block(10, [6])))
    trt.emit(updated(9, 0, 1), removed(9), stored(block(2, tokens(4, 1)), parent=1))
    assert trt.overlap(2) == 2
    assert trt.left_out == {"partial_block": 1}
    assert trt.engine.rank.stats().unknown_removals == 0


def test_only_the_largest_window_counts() -> None:
    trt = Trt()
    trt.emit(CREATED, window=512)
    trt.emit(CREATED, window=4096)
    trt.emit(stored(block(1, tokens(0, 1))), window=512)
    trt.emit(stored(block(1, tokens(0, 1))), window=4096)
    trt.emit(removed(1), window=512)
    assert trt.overlap(1) == 1
    assert trt.left_out == {"other_window": 2}
    assert not trt.engine.rank.stats().partial


def test_a_larger_window_that_was_not_announced() -> None:
    trt = Trt()
    trt.emit(stored(block(1, tokens(0, 1))), window=512)
    trt.emit(stored(block(2, tokens(40, 1))), window=4096)
    assert trt.overlap(1) == 0
    assert trt.engine.rank.stats().blocks == 1


def test_events_without_a_window() -> None:
    trt = Trt()
    trt.emit(CREATED, stored(block(1, tokens(0, 1))), window=None)
    assert trt.overlap(1) == 1


def test_a_block_moves_between_device_and_host() -> None:
    trt = Trt()
    trt.emit(CREATED, stored(block(1, tokens(0, 1)), block(2, tokens(4, 1))), updated(2, 0, 1))
    assert trt.overlap(2) == 1
    assert trt.overlap(2, tier=HOST) == 2
    trt.emit(updated(2, 1, 0), updated(1, 0, 0))
    assert trt.overlap(2) == 2
    trt.emit(updated(2, 0, 1), removed(2, 1))
    assert trt.engine.rank.stats().blocks == 0


def test_a_block_moves_to_disk() -> None:
    trt = Trt()
    trt.emit(stored(block(1, tokens(0, 1), level=1)), updated(1, 1, 2))
    assert trt.engine.rank.is_resident(1, tier=Tier.TIER_DISK)
    assert not trt.engine.rank.is_resident(1, tier=HOST)
    trt.emit(removed(1))
    assert trt.engine.rank.stats().blocks == 0
    assert not trt.left_out


def test_a_block_leaves_its_tier_for_an_unknown_level() -> None:
    trt = Trt()
    trt.emit(stored(block(1, tokens(0, 1))), updated(1, 0, 9))
    assert trt.overlap(1) == 0
    assert trt.left_out == {"unknown_cache_level": 1}


@pytest.mark.parametrize(
    ("fields", "adapter"), [({"lora_name": "law"}, "law"), ({"lora_id": 7}, "poems"), ({"lora_id": 8}, "8")]
)
def test_adapters_that_blocks_name(fields: dict[str, Any], adapter: str) -> None:
    trt = Trt(lora_names={7: "poems"})
    trt.emit(stored(block(1, tokens(0, 1), **fields)))
    assert trt.overlap(1) == 0
    assert trt.overlap(1, scope=Scope(lora_name=adapter)) == 1


def test_blocks_of_one_event_in_two_tiers() -> None:
    trt = Trt()
    trt.emit(CREATED, stored(block(1, tokens(0, 1), level=1), block(2, tokens(4, 1)), block(3, tokens(8, 1), level=1)))
    assert trt.overlap(3, tier=HOST) == 3
    assert trt.overlap(3) == 0


@pytest.mark.parametrize(
    ("fields", "scope"),
    [({"lora_name": "adapter"}, Scope(lora_name="adapter")), ({"lora_id": 7}, Scope(lora_name="seven")), ({}, Scope())],
)
def test_adapters(fields: dict[str, Any], scope: Scope) -> None:
    trt = Trt(lora_names={7: "seven"})
    trt.emit(CREATED, stored(block(1, tokens(0, 1)), **fields), stored(block(2, tokens(4, 1)), parent=1, **fields))
    assert trt.overlap(2, scope=scope) == 2


def test_content_belongs_to_the_block_that_it_starts_in() -> None:
    trt = Trt()
    first = block(1, tokens(0, 1), mm_keys=[{"hash": "abc", "start_offset": 0}])
    second = block(2, tokens(4, 1), mm_keys=[{"hash": "abc", "start_offset": 2}, {"hash": "def"}])
    trt.emit(CREATED, stored(first, second))
    assert trt.overlap(2, multimodal=[(0, multimodal_hash("abc")), (1, multimodal_hash("def"))]) == 2


def test_extra_ids_keep_tokens_apart() -> None:
    trt = Trt()
    extra = block(1, [])
    extra["tokens"] = [{"token_id": token, "token_extra_id": 5} for token in tokens(0, 1)]
    trt.emit(CREATED, stored(extra))
    assert trt.overlap(1) == 0
    assert trt.overlap(1, multimodal=[(0, multimodal_hash(struct.pack("<4Q", *4 * [5])))]) == 1


def test_a_salt_keeps_a_sequence_apart() -> None:
    for salt, scope in (("salt", Scope(cache_salt="salt")), ("tenant:t:s", Scope(cache_salt="s", tenant="t"))):
        trt = Trt()
        first, second = block(1, tokens(0, 1), cache_salt=salt), block(2, tokens(4, 1), cache_salt=salt)
        trt.emit(CREATED, stored(first), stored(second, parent=1))
        assert trt.overlap(2) == 0
        assert trt.overlap(2, scope=scope) == 2


def test_hashes_may_be_hexadecimal_digests() -> None:
    trt = Trt()
    one, two, part = (f"{number:064x}" for number in (1, 2, 3))
    trt.emit(CREATED, stored(block(one, tokens(0, 1))), stored(block(two, tokens(4, 1)), block(part, [8]), parent=one))
    assert trt.overlap(2) == 2
    trt.emit(updated(two, 0, 1), updated(part, 0, 1), removed(part, one))
    assert trt.overlap(2, tier=HOST) == 0
    assert {each.engine_hash for chunk in trt.engine.rank.state_chunks() for each in chunk.blocks} == {2}
    assert trt.left_out == {"partial_block": 1}


def test_of_layer_groups_with_the_same_window_the_first_counts() -> None:
    trt = Trt()

    def emit(group: int, data: dict[str, Any], window: int = 4096) -> None:
        event = {"event_id": next(trt.numbers), "window_size": window, "layer_group_id": group, "data": data}
        trt.adapter.apply(event)

    for group, window in ((0, 512), (1, 4096), (2, 4096)):
        emit(group, CREATED, window)
    for group in (1, 2):
        emit(group, stored(block(1, tokens(0, 1))))
    emit(2, removed(1))
    assert trt.overlap(1) == 1
    assert trt.left_out == {"other_window": 2}
    emit(1, removed(1))
    assert trt.engine.rank.stats().blocks == 0


def test_missing_events_cost_the_rank() -> None:
    trt = Trt()
    trt.emit(CREATED, stored(block(1, tokens(0, 1))))
    next(trt.numbers)
    trt.emit(stored(block(2, tokens(40, 1))))
    assert trt.engine.rank.stats().partial
    assert trt.overlap(1) == 0
    assert trt.left_out == {"gap": 1}


def test_an_adapter_that_starts_late_has_missed_events() -> None:
    trt = Trt()
    next(trt.numbers)
    trt.emit(stored(block(1, tokens(0, 1))))
    assert trt.engine.rank.stats().partial
    assert trt.overlap(1) == 1


def test_a_restarted_engine_counts_from_the_start() -> None:
    trt = Trt()
    trt.emit(CREATED, stored(block(1, tokens(0, 1))))
    trt.numbers = itertools.count()
    trt.emit(CREATED)
    assert trt.engine.rank.stats().blocks == 0
    assert trt.engine.rank.stats().restarts == 1


def test_ranks_are_kept_apart() -> None:
    zero, one = Engine(), Engine()
    adapter = TensorRtLlmEvents({0: zero.rank, 1: one.rank}, block_size=BLOCK)
    for rank in (1, 2):
        data = stored(block(1, tokens(0, 1)))
        adapter.apply({"event_id": 0, "attention_dp_rank": rank, "window_size": 9, "data": data})
    assert (zero.rank.stats().blocks, one.rank.stats().blocks) == (0, 1)
    assert adapter.left_out == {"unknown_rank": 1}


def test_events_as_json_and_without_types() -> None:
    trt = Trt()
    for data in (CREATED, stored(block(1, tokens(0, 1))), updated(1, 0, 1), removed(1), stored(block(2, tokens(0, 1)))):
        bare = {key: value for key, value in data.items() if key != "type"}
        trt.adapter.apply(json.dumps({"event_id": next(trt.numbers), "window_size": 9, "data": bare}))
    assert trt.left_out == {}
    assert trt.overlap(1) == 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "malformed"),
        ("stored", "malformed"),
        ({}, "unknown_type"),
        ({"type": "moved"}, "unknown_type"),
        ({"type": "stored"}, "malformed"),
        (stored({"block_hash": 1}), "malformed"),
        (stored(block(1, ["x"] * BLOCK)), "invalid"),  # type: ignore[arg-type]
        (stored(block(1, tokens(0, 2))), "block_size"),
        (stored(block(1, tokens(0, 1), level=3)), "unknown_cache_level"),
        (stored(block(1, tokens(0, 1)), block(1, tokens(0, 1))), "invalid"),
        (stored(block(2, tokens(0, 1)), parent=99), "unknown_parent"),
        (stored(block(2, tokens(0, 1)), parent="99"), "invalid"),
        (removed("x"), "invalid"),
        ({"type": "updated", "block_hash": 1, "cache_level": 5}, "malformed"),
    ],
    ids=str,
)
def test_a_malformed_event_costs_no_other(data: Any, reason: str) -> None:
    trt = Trt()
    trt.emit(CREATED, stored(block(7, tokens(0, 1))), data, stored(block(8, tokens(4, 1)), parent=7))
    assert trt.left_out == {reason: 1}
    assert trt.overlap(2) == 2


def test_a_malformed_hash_costs_no_other_hash_of_a_removal() -> None:
    trt = Trt()
    trt.emit(CREATED, stored(block(1, tokens(0, 1)), block(2, tokens(4, 1))), removed(2, "x", 1))
    assert trt.left_out == {"invalid": 1}
    assert trt.engine.rank.stats().blocks == 0
    assert trt.engine.rank.stats().partial


@pytest.mark.parametrize("event", [None, 5, "not json", "{}", {}, {"event_id": "x"}, {"event_id": 0}])
def test_what_is_no_event_is_left_out(event: Any) -> None:
    trt = Trt()
    trt.adapter.apply(event)
    assert trt.left_out == {"malformed": 1}


HASHES = st.integers(1, 5)
BLOCKS = st.builds(
    lambda h, first, short, level: block(h, tokens(first * BLOCK, 1)[: BLOCK - short], level),
    *(HASHES, st.integers(0, 2), st.integers(0, 1), st.integers(0, 1)),
)
DATA = st.one_of(
    st.builds(lambda blocks, parent: stored(*blocks, parent=parent), st.lists(BLOCKS, max_size=3), st.none() | HASHES),
    st.builds(lambda hashes: removed(*hashes), st.lists(HASHES, max_size=3)),
    st.builds(updated, HASHES, st.integers(0, 1), st.integers(0, 1)),
)


@given(st.lists(DATA, max_size=8))
def test_the_index_equals_the_publisher_after_any_history(history: list[dict[str, Any]]) -> None:
    trt = Trt()
    trt.emit(CREATED, *history)
    trt.engine.index()
