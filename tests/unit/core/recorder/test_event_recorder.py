"""The recorder of the Rust core does what the reference does, byte by byte."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from kvrouter.core import EventRecorder as Chosen, reference
from kvrouter.core.interface import EventRecorder, EventsGone, InvalidEvent, Scope, UnknownParent
from kvrouter.core.reference.rank_state import MAX_EVENT_BLOCKS
from kvrouter.v1.common_pb2 import BlockRecord, CopyCounting, Cursor, RankState, Tier
from kvrouter.v1.events_pb2 import KvEvent, KvEventBatch
from kvrouter.v1.worker_pb2 import GetRankStateResponse

COUNTED = CopyCounting.COPY_COUNTING_COUNTED
NO_BOUND = (1 << 20, 1 << 40)
native: Any = pytest.importorskip("kvrouter.core._native", reason="the native core is not built")

tiers = st.sampled_from([*Tier.values(), 9])
hashes = st.lists(st.integers(0, 9), max_size=5)
stores = st.tuples(
    st.just("stored"),
    hashes,
    st.integers(0, 3),
    st.none() | st.integers(0, 9),
    tiers,
    st.sampled_from([Scope(), Scope("a"), Scope(tenant="t")]),
    st.booleans(),
    st.sampled_from([1, 1, 1, 2, 3]),
)
steps = st.one_of(
    stores,
    stores,
    stores,
    st.tuples(st.sampled_from(["removed", "stored_in_tier", "resident"]), hashes, tiers),
    st.tuples(st.just("cleared"), tiers),
    st.tuples(st.sampled_from(["begin", "commit", "roll_back", "counts"])),
    st.tuples(st.just("chunk"), st.integers(0, 9), st.integers(0, 4)),
    st.tuples(st.just("scope_of"), st.integers(0, 9)),
    st.tuples(st.just("take_batch"), st.integers(1, 200)),
    st.tuples(st.just("batches"), st.integers(0, 40), st.integers(0, 40)),
)
heads = st.tuples(
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 64) - 1),
    st.integers(1, (1 << 32) - 1),
    st.sampled_from(CopyCounting.values()),
)


def recorders(head: Any = (1, 0, 7, 4, COUNTED), bounds: tuple[int, int] = NO_BOUND) -> tuple[EventRecorder, ...]:
    return reference.EventRecorder(head, *bounds), native.EventRecorder(head, *bounds)


@settings(max_examples=200, deadline=None)
@given(heads, st.tuples(st.integers(1, 12), st.integers(40, 400)), st.lists(steps, max_size=40))
def test_both_do_the_same_after_any_history(head: Any, bounds: tuple[int, int], history: list[tuple[Any, ...]]) -> None:
    both, is_open = recorders(head, bounds), False
    for step in history:
        # Groups do not nest.
        if (step[0] == "begin") == is_open and step[0] in ("begin", "commit", "roll_back"):
            continue
        is_open = step[0] == "begin" or (is_open and step[0] not in ("commit", "roll_back"))
        one, other = (outcome_of(recorder, step) for recorder in both)
        assert one == other, step
    assert content(both[0]) == content(both[1])
    loaded = recorders(head, bounds)
    for recorder in loaded:
        recorder.load(list(both[0].dump(False, 3)))
        recorder.annotate(both[0].notes())
    assert content(loaded[0]) == content(loaded[1])


def outcome_of(recorder: EventRecorder, step: tuple[Any, ...]) -> object:
    """Returns what a step returned, or its error."""
    try:
        match step:
            case ("stored", engine_hashes, salt, parent, tier, scope, new_copies, parts):
                locals_ = [(salt << 8) + number for number in range(len(engine_hashes) * parts)]
                packed = struct.pack(f"<{len(locals_)}Q", *locals_)
                return recorder.stored(
                    engine_hashes, packed, parent, tier, scope=scope, new_copies=new_copies, parts=parts
                )
            case ("take_batch", max_bytes):
                first, after, batch = recorder.take_batch(max_bytes)
                return first, after, timeless(batch)
            case ("batches", *arguments):
                return [timeless(batch) for batch in recorder.batches(*arguments)]
            case (name, *arguments):
                return getattr(recorder, name)(*arguments)
    except (InvalidEvent, EventsGone) as error:
        return type(error), str(error)
    return None


def timeless(batch: bytes) -> KvEventBatch:
    """Returns a decoded batch without the time of its encoding."""
    message = KvEventBatch.FromString(batch)
    assert message.published_unix_ns
    message.published_unix_ns = 0
    return message


def chunks(recorder: EventRecorder, size: int = 4096) -> list[GetRankStateResponse]:
    return [GetRankStateResponse.FromString(chunk) for chunk in recorder.state_chunks(size)]


def dumped(recorder: EventRecorder) -> list[RankState]:
    return [RankState.FromString(chunk) for chunk in recorder.dump(True, 2)]


def events(recorder: EventRecorder) -> list[KvEvent]:
    return [event for batch in recorder.batches(0) for event in KvEventBatch.FromString(batch).events]


def ordered(notes: Any) -> list[tuple[str, int, list[int]]]:
    return sorted(
        (repr(scope), parts, sorted(each for (each,) in struct.iter_unpack("<Q", packed)))
        for scope, parts, packed in notes
    )


def content(recorder: EventRecorder) -> object:
    scopes = [recorder.scope_of(block.engine_hash) for chunk in chunks(recorder) for block in chunk.blocks]
    return recorder.counts(), ordered(recorder.notes()), chunks(recorder, 2), dumped(recorder), scopes


def test_long_reports_are_split_alike() -> None:
    count = MAX_EVENT_BLOCKS + 5
    packed = struct.pack(f"<{count}Q", *range(count))
    both = recorders()
    for recorder in both:
        assert recorder.stored(range(count), packed, None, Tier.TIER_DEVICE).next_event_id == 2
        assert recorder.removed(range(count), Tier.TIER_DEVICE).blocks == 0
        assert [len(event.removed.engine_hashes) for event in events(recorder)[2:]] == [MAX_EVENT_BLOCKS, 5]
    one, other = map(events, both)
    assert one == other


def test_a_parent_that_is_not_resident_is_named() -> None:
    for recorder in recorders():
        with pytest.raises(UnknownParent, match="0x0000000000000063 is not resident"):
            recorder.stored([1], b"\0" * 8, 99, Tier.TIER_DEVICE)


def test_a_record_is_read_as_it_is_written() -> None:
    record = BlockRecord(engine_hash=1, local_hash=5, sequence_hash=5)
    record.copies.add(tier=Tier.TIER_HOST, copies=3)
    for recorder in recorders():
        recorder.load([RankState(cursor=Cursor(next_event_id=4), blocks=[record]).SerializeToString()])
        assert chunks(recorder)[0].blocks[0] == record
        assert recorder.resident([1], Tier.TIER_HOST) == [1]
        assert recorder.counts().next_event_id == 4


def test_events_of_the_log_are_those_of_the_batch() -> None:
    for recorder in recorders():
        recorder.stored([1, 2], struct.pack("<2Q", 5, 6), None, Tier.TIER_DEVICE)
        recorder.cleared(Tier.TIER_HOST)
        kept = events(recorder)
        _, _, batch = recorder.take_batch(1 << 20)
        assert list(KvEventBatch.FromString(batch).events) == kept == events(recorder)
        assert [event.event_id for event in kept] == [0, 1]


def test_chains_follow_each_other_in_a_dump() -> None:
    for recorder in recorders():
        recorder.stored([1, 2, 3], struct.pack("<3Q", 5, 6, 7), None, Tier.TIER_DEVICE)
        recorder.stored([9, 8], struct.pack("<2Q", 1, 2), None, Tier.TIER_DEVICE)
        recorder.stored([5, 4], struct.pack("<2Q", 3, 4), 2, Tier.TIER_DEVICE)
        order = [block.engine_hash for chunk in recorder.dump(False, 2) for block in RankState.FromString(chunk).blocks]
        assert order == [1, 2, 3, 9, 8, 5, 4]


def test_a_chunk_that_cannot_be_decoded_is_refused() -> None:
    for recorder in recorders():
        with pytest.raises(ValueError, match=r".+"):
            recorder.load([b"\x0a\xff"])


def test_publishers_use_the_core() -> None:
    assert Chosen is native.EventRecorder
