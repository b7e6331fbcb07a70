"""What a prefix index does with events, for every implementation."""

from __future__ import annotations

import pytest

from ..batches import (
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
    event_on_wire,
    matches,
    places,
    removed,
    stored,
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

    def test_removals_of_missing_blocks_are_counted(self, index_class: type) -> None:
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
