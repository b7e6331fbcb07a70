"""Timers that end together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvrouter.net import ticks
from kvrouter.net.ticks import seconds_to_tick


@pytest.mark.parametrize(
    ("now", "expected"),
    [(100.0, 101.0), (100.3, 101.0), (100.7, 101.0), (100.8, 102.0), (100.9996, 102.0)],
    ids=["on time", "some work later", "latest", "much work later", "a timer was early"],
)
def test_waits_end_at_multiples_and_are_never_short(
    monkeypatch: pytest.MonkeyPatch, now: float, expected: float
) -> None:
    monkeypatch.setattr(ticks, "time", SimpleNamespace(monotonic=lambda: now))
    assert now + seconds_to_tick(1.0) == pytest.approx(expected)
