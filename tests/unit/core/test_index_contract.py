"""What a prefix index does with events, for every implementation."""

from __future__ import annotations

import pytest
from kvrouter.core.interface import MAX_EVENT_BLOCKS, Scope
from kvrouter.core.reference import local_hashes
from kvrouter.v1.events_pb2 import KvEvent
from kvrouter.v1.indexer_pb2 import FindMatchesResponse

from .batches import (
    DEVICE,
    DISK,
    HOST,
    LAST_ID,
    RANK,
    SET,
    SHARED,
    batch,
    cleared,
    device_overlap,
    digest_of,
    dumped,
    entries,
    matches,
    packed,
    places,
    removed,
    stored,
    unpacked,
)

OTHER = (7, 1)


def test_a_stored_chain_is_found(index_class: type) -> None:
    index = index_class()
    summary = index.apply(batch(0, stored([101, 102, 103], [1, 2, 3])))
    assert (summary.worker_id, summary.dp_rank) == RANK
    assert (summary.applied, summary.stored_blocks) == (1, 3)
    assert (summary.incarnation, summary.next_event_id) == (1, 1) == index.cursor(RANK)
    assert not summary.new_incarnation
    assert summary.gap is None
    assert device_overlap(index, 1, 2, 3) == 3
    assert device_overlap(index, 1, 2, 3, 4) == 3
    assert device_overlap(index, 1, 2) == 2
    assert device_overlap(index, 1, 9, 3) == 1
    assert device_overlap(index, 2, 3) == 0
    assert device_overlap(index) == 0


def test_chains_continue_below_their_parents(index_class: type) -> None:
    index = index_class()
    index.apply(batch(0, stored([101], [1]), stored([102], [2], parent=101), stored([103], [3], parent=101)))
    assert device_overlap(index, 1, 2) == 2
    assert device_overlap(index, 1, 3) == 2
    assert device_overlap(index, 1, 2, 3) == 2


def test_ranks_of_one_worker_are_candidates_of_their_own(index_class: type) -> None:
    index = index_class()
    index.apply(batch(0, stored([101, 102], [1, 2])))
    index.apply(batch(0, stored([101], [1]), rank=OTHER))
    index.apply(batch(0, stored([55], [8]), rank=(3, 9)))
    assert matches(index, [1, 2]) == {RANK: (2,) * 4, OTHER: (1,) * 4, (3, 9): (0,) * 4}
    index.apply(batch(1, removed(101), rank=OTHER))
    assert matches(index, [1, 2]) == {RANK: (2,) * 4, OTHER: (0,) * 4, (3, 9): (0,) * 4}


def test_one_engine_hash_may_mean_different_blocks_on_different_ranks(index_class: type) -> None:
    index = index_class()
    index.apply(batch(0, stored([101], [1])))
    index.apply(batch(0, stored([101], [2]), rank=OTHER))
    assert matches(index, [1]) == {RANK: (1,) * 4, OTHER: (0,) * 4}
    assert matches(index, [2]) == {RANK: (0,) * 4, OTHER: (1,) * 4}


class TestRemoval:
    def test_a_hole_ends_the_overlap_and_filling_it_restores_it(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101, 102, 103], [1, 2, 3])))
        summary = index.apply(batch(1, removed(102)))
        assert (summary.removed_blocks, summary.unknown_removals) == (1, 0)
        assert device_overlap(index, 1, 2, 3) == 1
        index.apply(batch(2, stored([202], [2], parent=101)))
        assert device_overlap(index, 1, 2, 3) == 3

    def test_parents_may_go_before_children(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101, 102, 103], [1, 2, 3]), removed(101), removed(102)))
        assert device_overlap(index, 1, 2, 3) == 0
        assert index.digest(RANK) == digest_of((103, places([1, 2, 3])[2], DEVICE, 1))
        index.apply(batch(3, removed(103)))
        assert index.stats().blocks == 0
        assert index.digest(RANK) == 0

    def test_a_chain_goes_on_below_a_block_whose_own_parent_is_gone(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101, 102], [1, 2]), removed(101), stored([103], [3], parent=102)))
        assert device_overlap(index, 1, 2, 3) == 0
        index.apply(batch(3, stored([101], [1])))
        assert device_overlap(index, 1, 2, 3) == 3

    def test_what_is_not_held_is_counted(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1])))
        summary = index.apply(batch(1, removed(101, 999), removed(101), removed(101, tier=HOST)))
        assert (summary.applied, summary.removed_blocks, summary.unknown_removals) == (3, 1, 3)
        assert not index.ranks()[0].partial

    def test_only_the_named_tier_is_left(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1]), stored([101], [1], tier=DISK), removed(101)))
        assert matches(index, [1]) == {RANK: (0, 0, 1, 1)}


