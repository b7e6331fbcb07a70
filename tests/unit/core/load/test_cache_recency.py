"""How recently cached blocks were used: the native core and the reference answer every call alike."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from kvrouter.core import CachedRank, reference

from ..batches import packed
from ..conftest import implementation

RANKS = [(1, 0), (2, 0), (2, 1)]


def chances(recency: Any, now: float, count: int) -> list[float]:
    return list(np.ndarray((count,), np.float64, recency.reuse_chance(now)))


@st.composite
def fleets(draw: st.DrawFn) -> list[CachedRank]:
    ranks = draw(st.lists(st.sampled_from(RANKS), unique=True))
    return [CachedRank(rank, draw(st.integers(1, 2)), draw(st.sampled_from([0, 1, 7, 40, 900]))) for rank in ranks]


PROMPTS = st.builds(
    lambda start, count, step: [start + step * each for each in range(count)],
    st.integers(0, 60),
    st.integers(0, 12),
    st.sampled_from([1, 3, 8]),
)
CALLS = st.one_of(
    fleets(),
    st.tuples(st.sampled_from([*RANKS, (9, 9)]), PROMPTS, st.sampled_from([0.0, 0.001, 0.7, 3.0, 1e4])),
    st.sampled_from([0.0, 0.5, 6.0, -1.0]),
)


@settings(max_examples=300, deadline=None)
@given(st.tuples(st.integers(1, 8), st.integers(1, 16), st.integers(1, 8)), fleets(), st.lists(CALLS, max_size=40))
def test_histories_are_answered_alike(samples: tuple[int, int, int], first: list[CachedRank], calls: list[Any]) -> None:
    native = implementation("native", "CacheRecency").CacheRecency(*samples)
    expected = reference.CacheRecency(*samples)
    now, count = 0.0, 0
    for call in (first, *calls):
        if isinstance(call, list):
            count = len(call)
            for recency in (native, expected):
                recency.set_ranks(call)
        elif isinstance(call, tuple):
            rank, blocks, seconds = call
            now += seconds
            for recency in (native, expected):
                recency.record(rank, packed(blocks), now)
        else:
            now += max(call, 0.0)
            ours, theirs = (chances(recency, now + min(call, 0.0), count) for recency in (native, expected))
            assert ours == pytest.approx(theirs, abs=1e-9)
        assert len(native) == len(expected)


def test_unused_blocks_lower_the_mean_of_a_cache(core: ModuleType) -> None:
    recency = core.CacheRecency()
    recency.set_ranks([CachedRank((1, 0), 1, 10), CachedRank((2, 0), 1, 40), CachedRank((3, 0), 1, 0)])
    assert chances(recency, 0.0, 3) == [0.0, 0.0, 0.0]
    for number in range(1, 9):
        for worker in (1, 2, 3):
            recency.record((worker, 0), packed(list(range(10))), 10.0 * number)
    full, quarter, unknown = chances(recency, 82.0, 3)
    assert full == pytest.approx(4 * quarter)
    assert full > 0.5
    assert unknown == 0.0


def test_a_row_is_the_same_object_until_a_number_changes(core: ModuleType) -> None:
    recency = core.CacheRecency()
    recency.set_ranks([CachedRank((1, 0), 1, 10)])
    row = recency.reuse_chance(0.0)
    assert recency.reuse_chance(5.0) is row
    for number in range(1, 9):
        recency.record((1, 0), packed(list(range(10))), 10.0 * number)
    changed = recency.reuse_chance(82.0)
    assert changed != row
    assert recency.reuse_chance(82.0) is changed
    recency.set_ranks([CachedRank((1, 0), 1, 10), CachedRank((2, 0), 1, 10)])
    assert len(recency.reuse_chance(83.0)) == 2 * 8


def test_blocks_evict_the_least_recently_used_ones(core: ModuleType) -> None:
    recency = core.CacheRecency()
    recency.set_ranks([CachedRank((1, 0), 1, 4), CachedRank((2, 0), 1, 8)])
    for worker in (1, 2):
        for number in range(20):
            recency.record((worker, 0), packed([1, 2, 3, 4]), float(number))
        recency.record((worker, 0), packed([11, 12, 13, 14]), 1e6)
    small, large = chances(recency, 1e6, 2)
    assert small > large > 0.0, "the small cache holds recent blocks only"


def test_blocks_that_come_back_have_a_higher_chance(core: ModuleType) -> None:
    recency = core.CacheRecency()
    recency.set_ranks([CachedRank((1, 0), 1, 4), CachedRank((2, 0), 1, 4)])
    for number in range(50):
        recency.record((1, 0), packed([1, 2, 3, 4]), 10.0 * number)
        recency.record((2, 0), packed([1000 + number]), 10.0 * number)
    often, once = chances(recency, 492.0, 2)
    assert often > 0.5 > once > 0.0


def test_a_restarted_rank_is_empty_and_another_keeps_its_blocks(core: ModuleType) -> None:
    recency = core.CacheRecency()
    recency.set_ranks([CachedRank((1, 0), 1, 10), CachedRank((2, 0), 1, 10)])
    for rank in ((1, 0), (2, 0)):
        recency.record(rank, packed([1, 2, 3, 4]), 0.0)
        recency.record(rank, packed([1, 2, 3, 4]), 1.0)
    recency.set_ranks([CachedRank((1, 0), 2, 10), CachedRank((2, 0), 1, 20)])
    restarted, other = chances(recency, 1.0, 2)
    assert restarted == 0.0 < other


def test_samples_keep_their_bounds(core: ModuleType) -> None:
    recency = core.CacheRecency(rank_sample=8, max_sample=64, history_sample=16)
    ranks = [CachedRank((worker, 0), 1, 1024) for worker in range(32)]
    recency.set_ranks(ranks)
    for number in range(40):
        recency.record((number % 32, 0), packed([(512 * number + each) for each in range(512)]), float(number))
    assert len(recency) <= 64 + 16


def test_invalid_arguments_are_refused(core: ModuleType) -> None:
    with pytest.raises(ValueError, match="1 block or more"):
        core.CacheRecency(0)
    with pytest.raises(ValueError, match="bytes"):
        core.CacheRecency().record((1, 0), b"123", 0.0)
