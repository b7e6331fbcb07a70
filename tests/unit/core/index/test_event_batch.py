"""What callers may know of an event batch before it is applied, for every implementation."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from kvrouter.core import reference
from kvrouter.core.interface import RefusedBatch

from ..batches import HOST, LAST_ID, RANK, batch, cleared, device_overlap, removed, said, stored
from ..conftest import implementation
from .histories import Apply, Operation, histories, perform, view

ATTRIBUTES = ("rank", "incarnation", "next_event_id", "reached", "events", "clears_all", "published_unix_ns")


@pytest.fixture(params=["reference", "native"])
def core(request: pytest.FixtureRequest) -> ModuleType:
    return implementation(request.param, "EventBatch")


def refusal(core: ModuleType, *arguments: Any, **more: Any) -> str:
    with pytest.raises(RefusedBatch) as caught:
        core.EventBatch(*arguments, **more)
    assert str(caught.value)
    return caught.value.reason


def test_a_batch_says_what_it_is_of(core: ModuleType) -> None:
    read = core.EventBatch(batch(3, stored([101], [1]), removed(101), incarnation=9), RANK, 16)
    assert (read.rank, read.incarnation, read.events) == (RANK, 9, 2)
    assert (read.next_event_id, read.reached) == (5, 5)
    assert read.published_unix_ns == 0
    assert not read.clears_all


def test_a_batch_reaches_past_its_highest_event_and_what_it_names_as_next(core: ModuleType) -> None:
    assert core.EventBatch(batch(3, removed(1), next_event_id=2)).reached == 4
    assert core.EventBatch(batch(3, removed(1), next_event_id=9)).reached == 9
    assert core.EventBatch(batch(0, next_event_id=0)).reached == 0
    assert core.EventBatch(batch(LAST_ID, removed(1), next_event_id=0)).reached == LAST_ID


def test_only_clearing_every_tier_clears_all(core: ModuleType) -> None:
    assert core.EventBatch(batch(0, removed(1), cleared())).clears_all
    assert not core.EventBatch(batch(0, removed(1), cleared(HOST))).clears_all


def test_refusals_name_their_reason(core: ModuleType) -> None:
    assert refusal(core, b"\xff\xff no protobuf") == "unparsable"
    assert refusal(core, batch(0, removed(1))[:-1]) == "unparsable"
    assert refusal(core, batch(0), (RANK[0] + 1, RANK[1])) == "rank"
    assert refusal(core, batch(0), (RANK[0], RANK[1] + 1), 16) == "rank"
    assert refusal(core, b"", RANK) == "rank"
    assert refusal(core, batch(0), RANK, 32) == "block_size"
    assert refusal(core, batch(0), block_size=0) == "block_size"


def test_a_batch_is_applied_as_its_bytes_are_and_more_than_once(core: ModuleType) -> None:
    data = batch(0, stored([101, 102], [1, 2]))
    whole, read = core.PrefixIndex(), core.PrefixIndex()
    parsed = core.EventBatch(data)
    assert said(read.apply(parsed)) == said(whole.apply(data))
    assert read.apply(parsed).duplicates == 1
    assert device_overlap(read, 1, 2) == 2


def test_the_memory_of_many_small_events_is_accounted(core: ModuleType) -> None:
    data = batch(0, *(cleared(HOST) for _ in range(10_000)))
    assert core.EventBatch(data).memory_bytes > 10 * len(data)


def test_what_is_no_batch_is_no_argument(core: ModuleType) -> None:
    for odd in (None, "text", 5):
        with pytest.raises((TypeError, ValueError)):
            core.PrefixIndex().apply(odd)


@given(st.binary(max_size=300))
def test_both_implementations_read_any_bytes_alike(data: bytes) -> None:
    native = implementation("native", "EventBatch")
    read: list[Any] = []
    for core in (native, reference):
        try:
            batch_ = core.EventBatch(data)
            read.append([getattr(batch_, name) for name in ATTRIBUTES])
        except RefusedBatch as error:
            read.append(error.reason)
    assert read[0] == read[1]


@given(histories(max_operations=30))
@settings(max_examples=100)
def test_both_implementations_read_and_apply_histories_alike(history: list[Operation]) -> None:
    cores = [implementation("native", "EventBatch"), reference]
    indexes = [core.PrefixIndex() for core in cores]
    by_bytes = cores[0].PrefixIndex()
    for operation in history:
        if not isinstance(operation, Apply):
            for index in (*indexes, by_bytes):
                perform(index, operation)
            continue
        try:
            one, other = (core.EventBatch(operation.data) for core in cores)
        except RefusedBatch:
            continue
        assert [getattr(one, name) for name in ATTRIBUTES] == [getattr(other, name) for name in ATTRIBUTES]
        indexes[0].apply(one)
        indexes[1].apply(other)
        by_bytes.apply(operation.data)
    assert view(indexes[0]) == view(indexes[1]) == view(by_bytes)