class TestCopies:
    def test_counted_copies_are_removed_one_by_one(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1]), stored([101], [1])))
        assert index.digest(RANK) == digest_of((101, 1, DEVICE, 2))
        assert index.stats().blocks == 1
        index.apply(batch(2, removed(101)))
        assert device_overlap(index, 1) == 1
        index.apply(batch(3, removed(101)))
        assert device_overlap(index, 1) == 0

    def test_a_removal_may_name_two_copies(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1]), stored([101], [1])))
        summary = index.apply(batch(2, removed(101, 101)))
        assert summary.removed_blocks == 2
        assert device_overlap(index, 1) == 0

    def test_a_set_knows_no_copies(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1]), stored([101], [1]), counting=SET))
        assert index.digest(RANK) == digest_of((101, 1, DEVICE, 1))
        summary = index.apply(batch(2, removed(101, 101), counting=SET))
        assert (summary.removed_blocks, summary.unknown_removals) == (1, 1)
        assert device_overlap(index, 1) == 0

    def test_a_set_forgets_copies_that_were_counted(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101, 102], [1, 2]), stored([101, 102], [1, 2])))
        index.apply(batch(2, stored([102], [2], parent=101), removed(101), counting=SET))
        assert device_overlap(index, 1) == 0
        index.apply(batch(4, stored([101], [1]), stored([102], [2], parent=101), counting=SET))
        assert index.digest(RANK) == digest_of(
            *((100 + n, place, DEVICE, 1) for n, place in enumerate(places([1, 2]), 1))
        )

    @pytest.mark.parametrize("counting", [0, 9])
    def test_any_other_counting_reads_as_counted(self, index_class: type, counting: int) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1]), stored([101], [1]), removed(101), counting=counting))
        assert device_overlap(index, 1) == 1

    def test_two_engine_hashes_at_one_place_both_hold_it(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1]), stored([201], [1])))
        assert (index.stats().blocks, index.stats().distinct_blocks) == (2, 1)
        index.apply(batch(2, removed(101)))
        assert device_overlap(index, 1) == 1
        index.apply(batch(3, removed(201)))
        assert device_overlap(index, 1) == 0


class TestMoves:
    def test_the_old_place_is_released_with_all_its_copies(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1]), stored([101], [1]), stored([101], [1], tier=HOST)))
        index.apply(batch(3, stored([101], [2])))
        assert matches(index, [1]) == {RANK: (0, 0, 0, 0)}
        assert matches(index, [2]) == {RANK: (1, 1, 1, 1)}
        assert index.digest(RANK) == digest_of((101, 2, DEVICE, 1))
        assert index.stats().blocks == 1

    def test_children_keep_their_places(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101, 102], [1, 2]), stored([101], [5])))
        assert device_overlap(index, 5, 2) == 1
        assert device_overlap(index, 1, 2) == 0
        index.apply(batch(2, stored([301], [1])))
        assert device_overlap(index, 1, 2) == 2

    def test_new_children_go_to_the_new_place(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1]), stored([101], [5]), stored([102], [2], parent=101)))
        assert device_overlap(index, 5, 2) == 2
        assert device_overlap(index, 1, 2) == 0

    def test_another_holder_of_the_old_place_stays(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1]), stored([201], [1]), stored([101], [5])))
        assert device_overlap(index, 1) == 1

    def test_a_chain_may_move_a_block_below_its_own_descendant(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101, 102, 103], [1, 2, 3]), stored([101], [1], parent=103)))
        assert device_overlap(index, 1, 2, 3, 1) == 0
        index.apply(batch(2, stored([201], [1])))
        assert device_overlap(index, 1, 2, 3, 1) == 4

    def test_only_the_same_place_is_no_move(self, index_class: type) -> None:
        """The same local hash below another parent is another place."""
        index = index_class()
        index.apply(batch(0, stored([101, 102], [1, 2]), stored([201], [3]), stored([102], [2], parent=201)))
        assert device_overlap(index, 1, 2) == 1
        assert device_overlap(index, 3, 2) == 2
        assert index.stats().blocks == 3


