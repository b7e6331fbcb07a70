"""The time of the simulated engine."""

from __future__ import annotations

import asyncio
import time


class EngineClock:
    """Engine seconds since the clock was created: wall seconds times ``factor``.

    At factor 4, an engine step of 20 ms takes 5 ms of wall time.
    """

    def __init__(self, factor: float) -> None:
        if not 0 < factor < float("inf"):
            raise ValueError(f"expected a clock factor above 0 and finite, received {factor}")
        self.factor = factor
        self._started = time.monotonic()

    def now(self) -> float:
        """Returns the current time in engine seconds."""
        return (time.monotonic() - self._started) * self.factor

    async def sleep_until(self, engine_seconds: float) -> None:
        """Returns when the clock has reached a time. Lets other tasks run even if it has passed."""
        await asyncio.sleep(max(0.0, (engine_seconds - self.now()) / self.factor))
