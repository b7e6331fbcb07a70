"""What a component learns of the times to compute and to transfer prompts."""

from __future__ import annotations

import numpy as np
import pytest
from kvrouter.scheduler.load.prefill_times import LEAST_TOKENS, PrefillTimes
from kvrouter.scheduler.request.remote_prefill import modelled_ms

TOKENS = 2_000
MODELLED_S = float(modelled_ms(np.array([TOKENS]))[0]) / 1e3


def computed(times: PrefillTimes, slowness: float, prompts: int) -> PrefillTimes:
    for number in range(prompts):
        times.expect(number, TOKENS, 100.0)
        times.first_token(number, 100.0 + slowness * MODELLED_S)
    return times


@pytest.mark.parametrize("slowness", [0.25, 1.0, 3.0])
def test_the_factor_approaches_the_speed_of_the_engines(slowness: float) -> None:
    times = computed(PrefillTimes(), slowness, 100)
    assert times.factors.compute == pytest.approx(slowness, rel=0.05)
    assert times.factors.transfer == 1.0


def test_a_single_odd_measurement_has_little_weight() -> None:
    assert computed(PrefillTimes(), 1e6, 1).factors.compute < 2.1
    settled = computed(computed(PrefillTimes(), 1.0, 60), 1e6, 1)
    assert settled.factors.compute < 1.1


def test_short_prompts_and_those_that_never_answer_teach_nothing() -> None:
    times = PrefillTimes()
    times.expect("short", LEAST_TOKENS - 1, 0.0)
    times.first_token("short", 100.0)
    times.expect("lost", TOKENS, 0.0)
    times.forget("lost")
    times.first_token("lost", 100.0)
    times.first_token("unknown", 100.0)
    assert (times.factors.compute, times.measured_prompts) == (1.0, 0)


def test_hand_overs_teach_the_speed_of_the_link() -> None:
    times = PrefillTimes()
    for _ in range(100):
        times.handed_over(30.0, 15.0)
    times.handed_over(0.0, 15.0)
    times.handed_over(30.0, 0.0)
    assert times.factors.transfer == pytest.approx(2.0, rel=0.05)