class TestTiers:
    def test_overlap_to_a_tier_counts_faster_ones(self, index_class: type) -> None:
        index = index_class()
        index.apply(
            batch(
                0,
                stored([101], [1], tier=HOST),
                stored([102], [2], parent=101),
                stored([103], [3], parent=102, tier=SHARED),
                stored([104], [4], parent=103, tier=DISK),
            )
        )
        assert matches(index, [1, 2, 3, 4, 5]) == {RANK: (0, 2, 2, 4)}

    def test_unspecified_is_device(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101, 102], [1, 2], tier=0)))
        assert matches(index, [1, 2]) == {RANK: (2, 2, 2, 2)}
        index.apply(batch(1, removed(102, tier=0)))
        assert matches(index, [1, 2]) == {RANK: (1, 1, 1, 1)}

    def test_any_tier_will_do_for_a_parent(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1], tier=DISK), stored([102], [2], parent=101)))
        assert matches(index, [1, 2]) == {RANK: (0, 0, 2, 2)}

    def test_two_holders_of_a_place_in_two_tiers(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1], tier=DISK), stored([201], [1], tier=HOST)))
        assert matches(index, [1]) == {RANK: (0, 1, 1, 1)}

    @pytest.mark.parametrize("tier", [0, 5, -1])
    def test_queries_name_a_tier_that_exists(self, index_class: type, tier: int) -> None:
        with pytest.raises((ValueError, OverflowError)):
            index_class().overlaps(b"", tier)


class TestCleared:
    def test_everything(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1]), stored([102], [2], tier=HOST)))
        index.apply(batch(0, stored([101], [1]), rank=OTHER))
        assert index.apply(batch(2, cleared())).applied == 1
        assert matches(index, [1]) == {RANK: (0,) * 4, OTHER: (1,) * 4}
        assert (index.digest(RANK), index.cursor(RANK)) == (0, (1, 3))
        assert index.apply(batch(3, stored([102], [2], parent=101))).unknown_parents == 1

    def test_one_tier(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101, 102], [1, 2]), stored([101], [1], tier=HOST), cleared(DEVICE)))
        assert matches(index, [1, 2]) == {RANK: (0, 1, 1, 1)}
        assert index.digest(RANK) == digest_of((101, 1, HOST, 1))

    def test_nothing_is_missing_from_a_rank_that_holds_nothing(self, index_class: type) -> None:
        index = index_class()
        index.reset_rank(RANK, 1, 0)
        index.apply(batch(0, cleared(DEVICE)))
        assert index.ranks()[0].partial
        index.apply(batch(1, cleared()))
        assert not index.ranks()[0].partial


