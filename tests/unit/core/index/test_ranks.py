"""Digests, ranks, slots, queries and bounds of a prefix index, for every implementation."""

from __future__ import annotations

import gc
from types import ModuleType

import pytest
from kvrouter.v1.indexer_pb2 import FindMatchesResponse

from ..batches import (
    DEVICE,
    HOST,
    LAST_ID,
    RANK,
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
)

OTHER = (7, 1)


class TestDigest:
    def test_is_the_sum_over_entries(self, index_class: type) -> None:
        index = index_class()
        assert index.digest(RANK) is None
        index.apply(batch(0, stored([101, 102], [1, 2]), stored([101], [1], tier=HOST), stored([101], [1], tier=HOST)))
        first, second = places([1, 2])
        expected = digest_of((101, first, DEVICE, 1), (101, first, HOST, 2), (102, second, DEVICE, 1))
        assert index.digest(RANK) == expected

    def test_follows_every_change(self, index_class: type) -> None:
        index = index_class(max_blocks=2)
        one, both = (digest_of((101, 1, DEVICE, copies)) for copies in (1, 2))
        index.apply(batch(0, stored([101], [1])))
        assert (index.digest(RANK), index.digest(RANK)) == (one, one)
        index.apply(batch(1, stored([101], [1])))
        assert index.digest(RANK) == both
        dump = list(index.dump_rank(RANK))
        index.apply(batch(2, removed(101)))
        assert index.digest(RANK) == one
        index.load_rank(dump)
        assert index.digest(RANK) == both
        index.apply(batch(0, incarnation=2))
        assert index.digest(RANK) == 0
        index.apply(batch(0, stored([101, 102], [1, 2]), incarnation=2))
        assert index.digest(RANK) != 0
        index.apply(batch(0, stored([201], [1]), rank=OTHER))
        assert (index.digest(RANK), index.digest(OTHER)) == (0, digest_of((201, 1, DEVICE, 1))), "evicted"
        index.reset_rank(OTHER, 2, 0)
        assert index.digest(OTHER) == 0

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
        index.reset_rank(RANK, 1, 1)
        assert not index.apply(batch(1, digest=5)).digest_differs
        index.reset_rank(RANK, 1, 1, partial=False)
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

    def test_an_unknown_rank_has_nothing(self, index_class: type) -> None:
        index = index_class()
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

    def test_shared_storage_has_what_any_rank_stored_there(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored([101, 102], [1, 2]), stored([101], [1], tier=SHARED)))
        assert index.pooled(packed([1, 2, 3])) == 1
        further = (stored([2], [2], parent=1, tier=SHARED), stored([3], [3], parent=2, tier=SHARED))
        index.apply(batch(0, stored([1], [1]), *further, rank=OTHER))
        assert index.pooled(packed([1, 2, 3, 4])) == 3, "the first block is one rank's, the others are another's"
        assert matches(index, [1, 2, 3]) == {RANK: (2, 2, 2, 2), OTHER: (1, 1, 1, 3)}
        answer = FindMatchesResponse.FromString(index.find_matches(packed([1, 2, 3, 4])))
        assert answer.pooled_blocks == 3
        index.apply(batch(2, removed(101, tier=SHARED)))
        assert index.pooled(packed([1, 2, 3])) == 0

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

    def test_memory(self, core: ModuleType) -> None:
        bound = 4 << 20
        index = core.PrefixIndex(budget=core.MemoryBudget(bound))
        for number in range(1000):
            hashes = range(number * 1000, (number + 1) * 1000)
            summary = index.apply(batch(number, stored(hashes, hashes)))
            assert summary.applied == 1
            assert index.stats().memory_bytes <= bound
            if index.ranks()[0].partial:
                break
        assert (summary.stored_blocks, index.stats().blocks, index.ranks()[0].partial) == (0, 0, True)

    def test_indexes_that_share_a_budget_count_against_it_together(self, core: ModuleType) -> None:
        budget = core.MemoryBudget(4 << 20)
        first, second = core.PrefixIndex(budget=budget), core.PrefixIndex(budget=budget)
        filled = 0
        while budget.used_bytes < budget.max_bytes // 2:
            hashes = range(filled * 1000, (filled + 1) * 1000)
            assert first.apply(batch(filled, stored(hashes, hashes))).evicted_blocks is None
            filled += 1
        for number in range(10 * filled):
            hashes = range(number * 1000, (number + 1) * 1000)
            summary = second.apply(batch(number, stored(hashes, hashes)))
            assert budget.used_bytes <= budget.max_bytes
            if summary.evicted_blocks is not None:
                break
        assert summary.evicted_blocks >= 1000
        assert second.is_evicted(RANK)
        assert not first.is_evicted(RANK)
        assert first.stats().blocks == filled * 1000
        assert budget.used_bytes == first.stats().memory_bytes + second.stats().memory_bytes

    def test_an_index_that_is_gone_frees_its_part_of_the_budget(self, core: ModuleType) -> None:
        budget = core.MemoryBudget()
        index = core.PrefixIndex(budget=budget)
        index.apply(batch(0, stored(range(1000), range(1000))))
        assert budget.used_bytes == index.stats().memory_bytes
        del index
        gc.collect()
        assert budget.used_bytes == 0

    def test_an_eviction_is_reported_once_with_the_blocks_it_dropped(self, index_class: type) -> None:
        index = index_class(max_blocks=2)
        assert index.apply(batch(0, stored([101, 102], [1, 2]))).evicted_blocks is None
        assert index.apply(batch(1, stored([103], [3]))).evicted_blocks == 3
        assert index.apply(batch(2, stored([104], [4]))).evicted_blocks is None
        assert (index.is_evicted(RANK), index.ranks()[0].evicted) == (True, True)
        index.apply(batch(3, cleared()))
        assert (index.is_evicted(RANK), index.ranks()[0].evicted) == (False, False)
        assert not index.is_evicted((9, 9))

    def test_unbounded_by_default(self, index_class: type) -> None:
        index = index_class()
        index.apply(batch(0, stored(range(50_000), range(50_000))))
        assert entries(dumped(index)).keys() == set(range(50_000))
        assert not index.ranks()[0].partial


