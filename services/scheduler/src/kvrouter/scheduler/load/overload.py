"""Whether this Scheduler keeps up with what it is asked: measured by how late its event loop comes.

All decisions of a component are made in one process, one after another. As long as that is quick, a turn of the loop
comes when it is due; when more is asked than it can do, turns come later and later. The mean over some SECONDS counts,
so that a single pause is nothing. A Scheduler that is behind stays so until the mean is below half of the limit.
"""

from __future__ import annotations

import asyncio
import time

PERIOD_S = 0.1
"""Time between two measurements, seconds."""

SECONDS = 2.0
"""Time that the mean reaches back, seconds."""


class OverloadDetector:
    """The verdict. ``sample`` is pure; ``run`` measures."""

    def __init__(self, limit_ms: float) -> None:
        """``limit_ms`` is the mean lateness, in ms, above which the Scheduler is behind; 0 for never."""
        self._limit_ms = limit_ms
        self.late_ms = 0.0
        """Mean lateness, ms."""
        self.behind = False
        """Whether requests had better go to other Schedulers as well."""

    def sample(self, late_seconds: float) -> None:
        """A turn came so late."""
        self.late_ms += (max(0.0, late_seconds) * 1e3 - self.late_ms) * PERIOD_S / SECONDS
        limit = self._limit_ms / 2 if self.behind else self._limit_ms
        self.behind = bool(self._limit_ms) and self.late_ms > limit

    async def run(self) -> None:
        """Measures, until cancelled."""
        while True:
            due = time.monotonic() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.sample(time.monotonic() - due)