class TestCursor:
    def test_events_below_it_are_dropped(self, index_class: type) -> None:
        index = index_class()
        first = batch(0, stored([101], [1]), stored([102], [2], parent=101))
        index.apply(first)
        digest = index.digest(RANK)
        summary = index.apply(first)
        assert (summary.applied, summary.duplicates, summary.next_event_id) == (0, 2, 2)
        summary = index.apply(batch(1, stored([102], [2], parent=101), removed(102)))
        assert (summary.applied, summary.duplicates, summary.next_event_id) == (1, 1, 3)
        assert index.digest(RANK) != digest

    def test_nothing_is_applied_past_a_gap(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1])))
        summary = index.apply(batch(2, removed(101), stored([201], [2])))
        assert (summary.gap, summary.applied, summary.next_event_id) == ((1, 2), 0, 1)
        assert device_overlap(index, 1) == 1
        assert device_overlap(index, 2) == 0
        assert index.apply(batch(1, stored([102], [5]), removed(101), stored([201], [2]))).gap is None
        assert device_overlap(index, 2) == 1

    def test_a_gap_in_the_middle_of_a_batch(self, index_class: type) -> None:
        late = stored([103], [3])
        data = batch(0, stored([101], [1]))
        late.event_id = 5
        data += event_on_wire(late)
        index = index_class()
        summary = index.apply(data)
        assert (summary.applied, summary.gap, summary.next_event_id) == (1, (1, 5), 1)

    def test_a_new_rank_starts_at_event_0(self, index_class: type) -> None:
        index = index_class()
        summary = index.apply(batch(3, stored([101], [1]), incarnation=9))
        assert (summary.gap, summary.incarnation, summary.next_event_id) == ((0, 3), 9, 0)
        assert index.cursor(RANK) == (9, 0)
        assert index.stats().blocks == 0

    def test_a_heartbeat_tells_of_lost_events(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1])))
        assert index.apply(batch(1)).gap is None
        assert index.apply(batch(0)).gap is None
        summary = index.apply(batch(4))
        assert (summary.gap, summary.next_event_id) == ((1, 4), 1)
        assert device_overlap(index, 1) == 1

    def test_so_does_the_end_of_a_batch(self, index_class: type) -> None:
        index = index_class()
        summary = index.apply(batch(0, stored([101], [1]), next_event_id=3))
        assert (summary.applied, summary.gap, summary.next_event_id) == (1, (1, 3), 1)
        assert device_overlap(index, 1) == 1

    def test_a_next_id_below_the_events_means_nothing(self, index_class: type) -> None:
        summary = index_class().apply(batch(0, stored([101], [1]), next_event_id=0))
        assert (summary.applied, summary.gap, summary.next_event_id) == (1, None, 1)

    def test_it_stays_at_the_last_id(self, index_class: type) -> None:
        index = index_class()
        index.reset_rank(RANK, 1, LAST_ID - 1, partial=False)
        assert index.apply(batch(LAST_ID - 1, stored([101], [1]), next_event_id=LAST_ID)).applied == 1
        summary = index.apply(batch(LAST_ID, stored([102], [2]), next_event_id=LAST_ID))
        assert (summary.applied, len(summary.rejected), summary.next_event_id) == (0, 1, LAST_ID)
        assert (device_overlap(index, 1), device_overlap(index, 2)) == (1, 0)

    def test_the_last_id_before_its_turn_is_a_gap(self, index_class: type) -> None:
        assert index_class().apply(batch(LAST_ID, cleared(), next_event_id=0)).gap == (0, LAST_ID)


class TestIncarnations:
    def test_a_higher_one_begins_anew(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1]), stored([1], [1], parent=999)))
        summary = index.apply(batch(0, stored([201], [2]), incarnation=2))
        assert (summary.new_incarnation, summary.incarnation, summary.next_event_id) == (True, 2, 1)
        assert (device_overlap(index, 1), device_overlap(index, 2)) == (0, 1)
        assert not index.ranks()[0].partial

    def test_so_does_a_heartbeat_of_a_higher_one(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1])))
        summary = index.apply(batch(0, incarnation=2))
        assert (summary.new_incarnation, summary.gap) == (True, None)
        assert index.stats().blocks == 0

    def test_a_lower_one_is_fenced(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1]), incarnation=2))
        summary = index.apply(batch(1, removed(101), cleared(), incarnation=1))
        assert (summary.fenced, summary.applied, summary.gap) == (2, 0, None)
        assert (summary.incarnation, summary.next_event_id) == (2, 1)
        assert index.apply(batch(0, incarnation=1)).fenced == 1
        assert device_overlap(index, 1) == 1

    def test_the_highest_one(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1]), incarnation=LAST_ID))
        assert index.apply(batch(0, stored([101], [1]), incarnation=LAST_ID - 1)).fenced == 1
        assert index.cursor(RANK) == (LAST_ID, 1)


