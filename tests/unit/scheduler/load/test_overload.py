"""Whether a Scheduler says that it keeps up."""

from __future__ import annotations

from kvrouter.scheduler.load.overload import PERIOD_S, SECONDS, KeepingUp


def feed(keeping_up: KeepingUp, late_ms: float, seconds: float) -> None:
    for _ in range(round(seconds / PERIOD_S)):
        keeping_up.sample(late_ms / 1e3)


def test_a_pause_is_nothing_and_steady_lateness_is_told_until_it_has_ended() -> None:
    keeping_up = KeepingUp(20.0)
    feed(keeping_up, 0.5, 10)
    keeping_up.sample(0.3)
    assert not keeping_up.behind
    feed(keeping_up, 40.0, 3 * SECONDS)
    assert keeping_up.behind
    feed(keeping_up, 15.0, 10)
    assert keeping_up.behind
    feed(keeping_up, 5.0, 10)
    assert not keeping_up.behind


def test_it_can_be_switched_off() -> None:
    keeping_up = KeepingUp(0.0)
    feed(keeping_up, 1000.0, 10)
    assert not keeping_up.behind
    assert keeping_up.late_ms > 900
