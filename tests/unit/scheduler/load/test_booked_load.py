"""Load is exact whatever happens to bookings, in whatever order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kvrouter.core import CachedRank, Rank
from kvrouter.runtime.booking_updates import Key, key_of
from kvrouter.scheduler.load.booked_load import Accounting, BookedLoad, Expected
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.v1.common_pb2 import BookingKey, Stage
from kvrouter.v1.errors import TooLarge
from msgspec.structs import replace

from ..harness import BLOCK, prompt, view, worker

WHOLE = Stage.STAGE_WHOLE


def key(number: int, stage: Stage = WHOLE) -> Key:
    return (f"r{number}", 0, stage)


def booked_load(accounting: Accounting | None = None, **limits: int) -> BookedLoad:
    manager = BookedLoad(BLOCK, accounting or Accounting(), **limits)
    manager.set_ranks([CachedRank((1, 0), 1, 0), CachedRank((2, 0), 1, 0)])
    return manager


@dataclass
class Booked:
    rank: Rank
    prompt: Prompt
    prefill: int
    output: int = 0


class Load(RuleBasedStateMachine):
    """The slots against sums over a list of what is booked."""

    keys = st.integers(0, 12)
    ranks = st.sampled_from([(1, 0), (1, 1), (2, 0)])

    def __init__(self) -> None:
        super().__init__()
        self.booked_load = BookedLoad(BLOCK, Accounting())
        self.live: dict[Key, Booked] = {}
        self.registered: set[Rank] = set()

    @rule(ranks=st.sets(ranks))
    def register(self, ranks: set[Rank]) -> None:
        self.registered = ranks
        self.booked_load.set_ranks([CachedRank(rank, 1, 0) for rank in ranks])

    @rule(number=keys, rank=ranks, blocks=st.integers(0, 4), seed=st.integers(0, 1), tail=st.integers(1, BLOCK - 1))
    def book(self, number: int, rank: Rank, blocks: int, seed: int, tail: int) -> None:
        wanted = prompt(blocks, seed=seed, tail=tail)
        fresh = key(number) not in self.live
        assert self.booked_load.book(key(number), rank, wanted, wanted.tokens) == fresh
        if fresh:
            self.live[key(number)] = Booked(rank, wanted, wanted.tokens)

    @rule(number=keys)
    def prefill(self, number: int) -> None:
        booked = self.live.get(key(number))
        assert self.booked_load.prefill_complete(key(number)) == (booked is not None)
        if booked:
            booked.prefill = 0

    @rule(number=keys, count=st.integers(0, 100))
    def output(self, number: int, count: int) -> None:
        booked = self.live.get(key(number))
        assert self.booked_load.output_tokens(key(number), count) == (booked is not None)
        if booked:
            booked.output = max(booked.output, count)

    @rule(number=keys)
    def free(self, number: int) -> None:
        booked = self.live.pop(key(number), None)
        assert self.booked_load.free(key(number)) == (booked is not None)

    @invariant()
    def loads_are_sums(self) -> None:
        loads = self.booked_load.load_by_rank()
        assert set(loads) == self.registered | {booked.rank for booked in self.live.values()}
        for rank, load in loads.items():
            here = [booked for booked in self.live.values() if booked.rank == rank]
            shared = {
                booked.prompt.sequence_hashes[at : at + 8]
                for booked in here
                for at in range(0, len(booked.prompt.sequence_hashes), 8)
            }
            private = sum(-(-(b.prompt.tokens + b.output) // BLOCK) - b.prompt.blocks for b in here)
            assert load[:3] == (len(shared) + private, sum(b.prefill for b in here), len(here))
        assert len(self.booked_load) == len(self.live)


Load.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLoad = Load.TestCase


def test_blocks_of_the_request_are_added_unless_they_are_active() -> None:
    manager = booked_load()
    manager.book(key(1), (1, 0), prompt(4), 64)
    loads = manager.loads(prompt(6, tail=3))
    assert loads.active_blocks.tolist() == [7, 7]
    assert loads.leading_active_blocks.tolist() == [4, 0]


def test_without_reuse_requests_share_no_blocks() -> None:
    manager = booked_load(Accounting(assume_kv_reuse=False))
    manager.book(key(1), (1, 0), prompt(4, tail=1), 65)
    manager.book(key(2), (1, 0), prompt(4, tail=1), 65)
    assert manager.load_by_rank()[1, 0].active_blocks == 10
    assert manager.loads(prompt(4, tail=1)).active_blocks.tolist() == [15, 5]


def test_each_sequence_of_a_request_counts_until_it_is_freed() -> None:
    load = booked_load()
    load.book(key(1), (1, 0), replace(prompt(2), sequences=5), 0)
    load.book(key(2), (1, 0), prompt(2), 0)
    load.book(key(2), (1, 0), replace(prompt(2), sequences=9), 0)
    assert load.loads().requests.tolist() == [6, 0]
    assert load.load_by_rank()[1, 0].requests == 6
    assert load.most_booked((1, 0)) == 6
    load.free(key(1))
    assert load.loads().requests.tolist() == [1, 0]
    load.free(key(2))
    assert load.loads().requests.tolist() == [0, 0]


def test_untracked_blocks_do_not_count() -> None:
    manager = booked_load(Accounting(track_active_blocks=False))
    manager.book(key(1), (1, 0), prompt(4), 64)
    loads = manager.loads(prompt(4))
    assert (loads.active_blocks[0], loads.prefill_tokens[0], loads.requests[0]) == (0, 64, 1)


def test_prefill_stages_leave_no_blocks_in_use() -> None:
    manager = booked_load()
    manager.book(key(1, Stage.STAGE_PREFILL), (1, 0), prompt(4), 64)
    assert manager.load_by_rank()[1, 0][:3] == (0, 64, 1)
    assert manager.loads(prompt(4), Stage.STAGE_PREFILL).active_blocks[1] == 0


def test_output_counts_only_if_it_is_tracked() -> None:
    for tracked, blocks in ((True, 6), (False, 4)):
        manager = booked_load(Accounting(track_output_blocks=tracked))
        manager.book(key(1), (1, 0), prompt(4), 64)
        assert manager.output_tokens(key(1), 17)
        assert not manager.output_tokens(key(2), 17)
        assert manager.load_by_rank()[1, 0].active_blocks == blocks


def test_bookings_have_a_bound() -> None:
    manager = booked_load(max_bookings=1)
    manager.book(key(1), (1, 0), prompt(1), 16)
    with pytest.raises(TooLarge):
        manager.book(key(2), (1, 0), prompt(1), 16)
    manager.free(key(1))
    assert manager.book(key(2), (1, 0), prompt(1), 16)


def test_a_failed_booking_leaves_no_rank_behind() -> None:
    manager = booked_load(max_bookings=1)
    manager.book(key(1), (1, 0), prompt(1), 16)
    with pytest.raises(TooLarge):
        manager.book(key(2), (9, 0), prompt(1), 16)
    assert (9, 0) not in manager.load_by_rank()


def test_an_unspecified_stage_is_the_whole_request() -> None:
    assert key_of(BookingKey(request_id="a", attempt=2)) == ("a", 2, Stage.STAGE_WHOLE)


def test_the_prompt_under_computation_is_the_oldest_without_a_first_token() -> None:
    now = 0.0
    load = BookedLoad(BLOCK, Accounting(), clock=lambda: now)
    load.set_ranks([CachedRank((1, 0), 1, 0)])

    def head() -> tuple[int, float, int]:
        loads = load.loads()
        return int(loads.head_prefill_tokens[0]), float(loads.head_prefill_seconds[0]), int(loads.prefill_requests[0])

    assert head() == (0, 0.0, 0)
    for tokens in (100, 200, 0):
        now += 1.0
        load.book(key(tokens), (1, 0), prompt(20), tokens)
    assert head() == (100, 2.0, 2)
    now = 4.0
    load.prefill_complete(key(100))
    load.prefill_complete(key(0))
    now = 4.5
    assert head() == (200, 0.5, 1)
    load.free(key(100))
    assert head() == (200, 0.5, 1)
    now = 6.0
    load.free(key(200))
    assert head() == (0, 0.0, 0)


@pytest.mark.parametrize("prefilled", [False, True])
def test_only_a_first_token_teaches_how_fast_a_rank_is(prefilled: bool) -> None:
    now = 0.0
    load = BookedLoad(BLOCK, Accounting(), clock=lambda: now)
    load.set_ranks([CachedRank((1, 0), 1, 0)])
    for number in range(2):
        load.book(key(number), (1, 0), prompt(40), 40 * BLOCK, expected=Expected(100.0, computes=True))
    now = 1.0
    for number in range(2):
        load.free(key(number), prefilled=prefilled)
    assert (load.latency_calibration.value > 1) == prefilled
    assert load.prefill_times.measured_prompts == prefilled, "the second prompt waited for the first"


def test_chances_of_reuse_that_are_set_count_where_no_size_is_known() -> None:
    load = BookedLoad(BLOCK, Accounting())
    load.set_ranks([CachedRank((1, 0), 1, 0), CachedRank((2, 0), 1, 0)])
    assert list(load.reuse_chance()) == [0, 0]
    load.set_reuse_chance(np.array([0, 0.5]))
    assert list(load.reuse_chance()) == [0, 0.5]
    load.set_ranks([CachedRank((1, 0), 1, 0), CachedRank((2, 0), 1, 8)])
    load.set_reuse_chance(np.array([0.5, 0]))
    assert list(load.reuse_chance()) == [0, 0]


def test_booked_prompts_fill_the_caches_of_their_ranks() -> None:
    now = 0.0
    load = BookedLoad(BLOCK, Accounting(), clock=lambda: now)
    load.set_ranks([CachedRank((1, 0), 1, 8), CachedRank((2, 0), 1, 100), CachedRank((3, 0), 1, 0)])
    assert list(load.reuse_chance()) == [0, 0, 0]
    for number, rank in enumerate([(1, 0), (2, 0), (3, 0), (9, 9)]):
        load.book(key(number), rank, prompt(6, seed=number), 6 * BLOCK)
    for number in range(4):
        load.free(key(number))
    now = 5.0
    load.book(key(5), (2, 0), prompt(6, seed=1), 6 * BLOCK)
    small, large, unknown = load.reuse_chance()
    assert small > large > unknown == 0.0, "blocks stay when their requests end"
    load.set_ranks([CachedRank((1, 0), 2, 8), CachedRank((2, 0), 1, 100)])
    restarted, large = load.reuse_chance()
    assert large > restarted == 0.0, "a restarted rank has an empty cache"


def test_a_rank_of_a_restarted_worker_is_as_fast_as_its_component_again() -> None:
    registered = [worker(1), worker(2), worker(3)]
    pool = Pool(view(*registered), Accounting(), report_age_seconds=5.0, clock=lambda: 1.0)
    load = pool.booked_load
    for _ in range(50):
        for rank in pool.worker_set.ranks:
            speed = load.latency_calibration.speed(rank, 0.0)
            load.latency_calibration.learn(300.0 if rank == (1, 0) else 100.0, 100.0, speed, 0.0)
    assert load.relative_latency()[0] > 1.5
    pool.follow(view(worker(1, incarnation=2), *registered[1:]))
    assert load.relative_latency().tolist() == [1.0] * 3