class TestHostileInput:
    def test_unknown_parents_are_counted_and_mark_the_rank(self, index_class: type) -> None:
        index = index_class()
        summary = index.apply(batch(0, stored([102], [2], parent=101), stored([201], [5])))
        assert (summary.unknown_parents, summary.applied, summary.next_event_id) == (1, 1, 2)
        assert index.ranks()[0].partial
        assert (device_overlap(index, 2), device_overlap(index, 5)) == (0, 1)

    @pytest.mark.parametrize(
        "event",
        [
            KvEvent(tier=DEVICE),
            stored([], []),
            stored([], [], parent=101),
            stored([1, 2], [1]),
            stored([1], [1, 2]),
            stored([1], []),
            stored([], [1]),
            stored([1, 2, 1], [1, 2, 3]),
            stored([1, 2], [1, 2], parent=2),
            stored([101], [1], parent=101),
            stored([1], [1], tier=5),
            stored([1], [1], tier=-1),
            removed(),
            removed(101, tier=5),
            cleared(5),
            cleared(-1),
            stored(range(1, MAX_EVENT_BLOCKS + 2), range(1, MAX_EVENT_BLOCKS + 2)),
            removed(*range(MAX_EVENT_BLOCKS + 1)),
        ],
        ids=lambda event: str(event).replace("\n", " ")[:60],
    )
    def test_events_that_break_the_contract_are_skipped(self, index_class: type, event: KvEvent) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [9])))
        digest = index.digest(RANK)
        summary = index.apply(batch(1, event))
        assert (len(summary.rejected), summary.applied, summary.next_event_id) == (1, 0, 2)
        assert (summary.unknown_parents, summary.stored_blocks, summary.removed_blocks) == (0, 0, 0)
        assert index.ranks()[0].partial
        assert index.digest(RANK) == digest
        assert index.apply(batch(2, stored([102], [8], parent=101))).applied == 1
        assert device_overlap(index, 9, 8) == 2

    def test_a_store_of_the_largest_size_is_applied(self, index_class: type) -> None:
        index = index_class()
        summary = index.apply(batch(0, stored(range(MAX_EVENT_BLOCKS), range(MAX_EVENT_BLOCKS))))
        assert summary.stored_blocks == MAX_EVENT_BLOCKS

    def test_reasons_are_bounded(self, index_class: type) -> None:
        summary = index_class().apply(batch(0, *(removed() for _ in range(100))))
        assert (len(summary.rejected), summary.next_event_id) == (16, 100)

    @pytest.mark.parametrize("data", [b"\xff", b"\x22\x05\x08", b"\x00", b"\x08" + b"\xff" * 11, b"\x22\x02\x2a\xff"])
    def test_what_cannot_be_parsed_changes_nothing(self, index_class: type, data: bytes) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1])))
        for malformed in (data, batch(1, removed(101)) + data):
            summary = index.apply(malformed)
            assert summary.unparsable
            assert (summary.worker_id, summary.dp_rank, summary.applied) == (0, 0, 0)
        assert device_overlap(index, 1) == 1
        assert index.cursor(RANK) == (1, 1)
        assert len(index.ranks()) == 1

    def test_an_empty_message_is_a_batch_of_rank_0(self, index_class: type) -> None:
        index = index_class()
        summary = index.apply(b"")
        assert not summary.unparsable
        assert index.cursor((0, 0)) == (0, 0)

    def test_unknown_fields_are_ignored(self, index_class: type) -> None:
        index = index_class()
        varint, fixed64, text, fixed32 = (
            b"\xf8\x07\x01",
            b"\xf9\x07" + b"\0" * 8,
            b"\xfa\x07\x02hi",
            b"\xfd\x07" + b"\0" * 4,
        )
        event = stored([101], [1])
        event.event_id = 1
        data = batch(0, stored([102], [2])) + varint + fixed64 + text + fixed32 + event_on_wire(event, text + fixed32)
        assert index.apply(data).applied == 2

    def test_unpacked_and_repeated_fields_are_read_as_protobuf_has_it(self, index_class: type) -> None:
        """Repeated numbers may come one by one; of single fields and of a oneof the last counts."""
        one = b"".join(b"\x11" + engine.to_bytes(8, "little") for engine in (101, 102))
        two = b"".join(b"\x19" + local.to_bytes(8, "little") for local in (1, 2))
        chain = b"\x1a" + bytes([len(one + two)]) + one + two
        removal = b"\x22\x09\x09" + (101).to_bytes(8, "little")
        event = b"\x08\x07\x08\x00" + removal + chain
        index = index_class()
        assert index.apply(b"\x08\x05\x08\x07\x22" + bytes([len(event)]) + event).stored_blocks == 2
        assert device_overlap(index, 1, 2) == 2


