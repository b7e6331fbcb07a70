"""What a driver does when its process is later than its engine."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from kvrouter.mocker.clock import EngineClock
from kvrouter.mocker.driver import MAX_LATE_SECONDS, EngineDriver, Tokens
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.engine.reference import Engine
from kvrouter.mocker.engine.types import EngineRequest, pack_tokens

SPEED = 4.0
LATE_STEP = 3


class LateClock(EngineClock):
    """A clock that moves only in sleeps, one of which ends late."""

    def __init__(self, late_seconds: float) -> None:
        super().__init__(SPEED)
        self._late = late_seconds * SPEED
        self._now = 0.0
        self._steps = 0

    def now(self) -> float:
        return self._now

    async def sleep_until(self, engine_seconds: float) -> None:
        self._steps += 1
        late = self._late if self._steps == LATE_STEP else 0.0
        self._now = max(self._now, engine_seconds) + late
        await asyncio.sleep(0)


@pytest.mark.parametrize(("late", "goes_on"), [(0.9 * MAX_LATE_SECONDS, False), (50 * MAX_LATE_SECONDS, True)])
async def test_an_engine_that_is_too_late_to_catch_up_goes_on_from_now(late: float, *, goes_on: bool) -> None:
    stamps: list[float] = []
    finished = asyncio.Event()

    def emit(outputs: list[tuple[str, Tokens]]) -> None:
        for _, tokens in outputs:
            stamps.extend(tokens.stamps)
            if tokens.finish_reason is not None:
                finished.set()

    driver = EngineDriver(Engine(EngineConfig()), LateClock(late), lambda _: None, emit)
    driver.submit(EngineRequest("r", pack_tokens(range(40)), max_tokens=8))
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        running = group.create_task(driver.run())
        await finished.wait()
        running.cancel()
    steps = [after - before for before, after in pairwise(stamps)]
    assert len(steps) == 7
    assert (max(steps) > late * SPEED) == goes_on
    assert goes_on or max(steps) < 2 * min(steps)
