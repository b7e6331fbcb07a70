"""Time as the simulated engine sees it."""

from __future__ import annotations

import asyncio
import time


class EngineClock:
    """Engine seconds since the clock was made: wall seconds times ``factor``.

    At factor 4 an engine step of 20 ms takes 5 ms of wall time.
    """

    def __init__(self, factor: float) -> None:
        if not 0 < factor < float("inf"):
            raise ValueError(f"the clock factor is {factor}, must be above 0 and finite")
        self.factor = factor
        self._started = time.monotonic()

    def now(self) -> float:
        """Engine seconds."""
        return (time.monotonic() - self._started) * self.factor

    async def sleep_until(self, engine_seconds: float) -> None:
        """Returns when the clock shows that time; yields to other tasks even if it has passed."""
        await asyncio.sleep(max(0.0, (engine_seconds - self.now()) / self.factor))