def event_on_wire(event: KvEvent, more: bytes = b"") -> bytes:
    """One more event of a batch, as it is on the wire."""
    encoded = event.SerializeToString() + more
    assert len(encoded) < 128
    return b"\x22" + bytes([len(encoded)]) + encoded


class TestDigest:
    def test_is_the_sum_over_entries(self, index_class: type) -> None:
        index = index_class()
        assert index.digest(RANK) is None
        index.apply(batch(0, stored([101, 102], [1, 2]), stored([101], [1], tier=HOST), stored([101], [1], tier=HOST)))
        first, second = places([1, 2])
        expected = digest_of((101, first, DEVICE, 1), (101, first, HOST, 2), (102, second, DEVICE, 1))
        assert index.digest(RANK) == expected

    def test_heartbeats_are_compared(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1])))
        assert not index.apply(batch(1, digest=digest_of((101, 1, DEVICE, 1)))).digest_differs
        assert index.apply(batch(1, digest=5)).digest_differs
        assert not index.apply(batch(1)).digest_differs, "without a digest"
        assert not index.apply(batch(0, digest=5)).digest_differs, "of an earlier moment"
        assert not index.apply(batch(2, digest=5)).digest_differs, "of a later moment"

    def test_partial_ranks_are_not_compared(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1])))
        index.mark_partial(RANK, True)
        assert not index.apply(batch(1, digest=5)).digest_differs
        index.mark_partial(RANK, False)
        assert index.apply(batch(1, digest=5)).digest_differs

    def test_events_are_compared_on_request(self, index_class: type) -> None:
        data = batch(0, stored([101], [1]), digest=5)
        assert not index_class().apply(data).digest_differs
        assert index_class(check_digests=True).apply(data).digest_differs
        right = batch(0, stored([101], [1]), digest=digest_of((101, 1, DEVICE, 1)))
        assert not index_class(check_digests=True).apply(right).digest_differs

    def test_a_batch_with_a_gap_is_not_compared(self, index_class: type) -> None:
        summary = index_class(check_digests=True).apply(batch(5, cleared(), next_event_id=0, digest=9))
        assert (summary.gap, summary.digest_differs) == ((0, 5), False)

    def test_an_empty_rank_has_digest_0(self, index_class: type) -> None:
        index = index_class()
        assert not index.apply(batch(0, digest=0)).digest_differs
        assert index.apply(batch(0, digest=1)).digest_differs


