"""The rank state of the Rust core does what the reference does, byte by byte."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvrouter.core import RANK_STATE, Scope
from kvrouter.publisher.errors import InvalidEvent, UnknownParent
from kvrouter.publisher.events.native_rank_state import NativeRankState, make_rank_state
from kvrouter.publisher.events.rank_state import MAX_EVENT_BLOCKS, RankState
from kvrouter.v1.common_pb2 import CopyCounting, Tier
from kvrouter.v1.events_pb2 import KvEvent

pytestmark = pytest.mark.skipif(RANK_STATE is None, reason="the native core is not built")

tiers = st.sampled_from([*Tier.values(), 9])
hashes = st.lists(st.integers(-2, 9), max_size=5)
stores = st.tuples(
    st.just("stored"),
    hashes,
    st.integers(0, 3),
    st.none() | st.integers(-2, 9),
    tiers,
    st.sampled_from([Scope(), Scope("a"), Scope(tenant="t")]),
    st.booleans(),
    st.sampled_from([1, 1, 1, 2, 3]),
)
changes = st.one_of(
    stores,
    stores,
    stores,
    st.tuples(st.sampled_from(["removed", "stored_known"]), hashes, tiers),
    st.tuples(st.just("cleared"), tiers),
    st.tuples(st.sampled_from(["begin", "commit", "roll_back"])),
    st.tuples(st.just("chunk"), st.integers(-2, 9), st.integers(0, 4)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(changes, max_size=40), st.sampled_from(CopyCounting.values()))
def test_both_do_the_same_after_any_history(history: list[tuple[Any, ...]], counting: CopyCounting) -> None:
    both = RankState(7, counting), NativeRankState(7, counting)
    for change in history:
        one, other = (outcome_of(state, change) for state in both)
        assert one == other
    check_equal(*both, counting)
    loaded = make_rank_state(7, counting), RankState(7, counting)
    for state in loaded:
        state.load(both[0].next_event_id, [block for chunk in both[0].chunks(counting) for block in chunk.blocks])
        state.annotate(both[0].notes())
    check_equal(*loaded, counting)


def outcome_of(state: RankState, change: tuple[Any, ...]) -> object:
    """Returns what a change returned, or its error."""
    try:
        match change:
            case ("stored", engine_hashes, salt, parent, tier, scope, new_copies, parts):
                locals_ = [(salt << 8) + number for number in range(len(engine_hashes) * parts)]
                packed = struct.pack(f"<{len(locals_)}Q", *locals_)
                return state.stored(
                    engine_hashes, packed, parent, tier, scope=scope, new_copies=new_copies, parts=parts
                )
            case (name, *arguments):
                return getattr(state, name)(*arguments)
    except InvalidEvent as error:
        return type(error), str(error)
    return None


def check_equal(one: RankState, other: RankState, counting: CopyCounting) -> None:
    for name in ("next_event_id", "unknown_removals", "unplaced_blocks", "digest", "cursor"):
        assert getattr(one, name) == getattr(other, name), name
    assert len(one) == len(other)
    assert sorted(one.blocks()) == sorted(other.blocks())
    assert noted(one) == noted(other)
    assert [one.copies_in(tier) for tier in Tier.values()[1:]] == [other.copies_in(tier) for tier in Tier.values()[1:]]
    for engine_hash, _ in one.blocks():
        assert engine_hash in other
        assert one.scope_of(engine_hash) == other.scope_of(engine_hash)
    assert list(one.chunks(counting, 2)) == list(other.chunks(counting, 2))


def noted(state: RankState) -> list[tuple[str, int, list[int]]]:
    return sorted((repr(note.scope), note.parts, sorted(note.engine_hashes)) for note in state.notes())


def test_long_reports_are_split_alike() -> None:
    count = MAX_EVENT_BLOCKS + 5
    packed = struct.pack(f"<{count}Q", *range(count))
    one, other = RankState(1), NativeRankState(1)
    assert one.stored(range(count), packed) == other.stored(range(count), packed)
    assert one.removed(range(count)) == other.removed(range(count))
    assert len(other) == 0


def test_a_parent_that_is_not_resident_is_named() -> None:
    with pytest.raises(UnknownParent, match="0x0000000000000063 is not resident"):
        NativeRankState(1).stored([1], b"\0" * 8, 99)


def test_events_of_a_journal_lead_to_the_same_state() -> None:
    one, other = RankState(1), NativeRankState(1)
    events = [*one.stored([1, 2], struct.pack("<2Q", 5, 6)), *one.removed([2]), *one.cleared(Tier.TIER_HOST)]
    for event in events:
        assert other.replay(KvEvent.FromString(event.encoded)) == [event]
    check_equal(one, other, CopyCounting.COPY_COUNTING_COUNTED)
