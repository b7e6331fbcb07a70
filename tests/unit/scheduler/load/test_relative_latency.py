"""Relative latency: what first tokens say of a rank's speed, and what chance may not say."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, strategies as st
from kvrouter.core import Rank
from kvrouter.scheduler.load.booked_load import Accounting
from kvrouter.scheduler.load.latency import HALF_LIFE_S, WIDEST, WINDOW, LatencyCalibration, RankSpeed, RelativeLatency
from kvrouter.scheduler.load.pools import Pool

from ..harness import view, worker

RANKS: list[Rank] = [(1, 0), (2, 0), (3, 0), (3, 1)]


def of_ranks(incarnation: int = 1) -> RelativeLatency:
    relative = RelativeLatency()
    relative.set_ranks((rank, incarnation) for rank in RANKS)
    return relative


def observe(relative: RelativeLatency, rank: Rank, *ratios: float, now: float = 0.0) -> None:
    mean = relative.of(rank, now).mean
    assert mean is not None
    for ratio in ratios:
        relative.observe(mean, ratio, now)


def column(relative: RelativeLatency, now: float = 1.0) -> list[float]:
    values: list[float] = relative.column(now).tolist()
    return values


def test_without_first_tokens_every_rank_has_the_speed_of_the_component() -> None:
    assert column(of_ranks()) == [1.0] * 4
    assert column(RelativeLatency()) == []


@given(st.lists(st.tuples(st.sampled_from(RANKS), st.floats(0.98, 1.02)), max_size=300), st.floats(0.3, 3.0))
def test_what_chance_explains_is_no_difference(tokens: list[tuple[Rank, float]], common: float) -> None:
    relative = of_ranks()
    for rank, ratio in tokens:
        observe(relative, rank, ratio * common)
    assert column(relative) == [1.0] * 4


def test_scattered_first_tokens_of_equal_ranks_make_no_difference() -> None:
    rng, relative = Random(3), of_ranks()
    for number in range(2000):
        observe(relative, RANKS[number % 4], math.exp(rng.gauss(0.2, 0.2)))
    assert column(relative) == pytest.approx([1.0] * 4, abs=0.01)


@pytest.mark.parametrize("common", [1.0, 0.5, 1.8], ids=["model right", "model slow", "model fast"])
def test_half_the_speed_is_twice_the_latency_whatever_the_model(common: float) -> None:
    rng, relative = Random(3), of_ranks()
    for number in range(200):
        observe(relative, RANKS[number % 4], common * (1 + number % 2) * math.exp(rng.gauss(0, 0.2)) / 1.4)
    fast, slow = column(relative)[:2]
    assert 1.4 < slow / fast < 2.1
    assert fast < 1 < slow


@given(st.lists(st.tuples(st.sampled_from(RANKS), st.floats(0, 100)), max_size=300))
def test_every_latency_is_within_its_limits(tokens: list[tuple[Rank, float]]) -> None:
    relative = of_ranks()
    for rank, ratio in tokens:
        observe(relative, rank, ratio)
    assert all(1 / WIDEST <= value <= WIDEST for value in column(relative))


def test_a_few_first_tokens_say_less_than_many() -> None:
    few, many = of_ranks(), of_ranks()
    for relative, count in ((few, 8), (many, WINDOW)):
        for rank in RANKS:
            observe(relative, rank, *[3.0 if rank == RANKS[0] else 1.0] * count)
    assert 1.0 < column(few)[0] < column(many)[0] < 3.0


def test_a_change_of_speed_is_followed() -> None:
    relative = of_ranks()
    for slow in (RANKS[0], RANKS[1]):
        for rank in RANKS:
            observe(relative, rank, *[3.0 if rank == slow else 1.0] * 5 * WINDOW)
    assert column(relative)[0] == pytest.approx(column(relative)[2], rel=0.02)
    assert column(relative)[1] > 1.5


def test_a_rank_without_requests_is_tried_again() -> None:
    relative = of_ranks()
    for rank in RANKS:
        observe(relative, rank, *[3.0 if rank == RANKS[0] else 1.0] * WINDOW)
    later = 10 * HALF_LIFE_S
    for rank in RANKS[1:]:
        observe(relative, rank, *[1.0] * WINDOW, now=later)
    assert column(relative, later) == [1.0] * 4


def test_a_restarted_rank_starts_anew_and_a_gone_one_is_forgotten() -> None:
    relative = of_ranks()
    for rank in RANKS:
        observe(relative, rank, *[3.0 if rank == RANKS[0] else 1.0] * WINDOW)
    slow = column(relative)[0]
    relative.set_ranks([(RANKS[0], 1), (RANKS[1], 1), (RANKS[2], 1)])
    assert column(relative)[0] == pytest.approx(slow, rel=0.1)
    assert len(column(relative)) == 3
    assert relative.of(RANKS[3], 1.0) == RankSpeed(1.0, None)
    relative.set_ranks([(RANKS[0], 2), (RANKS[1], 1), (RANKS[2], 1)])
    assert column(relative) == [1.0] * 3


def test_a_first_token_of_an_earlier_incarnation_says_nothing_of_the_next() -> None:
    calibration = LatencyCalibration()
    calibration.relative.set_ranks((rank, 1) for rank in RANKS)
    dispatched = [calibration.relative.of(RANKS[number % 4], 0.0) for number in range(40)]
    calibration.relative.set_ranks((rank, 2) for rank in RANKS)
    for number, speed in enumerate(dispatched):
        calibration.learn(400.0 if number % 4 else 100.0, 100.0, speed, 0.4)
    assert column(calibration.relative) == [1.0] * 4


def test_the_forecast_for_a_slow_rank_is_not_slow_twice() -> None:
    calibration = LatencyCalibration()
    calibration.relative.set_ranks((rank, 1) for rank in RANKS)
    for number in range(4000):
        now, rank = float(number), RANKS[number % 4]
        speed, measured_ms = calibration.relative.of(rank, now), 300.0 if rank == RANKS[0] else 100.0
        calibration.learn(measured_ms, 100 * calibration.value, speed, now + measured_ms / 1e3)
    latencies = calibration.relative.column(4000.0) * calibration.value
    assert latencies.tolist() == pytest.approx([3.0, 1.0, 1.0, 1.0], rel=0.2)


def test_a_rank_of_a_restarted_worker_starts_anew_in_its_component() -> None:
    registered = [worker(1), worker(2), worker(3)]
    pool = Pool(view(*registered), Accounting(), report_age_seconds=5.0, clock=lambda: 1.0)
    relative = pool.booked_load.latency_calibration.relative
    for rank in pool.worker_set.ranks:
        observe(relative, rank, *[3.0 if rank == (1, 0) else 1.0] * WINDOW)
    assert pool.booked_load.relative_latency()[0] > 1.5
    pool.follow(view(worker(1, incarnation=2), *registered[1:]))
    assert pool.booked_load.relative_latency().tolist() == [1.0] * 3