class TestRanks:
    def test_infos(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1]), stored([101], [1], tier=HOST), rank=(9, 0), incarnation=4))
        index.apply(batch(0, stored([102, 103], [1, 2]), rank=(2, 1)))
        index.apply(batch(0, rank=(2, 0)))
        infos = index.ranks()
        assert [tuple(info[:5]) for info in infos] == [(2, 0, 1, 0, 0), (2, 1, 1, 1, 2), (9, 0, 4, 2, 2)]
        assert [info.partial for info in infos] == [False] * 3
        assert infos[1].memory_bytes > infos[0].memory_bytes >= 0
        stats = index.stats()
        assert (stats.ranks, stats.blocks, stats.distinct_blocks) == (3, 4, 2)
        assert stats.memory_bytes > 0

    def test_reset_replaces_by_an_empty_one(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101, 102], [1, 2]), stored([101], [1], tier=HOST)))
        assert index.reset_rank(RANK, 1, 7) == 3
        assert index.cursor(RANK) == (1, 7)
        assert index.ranks()[0].partial
        assert (index.digest(RANK), index.stats().blocks) == (0, 0)
        assert index.apply(batch(7, stored([103], [3]))).applied == 1
        assert index.reset_rank(RANK, 5, 0, partial=False) == 1
        assert index.apply(batch(8, removed(103))).fenced == 1
        assert not index.ranks()[0].partial

    def test_reset_makes_an_unknown_rank_known(self, index_class: type) -> None:
        index = index_class()
        assert index.reset_rank(RANK, 3, 4, partial=False) == 0
        assert index.cursor(RANK) == (3, 4)
        assert matches(index, [1]) == {RANK: (0,) * 4}

    @pytest.mark.parametrize("cursor", [(-1, 0), (0, -1), (1 << 64, 0), (0, 1 << 64)])
    def test_reset_refuses_what_is_no_cursor(self, index_class: type, cursor: tuple[int, int]) -> None:
        index = index_class()
        with pytest.raises(OverflowError):
            index.reset_rank(RANK, *cursor)
        assert index.ranks() == []

    def test_remove_forgets(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1]), incarnation=5))
        index.apply(batch(0, stored([101], [1]), rank=OTHER))
        assert index.remove_rank(RANK) == 1
        assert index.remove_rank(RANK) == 0
        assert (index.cursor(RANK), index.digest(RANK)) == (None, None)
        assert matches(index, [1]) == {OTHER: (1,) * 4}
        assert index.apply(batch(0, stored([101], [1]), incarnation=1)).applied == 1

    def test_unknown_ranks_are_left_alone(self, index_class: type) -> None:
        index = index_class()
        index.mark_partial(RANK, True)
        assert (index.cursor(RANK), index.ranks(), list(index.dump_rank(RANK))) == (None, [], [])

    def test_a_rank_keeps_its_slot(self, index_class: type) -> None:
        index = index_class()
        ranks = [(worker, dp) for worker in (5, 1) for dp in (0, 1)]
        for rank in ranks:
            index.apply(batch(0, stored([101], [1]), rank=rank))
        at = {rank: slot for slot, rank in enumerate(index.slots()) if rank is not None}
        assert sorted(at) == sorted(ranks)
        index.remove_rank((5, 0))
        index.apply(batch(0, stored([101], [1]), rank=(9, 9)))
        index.apply(batch(0, rank=(5, 1), incarnation=2))
        index.reset_rank((1, 0), 3, 0)
        index.load_rank(list(index.dump_rank((1, 1))))
        slots = index.slots()
        assert [slots[at[rank]] for rank in ranks[1:]] == ranks[1:]
        assert sorted(rank for rank in slots if rank) == sorted([*ranks[1:], (9, 9)])
        assert matches(index, [1])[9, 9] == (1,) * 4

    def test_free_slots_are_taken_again(self, index_class: type) -> None:
        index = index_class()
        for worker in range(100):
            index.apply(batch(0, stored([101], [1]), rank=(worker, 0)))
            index.remove_rank((worker, 0))
        index.apply(batch(0, stored([101], [1])))
        assert len(index.slots()) <= 4
        assert matches(index, [1]) == {RANK: (1,) * 4}


class TestQueries:
    def test_prompts_are_whole_hashes(self, index_class: type) -> None:
        index = index_class()
        for query in (index.find_matches, index.overlaps):
            with pytest.raises(ValueError):
                query(b"1234567")

    def test_tokens(self, index_class: type) -> None:
        tokens, scope = list(range(40)), Scope("adapter", "salt")
        index = index_class()
        for rank, one in ((RANK, Scope()), (OTHER, scope)):
            local = unpacked(local_hashes(tokens, 16, one))
            index.apply(batch(0, stored([101, 102], local), rank=rank))
        slots = index.slots()
        plain = index.overlaps_of_tokens(tokens, 16)
        scoped = index.overlaps_of_tokens(tokens, 16, scope, 2)
        assert plain == b"".join((2 if rank == RANK else 0).to_bytes(4, "little") for rank in slots)
        assert scoped == b"".join((2 if rank == OTHER else 0).to_bytes(4, "little") for rank in slots)

    def test_answers_carry_the_cursor(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101], [1]), stored([5], [5], parent=77), incarnation=LAST_ID))
        answer = FindMatchesResponse.FromString(index.find_matches(packed([1, 2])))
        assert list(answer.incarnations) == [LAST_ID]
        assert list(answer.next_event_ids) == [2]
        assert list(answer.partial) == [True]
        assert answer.prompt_blocks == 2


