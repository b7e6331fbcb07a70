"""What first tokens say of a rank's speed, and what chance may not say."""

from __future__ import annotations

import math
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from kvrouter.core import CachedRank, Rank, reference
from kvrouter.core.interface.speeds import HALF_LIFE_S, WIDEST, WINDOW

from ..conftest import implementation

RANKS: list[Rank] = [(1, 0), (2, 0), (3, 0), (3, 1)]


def register(calibration: Any, *ranks: Rank, incarnation: int = 1) -> Any:
    calibration.set_ranks([CachedRank(rank, incarnation, 0) for rank in ranks])
    return calibration


def of_ranks(core: ModuleType) -> Any:
    return register(core.LatencyCalibration(), *RANKS)


def observe(calibration: Any, rank: Rank, *ratios: float, now: float = 0.0) -> None:
    for ratio in ratios:
        calibration.learn(100 * ratio, 100.0, calibration.speed(rank, now), now)


def column(calibration: Any, now: float = 1.0) -> list[float]:
    return np.frombuffer(calibration.relative_latency(now)).tolist()


_EVENTS = st.one_of(
    st.lists(st.tuples(st.sampled_from(RANKS), st.integers(1, 2)), unique_by=lambda each: each[0]),
    st.tuples(st.sampled_from(RANKS), st.floats(0, 500), st.floats(-1, 200)),
    st.sampled_from([0.0, 0.05, 1.0, 200.0]),
)


@given(st.lists(_EVENTS, max_size=60))
def test_calibrations_learn_alike(events: list[Any]) -> None:
    """Each first token is of the speed known at the event before: its rank may be gone, or have restarted."""
    both = [one.LatencyCalibration() for one in (implementation("native", "LatencyCalibration"), reference)]
    now, speeds = 0.0, [(1.0, 0), (1.0, 0)]
    for event in events:
        if isinstance(event, float):
            now += event
        for place, calibration in enumerate(both):
            if isinstance(event, list):
                calibration.set_ranks([CachedRank(rank, incarnation, 0) for rank, incarnation in event])
            elif isinstance(event, tuple):
                rank, measured_ms, forecast_ms = event
                calibration.learn(measured_ms, forecast_ms, speeds[place], now)
                speeds[place] = calibration.speed(rank, now)
        assert speeds[0][1] == speeds[1][1]
        assert both[0].value == pytest.approx(both[1].value)
        assert column(both[0], now) == pytest.approx(column(both[1], now))


@given(st.lists(st.tuples(st.floats(-1, 1e6), st.floats(-1, 1e6), st.floats(0, 300)), max_size=60))
def test_factors_learn_alike(measurements: list[tuple[float, float, float]]) -> None:
    native, expected = implementation("native", "MeasuredFactor").MeasuredFactor(), reference.MeasuredFactor()
    now = 0.0
    for measured_ms, modelled_ms, seconds in measurements:
        now += seconds
        for factor in (native, expected):
            factor.observe(measured_ms, modelled_ms, now)
        assert native.count == expected.count
        assert native.value(now + 7.0) == pytest.approx(expected.value(now + 7.0))


def test_without_first_tokens_every_rank_has_the_speed_of_the_component(core: ModuleType) -> None:
    assert column(of_ranks(core)) == [1.0] * 4
    assert column(core.LatencyCalibration()) == []


def test_a_row_is_the_same_object_until_a_number_changes(core: ModuleType) -> None:
    calibration = of_ranks(core)
    row = calibration.relative_latency(1.0)
    observe(calibration, RANKS[0], 1.0, now=2.0)
    assert calibration.relative_latency(3.0) is row
    for rank, ratio in ((RANKS[0], 4.0), (RANKS[1], 1.0)):
        observe(calibration, rank, *[ratio] * WINDOW, now=4.0)
    changed = calibration.relative_latency(5.0)
    assert changed != row
    assert calibration.relative_latency(5.5) is not row
    register(calibration, *RANKS[:2])
    assert len(calibration.relative_latency(6.0)) == 2 * 8


@given(st.lists(st.tuples(st.sampled_from(RANKS), st.floats(0.98, 1.02)), max_size=300), st.floats(0.3, 3.0))
def test_what_chance_explains_is_no_difference(
    core: ModuleType, tokens: list[tuple[Rank, float]], common: float
) -> None:
    relative = of_ranks(core)
    for rank, ratio in tokens:
        observe(relative, rank, ratio * common)
    assert column(relative) == [1.0] * 4


