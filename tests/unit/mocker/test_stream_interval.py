from __future__ import annotations

import asyncio

import pytest
from kvrouter.mocker.clock import EngineClock
from kvrouter.mocker.driver import EngineDriver, Tokens
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.engine.reference import Engine
from kvrouter.mocker.engine.types import DuplicateRequest, EngineRequest, pack_tokens


class SteppedClock(EngineClock):
    """A clock that only the steps of an engine move: requests submitted one after another arrive together."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self._now = 0.0

    def now(self) -> float:
        return self._now

    async def sleep_until(self, engine_seconds: float) -> None:
        self._now = engine_seconds
        await asyncio.sleep(0)


@pytest.mark.parametrize(("interval", "most"), [(1, 12), (5, 4), (100, 2)])
async def test_pieces_hold_the_interval_and_first_and_last_tokens_do_not_wait(interval: int, most: int) -> None:
    pieces: list[Tokens] = []
    finished = asyncio.Event()

    def emit(outputs: list[tuple[str, Tokens]]) -> None:
        pieces.extend(tokens for _, tokens in outputs)
        if pieces[-1].finish_reason is not None:
            finished.set()

    driver = EngineDriver(Engine(EngineConfig()), EngineClock(100.0), lambda _: None, emit, stream_interval=interval)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        running = group.create_task(driver.run())
        driver.submit(EngineRequest("r", pack_tokens(range(40)), max_tokens=12))
        with pytest.raises(DuplicateRequest):
            driver.submit(EngineRequest("r", pack_tokens(range(40)), max_tokens=12))
        await finished.wait()
        running.cancel()
    sizes = [len(piece.token_ids) for piece in pieces]
    assert sum(sizes) == sum(len(piece.stamps) for piece in pieces) == 12
    assert pieces[0].first is not None
    assert len(pieces) <= most
    assert all(size >= interval for size in sizes[1:-1])
    stamps = [stamp for piece in pieces for stamp in piece.stamps]
    assert stamps == sorted(set(stamps))


async def test_the_outputs_of_a_step_are_emitted_together_and_those_of_aborted_requests_are_not() -> None:
    emitted: list[set[str]] = []
    finished = asyncio.Event()

    def emit(outputs: list[tuple[str, Tokens]]) -> None:
        emitted.append({request_id for request_id, _ in outputs})
        assert len(emitted[-1]) == len(outputs)
        if len(outputs) == 3:
            assert driver.abort("b")
            assert not driver.abort("unknown")
        if any(tokens.finish_reason is not None for _, tokens in outputs):
            finished.set()

    driver = EngineDriver(Engine(EngineConfig()), SteppedClock(), lambda _: None, emit)
    for request_id in "abc":
        driver.submit(EngineRequest(request_id, pack_tokens(range(40)), max_tokens=50))
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        running = group.create_task(driver.run())
        await finished.wait()
        running.cancel()
    together = emitted.index({"a", "b", "c"})
    assert emitted[together + 1 : -1] == [{"a", "c"}] * (len(emitted) - together - 2)
    assert len(emitted) > together + 2