class TestBounds:
    def test_the_rank_that_goes_over_is_emptied(self, index_class: type) -> None:
        index = index_class(max_blocks=4)
        index.apply(batch(0, stored([101, 102], [1, 2])))
        index.apply(batch(0, stored([101, 102], [1, 2]), rank=OTHER))
        summary = index.apply(batch(1, stored([103], [3], parent=102), stored([104], [4]), removed(1), rank=OTHER))
        assert (summary.applied, summary.stored_blocks, summary.next_event_id) == (3, 0, 4)
        assert (summary.unknown_parents, summary.unknown_removals) == (0, 0)
        assert matches(index, [1, 2]) == {RANK: (2,) * 4, OTHER: (0,) * 4}
        assert [info.partial for info in index.ranks()] == [False, True]
        assert index.digest(OTHER) == 0

    def test_it_stays_empty_and_partial(self, index_class: type) -> None:
        index = index_class(max_blocks=2)
        index.apply(batch(0, stored([101, 102, 103], [1, 2, 3])))
        index.mark_partial(RANK, False)
        summary = index.apply(
            batch(1, stored([104], [4]), stored([105], [5], parent=99), stored([1], []), cleared(DEVICE))
        )
        assert (summary.applied, len(summary.rejected), summary.next_event_id) == (3, 1, 5)
        assert index.stats().blocks == 0
        assert index.ranks()[0].partial

    @pytest.mark.parametrize("way", ["cleared", "reset", "incarnation", "load"])
    def test_until_it_begins_again(self, index_class: type, way: str) -> None:
        index = index_class(max_blocks=2)
        index.apply(batch(0, stored([101, 102, 103], [1, 2, 3])))
        incarnation, event_id = 1, 1
        if way == "cleared":
            index.apply(batch(1, cleared()))
            event_id = 2
        elif way == "reset":
            index.reset_rank(RANK, 1, 1, partial=False)
        elif way == "incarnation":
            incarnation, event_id = 2, 0
        else:
            small = index_class()
            small.apply(batch(0, stored([101], [1])))
            assert index.load_rank(small.dump_rank(RANK)) == 1
        summary = index.apply(batch(event_id, stored([105], [5]), incarnation=incarnation))
        assert summary.stored_blocks == 1
        assert device_overlap(index, 5) == 1
        assert not index.ranks()[0].partial

    def test_up_to_the_bound_is_within_it(self, index_class: type) -> None:
        index = index_class(max_blocks=3)
        index.apply(batch(0, stored([101, 102, 103], [1, 2, 3]), stored([101], [1]), stored([103], [7])))
        assert index.stats().blocks == 3

    def test_a_load_over_the_bound_keeps_the_cursor(self, index_class: type) -> None:
        source = index_class()
        source.apply(batch(0, stored([101, 102, 103], [1, 2, 3])))
        index = index_class(max_blocks=2)
        assert index.load_rank(source.dump_rank(RANK)) == 0
        assert index.cursor(RANK) == (1, 1)
        assert index.ranks()[0].partial

    def test_memory(self, index_class: type) -> None:
        bound = 4 << 20
        index = index_class(max_bytes=bound)
        for number in range(1000):
            hashes = range(number * 1000, (number + 1) * 1000)
            summary = index.apply(batch(number, stored(hashes, hashes)))
            assert summary.applied == 1
            assert index.stats().memory_bytes <= bound
            if index.ranks()[0].partial:
                break
        assert (summary.stored_blocks, index.stats().blocks, index.ranks()[0].partial) == (0, 0, True)

    def test_unbounded_by_default(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored(range(50_000), range(50_000))))
        assert entries(dumped(index)).keys() == set(range(50_000))
        assert not index.ranks()[0].partial
