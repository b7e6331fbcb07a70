"""A simulated worker whose engine is a hundred times slower from SIGUSR1 until SIGUSR2. Its process is as fast as ever.

It takes the options of ``kvrouter-mocker``.
"""

from __future__ import annotations

import asyncio
import signal

from kvrouter.mocker import app
from kvrouter.mocker.__main__ import main
from kvrouter.mocker.clock import EngineClock

SLOW, FAST = signal.SIGUSR1, signal.SIGUSR2
SLOWDOWN = 100.0
_NAP_SECONDS = 0.05


class ThrottledClock(EngineClock):
    """The clock of one engine, which never goes back when its factor changes."""

    def __init__(self, factor: float) -> None:
        super().__init__(factor)
        self._passed = 0.0
        signal.signal(SLOW, lambda *_: self._go_on_at(factor / SLOWDOWN))
        signal.signal(FAST, lambda *_: self._go_on_at(factor))

    def now(self) -> float:
        return self._passed + super().now()

    async def sleep_until(self, engine_seconds: float) -> None:
        """A step that is under way ends sooner when the engine is fast again."""
        while (left := (engine_seconds - self.now()) / self.factor) > _NAP_SECONDS:
            await asyncio.sleep(_NAP_SECONDS)
        await asyncio.sleep(max(0.0, left))

    def _go_on_at(self, factor: float) -> None:
        self._passed = self.now()
        super().__init__(factor)


if __name__ == "__main__":
    app.EngineClock = ThrottledClock  # type: ignore[attr-defined, misc]
    main()
