"""What a component learns of the times to compute and to transfer prompts."""

from __future__ import annotations

import pytest
from kvrouter.core.interface.speeds import FACTOR_HALF_LIFE_S
from kvrouter.scheduler.load.prefill_times import LEAST_TOKENS, PrefillTimes
from kvrouter.scheduler.request.remote_prefill import modelled_ms

TOKENS = 2_000
NOW = 100.0
MODELLED_S = modelled_ms(TOKENS) / 1e3


def computed(times: PrefillTimes, slowness: float, prompts: int) -> PrefillTimes:
    for _ in range(prompts):
        times.learn(slowness * MODELLED_S * 1e3, TOKENS, NOW + slowness * MODELLED_S)
    return times


@pytest.mark.parametrize("slowness", [0.25, 1.0, 3.0])
def test_the_factor_approaches_the_speed_of_the_engines(slowness: float) -> None:
    times = computed(PrefillTimes(), slowness, 100)
    assert times.factors(NOW).compute == pytest.approx(slowness, rel=0.05)
    assert times.factors(NOW).transfer == 1.0


def test_a_single_odd_measurement_has_little_weight() -> None:
    assert computed(PrefillTimes(), 1e6, 1).factors(NOW).compute < 2.1
    settled = computed(computed(PrefillTimes(), 1.0, 60), 1e6, 1)
    assert settled.factors(NOW).compute < 1.1


def test_short_prompts_teach_nothing() -> None:
    times = PrefillTimes()
    times.learn(100_000.0, LEAST_TOKENS - 1, 100.0)
    assert (times.factors(NOW).compute, times.measured_prompts) == (1.0, 0)


def test_hand_overs_teach_the_speed_of_the_link() -> None:
    times = PrefillTimes()
    for _ in range(100):
        times.handed_over(30.0, 15.0, NOW)
    times.handed_over(0.0, 15.0, NOW)
    times.handed_over(30.0, 0.0, NOW)
    assert times.factors(NOW).transfer == pytest.approx(2.0, rel=0.05)


def slow_link() -> PrefillTimes:
    times = PrefillTimes()
    for _ in range(200):
        times.handed_over(150.0, 15.0, NOW)
    return times


@pytest.mark.parametrize(("half_lives", "factor"), [(0, 10.0), (1, 8.7), (4, 3.3), (8, 1.2)])
def test_a_factor_fades_so_that_what_was_slow_is_tried_again(half_lives: int, factor: float) -> None:
    assert slow_link().factors(NOW + half_lives * FACTOR_HALF_LIFE_S).transfer == pytest.approx(factor, rel=0.05)


def test_after_a_pause_few_measurements_replace_the_earlier_ones() -> None:
    times, later = slow_link(), NOW + 6 * FACTOR_HALF_LIFE_S
    for _ in range(4):
        times.handed_over(15.0, 15.0, later)
    assert times.factors(later).transfer < 1.3
    for _ in range(20):
        times.handed_over(150.0, 15.0, later)
    assert times.factors(later).transfer > 5


def test_a_measurement_that_takes_long_is_no_pause() -> None:
    times = PrefillTimes()
    for number in range(100):
        times.handed_over(15.0, 15.0, NOW + number)
    times.handed_over(1e6, 1e5, NOW + 1100)
    assert times.factors(NOW + 1100).transfer < 1.1