class TestFairness:
    """Who is emptied when the index is full: whoever holds most, not who happens to store a block then."""

    def test_the_flooding_rank_is_evicted_and_the_honest_one_stays(self, index_class: type) -> None:
        index = index_class(max_blocks=10)
        flood = range(1, 8)
        index.apply(batch(0, stored(flood, flood), rank=(1, 0)))
        index.apply(batch(0, stored([101, 102, 103], [1, 2, 3]), rank=(2, 0)))
        summary = index.apply(batch(1, stored([104], [9]), rank=(2, 0)))
        assert (summary.evicted_blocks, summary.evicted_others) == (None, ((1, 0, 7),))
        assert summary.stored_blocks == 1
        assert [info.evicted for info in index.ranks()] == [True, False]
        assert index.stats().blocks == 4

    def test_a_worker_with_many_small_ranks_loses_one_of_them(self, index_class: type) -> None:
        index = index_class(max_blocks=10)
        for dp_rank, blocks in enumerate((2, 3, 2)):
            index.apply(batch(0, stored(range(1, 1 + blocks), range(blocks)), rank=(1, dp_rank)))
        index.apply(batch(0, stored([101, 102, 103], [1, 2, 3]), rank=(2, 0)))
        summary = index.apply(batch(1, stored([104], [9]), rank=(2, 0)))
        assert (summary.evicted_blocks, summary.evicted_others) == (None, ((1, 1, 3),))

    def test_a_rank_that_grows_beyond_what_is_left_is_evicted_too(self, index_class: type) -> None:
        index = index_class(max_blocks=4)
        for dp_rank in range(3):
            index.apply(batch(0, stored([1], [1]), rank=(1, dp_rank)))
        summary = index.apply(batch(0, stored([5, 6], [5, 6]), rank=(2, 0)))
        assert (summary.evicted_blocks, summary.evicted_others) == (None, ((1, 0, 1),))
        summary = index.apply(batch(1, stored([7, 8, 9], [7, 8, 9]), rank=(2, 0)))
        assert (summary.evicted_blocks, summary.evicted_others) == (5, ())

    def test_a_load_evicts_whoever_holds_most(self, index_class: type) -> None:
        source = index_class()
        source.apply(batch(0, stored([101, 102, 103], [1, 2, 3]), rank=(2, 0)))
        index = index_class(max_blocks=10)
        index.apply(batch(0, stored(range(1, 10), range(9)), rank=(1, 0)))
        assert index.load_rank(source.dump_rank((2, 0))) == 3
        assert [info.evicted for info in index.ranks()] == [True, False]

    def test_of_equals_the_one_that_grows_is_evicted(self, index_class: type) -> None:
        index = index_class(max_blocks=5)
        index.apply(batch(0, stored([1, 2, 3], [1, 2, 3]), rank=(1, 0)))
        index.apply(batch(0, stored([1, 2], [1, 2]), rank=(2, 0)))
        summary = index.apply(batch(1, stored([4], [4]), rank=(2, 0)))
        assert (summary.evicted_blocks, summary.evicted_others) == (3, ())
