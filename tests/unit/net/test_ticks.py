"""Timers and periodic messages end at multiples of an interval."""

from __future__ import annotations

import time

import pytest
from kvrouter.net import ticks
from kvrouter.net.ticks import seconds_to_rest, seconds_to_send, seconds_to_tick


@pytest.mark.parametrize(
    ("now", "expected"),
    [(100.0, 101.0), (100.3, 101.0), (100.7, 101.0), (100.8, 102.0), (100.9996, 102.0)],
    ids=["on time", "some work later", "latest", "much work later", "a timer was early"],
)
def test_waits_end_at_multiples_and_are_never_short(
    monkeypatch: pytest.MonkeyPatch, now: float, expected: float
) -> None:
    monkeypatch.setattr(ticks, "_now", lambda: now)
    assert now + seconds_to_tick(1.0) == pytest.approx(expected)


def test_processes_send_at_the_same_moments_and_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    for now in (1_700_000_000.0, 1_700_000_000.0037, 1_700_000_000.0199):
        monkeypatch.setattr(ticks, "_now", lambda now=now: now)
        seconds = seconds_to_send(7.3)
        assert seconds == pytest.approx(7.3, abs=0.1001)
        assert (now + seconds) * 5 == pytest.approx(round((now + seconds) * 5), abs=1e-4)


@pytest.mark.parametrize("seconds", [0.001, 0.005, 0.25])
def test_short_intervals_stay_as_they_are(seconds: float) -> None:
    assert seconds_to_send(seconds) == seconds


def test_the_pause_after_work_is_bounded() -> None:
    assert seconds_to_rest(time.thread_time() - 100) == 1.0
