"""What a rank's state is after any history, against a naive reading of the rules and against the core's index."""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any, cast

import pytest
from hypothesis import given, settings, strategies as st
from kvrouter.core import PrefixIndex, sequence_hashes
from kvrouter.core.interface import InvalidEvent, UnknownParent
from kvrouter.core.reference.rank_state import MAX_EVENT_BLOCKS, NumberedEvent, RankState
from kvrouter.core.reference.state_chunks import block_records
from kvrouter.v1.common_pb2 import CopyCounting, RankState as Dump, Tier
from kvrouter.v1.events_pb2 import KvEvent, KvEventBatch
from xxhash import xxh3_64_intdigest

COUNTED, SET = CopyCounting.COPY_COUNTING_COUNTED, CopyCounting.COPY_COUNTING_SET
TIERS = (Tier.TIER_DEVICE, Tier.TIER_HOST, Tier.TIER_DISK, Tier.TIER_SHARED, Tier.TIER_CHECKPOINT)


def pack(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def unpack(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 8}Q", packed))


def decoded(events: list[NumberedEvent]) -> list[KvEvent]:
    return [KvEvent.FromString(event.encoded) for event in events]


class Oracle:
    """Copies by (engine hash, place, tier), and nothing else."""

    def __init__(self, counted: bool) -> None:
        self.counted = counted
        self.copies: Counter[tuple[int, int, int]] = Counter()

    def place_of(self, engine_hash: int) -> int | None:
        return next((place for held, place, _ in self.copies if held == engine_hash), None)

    def store(self, hashes: list[int], local_hashes: bytes, parent: int | None, tier: int) -> bool:
        place = None
        if parent is not None:
            place = self.place_of(parent)
            if place is None:
                return False
        for engine_hash, local in zip(hashes, unpack(local_hashes), strict=True):
            place = local if place is None else xxh3_64_intdigest(pack(place, local), 1337)
            for key in [key for key in self.copies if key[0] == engine_hash and key[1] != place]:
                del self.copies[key]
            key = (engine_hash, place, tier)
            self.copies[key] = self.copies[key] + 1 if self.counted else 1
        return True

    def remove(self, hashes: list[int], tier: int) -> None:
        for engine_hash in hashes:
            for key in [key for key in self.copies if key[0] == engine_hash and key[2] == tier]:
                self.copies[key] -= 1
                if not self.copies[key] or not self.counted:
                    del self.copies[key]

    def clear(self, tier: int) -> None:
        for key in [key for key in self.copies if tier in (Tier.TIER_UNSPECIFIED, key[2])]:
            del self.copies[key]

    def digest(self) -> int:
        terms = (xxh3_64_intdigest(pack(*key, copies), 1337) for key, copies in self.copies.items())
        return sum(terms) % (1 << 64)


engine_hashes = st.integers(0, 9)
stores = st.tuples(
    st.just("store"),
    st.lists(engine_hashes, min_size=1, max_size=4, unique=True),
    st.none() | engine_hashes,
    st.sampled_from(TIERS),
    st.integers(0, 2),
)
removals = st.tuples(st.just("remove"), st.lists(engine_hashes, max_size=4), st.sampled_from(TIERS))
clears = st.tuples(st.just("clear"), st.sampled_from((Tier.TIER_UNSPECIFIED, *TIERS)))
histories = st.lists(st.one_of(stores, stores, stores, removals, clears), max_size=40)


@settings(max_examples=300)
@given(histories, st.sampled_from([COUNTED, SET]))
def test_state_after_any_history(history: list[tuple[Any, ...]], counting: CopyCounting) -> None:
    state, oracle, sent = RankState(7, counting), Oracle(counting == COUNTED), []
    for step in history:
        match step:
            case ("store", hashes, parent, tier, salt):
                if parent in hashes:
                    continue
                local = pack(*((salt << 8) + engine_hash for engine_hash in hashes))
                if oracle.store(hashes, local, parent, tier):
                    sent += state.stored(hashes, local, parent, tier)
                else:
                    with pytest.raises(UnknownParent):
                        state.stored(hashes, local, parent, tier)
            case ("remove", hashes, tier):
                oracle.remove(hashes, tier)
                sent += state.removed(hashes, tier)
            case ("clear", tier):
                oracle.clear(tier)
                sent += state.cleared(tier)
        assert state.digest == oracle.digest()
    assert len(state) == len({engine_hash for engine_hash, _, _ in oracle.copies})
    assert [event.event_id for event in sent] == list(range(len(sent)))
    assert [event.event_id for event in decoded(sent)] == list(range(len(sent)))
    assert state.next_event_id == len(sent)
    check_against_the_core(state, sent, counting)


def check_against_the_core(state: RankState, sent: list[NumberedEvent], counting: CopyCounting) -> None:
    """The index that applied the events one by one has the digest of each, and dumps what the state dumps."""
    index = PrefixIndex()
    for event in sent:
        head = KvEventBatch(
            worker_id=1,
            incarnation=7,
            next_event_id=event.event_id + 1,
            digest=event.digest,
            copy_counting=counting,
            block_size=4,
        )
        head.events.append(KvEvent.FromString(event.encoded))
        summary = index.apply(head.SerializeToString())
        assert not summary.rejected
        assert not summary.unknown_parents
        assert not summary.unknown_removals
        assert summary.gap is None
        assert index.digest((1, 0)) == event.digest
    if not sent:
        return
    chunks = list(block_records(state.blocks(), 3))
    dump = [
        Dump(
            cursor=state.cursor,
            blocks=blocks,
            digest=state.digest,
            copy_counting=counting,
            last=number == len(chunks) - 1,
        )
        for number, blocks in enumerate(chunks)
    ]
    for part in dump:
        part.rank.worker_id = 1
    restored = PrefixIndex()
    restored.load_rank([part.SerializeToString() for part in dump])
    assert restored.digest((1, 0)) == state.digest
    assert restored.cursor((1, 0)) == (7, state.next_event_id)


def test_a_chain_in_pieces_has_the_places_of_the_whole() -> None:
    state = RankState(1)
    local = pack(*range(100, 110))
    state.stored([1, 2, 3], local[:24])
    state.stored([4, 5, 6, 7], local[24:56], parent=3)
    state.stored([8, 9, 10], local[56:], parent=7)
    places = {engine_hash: block.sequence_hash for engine_hash, block in state.blocks()}
    assert [places[engine_hash] for engine_hash in range(1, 11)] == unpack(sequence_hashes(local))
    assert [block.depth for _, block in state.blocks()] == list(range(10))


def test_a_long_chain_is_split_and_stays_one_chain() -> None:
    count = 2 * MAX_EVENT_BLOCKS + 5
    whole = RankState(1)
    events = decoded(whole.stored(range(1, count + 1), pack(*range(count))))
    assert [len(event.stored.engine_hashes) for event in events] == [MAX_EVENT_BLOCKS, MAX_EVENT_BLOCKS, 5]
    assert not events[0].stored.HasField("parent_engine_hash")
    assert [event.stored.parent_engine_hash for event in events[1:]] == [MAX_EVENT_BLOCKS, 2 * MAX_EVENT_BLOCKS]
    assert [len(event.encoded) < 160 << 10 for event in whole.removed(range(1, count + 1))] == [True] * 3
    assert len(whole) == 0
    assert whole.digest == 0


def test_two_copies_removed_at_once_are_two_events() -> None:
    state = RankState(1, COUNTED)
    state.stored([1, 2], pack(10, 11))
    state.stored([2], pack(11), parent=1)
    events = decoded(state.removed([2, 1, 2, 2]))
    assert [list(event.removed.engine_hashes) for event in events] == [[2, 1], [2]]
    assert state.unknown_removals == 1
    assert len(state) == 0


@pytest.mark.parametrize(
    ("hashes", "local", "parent", "tier"),
    [
        ([1, 2], pack(1), None, Tier.TIER_DEVICE),
        ([1, 1], pack(1, 2), None, Tier.TIER_DEVICE),
        ([1, 99], pack(1, 2), 99, Tier.TIER_DEVICE),
        ([1], pack(1), 55, Tier.TIER_DEVICE),
        ([1], pack(1), None, Tier.TIER_UNSPECIFIED),
        ([1], pack(1), None, cast(Tier, 17)),
    ],
)
def test_what_contradicts_itself_changes_nothing(
    hashes: list[int], local: bytes, parent: int | None, tier: Tier
) -> None:
    state = RankState(1)
    state.stored([99], pack(9))
    before = (state.digest, state.next_event_id, state.blocks())
    with pytest.raises(InvalidEvent):
        state.stored(hashes, local, parent, tier)
    assert (state.digest, state.next_event_id, state.blocks()) == before


def test_a_dump_names_only_parents_that_are_where_they_were() -> None:
    state = RankState(1)
    state.stored([1, 2, 3], pack(10, 11, 12))
    state.stored([1], pack(77))  # moves: block 2 keeps its place, which is not below the new one
    state.removed([2])
    (records,) = block_records(state.blocks(), 10)
    assert {record.engine_hash: record.HasField("parent_engine_hash") for record in records} == {1: False, 3: False}
    assert [record.depth for record in records] == [0, 2]
    assert records[1].sequence_hash == unpack(sequence_hashes(pack(10, 11, 12)))[2]


def test_an_empty_state_dumps_one_empty_chunk() -> None:
    assert list(block_records([], 10)) == [[]]
