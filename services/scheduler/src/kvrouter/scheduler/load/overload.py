"""Detects overload of this Scheduler, by the lateness of its event loop.

All decisions of a component are made in one process, one after another. When more requests arrive than it can decide,
the turns of its event loop come later and later. The mean over SECONDS counts, so a single pause does not matter. An
overloaded Scheduler stays so until the mean is below half of the limit.
"""

from __future__ import annotations

from kvrouter.runtime.telemetry.metrics import PERIOD_S, lateness

SECONDS = 4.0
"""Time constant of the mean, seconds."""


class OverloadDetector:
    """Detects overload. ``sample`` is pure; ``run`` measures."""

    def __init__(self, limit_ms: float) -> None:
        """Starts below the limit.

        Args:
            limit_ms: Mean lateness in ms above which the Scheduler is overloaded; 0 for never.
        """
        self._limit_ms = limit_ms
        self.late_ms = 0.0
        """Mean lateness, ms."""
        self.behind = False
        """Whether requests should be sharded over several Schedulers."""

    def sample(self, late_seconds: float) -> None:
        """Adds a measurement: a turn of the event loop came this many seconds late."""
        self.late_ms += (late_seconds * 1e3 - self.late_ms) * PERIOD_S / SECONDS
        limit = self._limit_ms / 2 if self.behind else self._limit_ms
        self.behind = bool(self._limit_ms) and self.late_ms > limit

    async def run(self) -> None:
        """Measures until cancelled."""
        async for seconds in lateness():
            self.sample(seconds)