def test_scattered_first_tokens_of_equal_ranks_make_no_difference(core: ModuleType) -> None:
    rng, relative = Random(3), of_ranks(core)
    for number in range(2000):
        observe(relative, RANKS[number % 4], math.exp(rng.gauss(0.2, 0.2)))
    assert column(relative) == pytest.approx([1.0] * 4, abs=0.01)


@pytest.mark.parametrize("common", [1.0, 0.5, 1.8], ids=["model right", "model slow", "model fast"])
def test_half_the_speed_is_twice_the_latency_whatever_the_model(core: ModuleType, common: float) -> None:
    rng, relative = Random(3), of_ranks(core)
    for number in range(200):
        observe(relative, RANKS[number % 4], common * (1 + number % 2) * math.exp(rng.gauss(0, 0.2)) / 1.4)
    fast, slow = column(relative)[:2]
    assert 1.4 < slow / fast < 2.1
    assert fast < 1 < slow


@given(st.lists(st.tuples(st.sampled_from(RANKS), st.floats(0, 100)), max_size=300))
def test_every_latency_is_within_its_limits(core: ModuleType, tokens: list[tuple[Rank, float]]) -> None:
    relative = of_ranks(core)
    for rank, ratio in tokens:
        observe(relative, rank, ratio)
    assert all(1 / WIDEST <= value <= WIDEST for value in column(relative))


def test_a_few_first_tokens_say_less_than_many(core: ModuleType) -> None:
    few, many = of_ranks(core), of_ranks(core)
    for relative, count in ((few, 8), (many, WINDOW)):
        for rank in RANKS:
            observe(relative, rank, *[3.0 if rank == RANKS[0] else 1.0] * count)
    assert 1.0 < column(few)[0] < column(many)[0] < 3.0


def test_a_change_of_speed_is_followed(core: ModuleType) -> None:
    relative = of_ranks(core)
    for slow in (RANKS[0], RANKS[1]):
        for rank in RANKS:
            observe(relative, rank, *[3.0 if rank == slow else 1.0] * 5 * WINDOW)
    assert column(relative)[0] == pytest.approx(column(relative)[2], rel=0.02)
    assert column(relative)[1] > 1.5


def test_a_rank_without_requests_is_tried_again(core: ModuleType) -> None:
    relative = of_ranks(core)
    for rank in RANKS:
        observe(relative, rank, *[3.0 if rank == RANKS[0] else 1.0] * WINDOW)
    later = 10 * HALF_LIFE_S
    for rank in RANKS[1:]:
        observe(relative, rank, *[1.0] * WINDOW, now=later)
    assert column(relative, later) == [1.0] * 4


def test_a_restarted_rank_starts_anew_and_a_gone_one_is_forgotten(core: ModuleType) -> None:
    relative = of_ranks(core)
    for rank in RANKS:
        observe(relative, rank, *[3.0 if rank == RANKS[0] else 1.0] * WINDOW)
    slow = column(relative)[0]
    register(relative, *RANKS[:3])
    assert column(relative)[0] == pytest.approx(slow, rel=0.1)
    assert len(column(relative)) == 3
    assert relative.speed(RANKS[3], 1.0) == (1.0, 0)
    relative.set_ranks([CachedRank(rank, 2 if rank == RANKS[0] else 1, 0) for rank in RANKS[:3]])
    assert column(relative) == [1.0] * 3


def test_a_first_token_of_an_earlier_incarnation_says_nothing_of_the_next(core: ModuleType) -> None:
    calibration = of_ranks(core)
    dispatched = [calibration.speed(RANKS[number % 4], 0.0) for number in range(40)]
    register(calibration, *RANKS, incarnation=2)
    for number, speed in enumerate(dispatched):
        calibration.learn(400.0 if number % 4 else 100.0, 100.0, speed, 0.4)
    assert column(calibration) == [1.0] * 4


def test_the_forecast_for_a_slow_rank_is_not_slow_twice(core: ModuleType) -> None:
    calibration = of_ranks(core)
    for number in range(4000):
        now, rank = float(number), RANKS[number % 4]
        speed, measured_ms = calibration.speed(rank, now), 300.0 if rank == RANKS[0] else 100.0
        calibration.learn(measured_ms, 100 * calibration.value, speed, now + measured_ms / 1e3)
    latencies = [latency * calibration.value for latency in column(calibration, 4000.0)]
    assert latencies == pytest.approx([3.0, 1.0, 1.0, 1.0], rel=0.2)
