"""Whether a Scheduler says that it keeps up."""

from __future__ import annotations

from kvrouter.scheduler.load.overload import PERIOD_S, SECONDS, OverloadDetector


def feed(overload: OverloadDetector, late_ms: float, seconds: float) -> None:
    for _ in range(round(seconds / PERIOD_S)):
        overload.sample(late_ms / 1e3)


def test_a_pause_is_nothing_and_steady_lateness_is_reported_until_it_has_ended() -> None:
    overload = OverloadDetector(20.0)
    feed(overload, 0.5, 10)
    overload.sample(0.3)
    assert not overload.behind
    feed(overload, 40.0, 3 * SECONDS)
    assert overload.behind
    feed(overload, 15.0, 10)
    assert overload.behind
    feed(overload, 5.0, 10)
    assert not overload.behind


def test_it_can_be_switched_off() -> None:
    overload = OverloadDetector(0.0)
    feed(overload, 1000.0, 10)
    assert not overload.behind
    assert overload.late_ms > 900
