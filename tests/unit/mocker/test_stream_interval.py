import asyncio
from contextlib import aclosing

import pytest
from kvrouter.mocker.clock import EngineClock
from kvrouter.mocker.driver import EngineDriver
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.engine.reference import Engine
from kvrouter.mocker.engine.types import EngineRequest, pack_tokens


@pytest.mark.parametrize(("interval", "most"), [(1, 12), (5, 4), (100, 2)])
async def test_pieces_hold_the_interval_and_first_and_last_tokens_do_not_wait(interval: int, most: int) -> None:
    driver = EngineDriver(Engine(EngineConfig()), EngineClock(100.0), lambda _: None, stream_interval=interval)
    request = EngineRequest("r", pack_tokens(range(40)), max_tokens=12)
    pieces = []
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        running = group.create_task(driver.run())
        async with aclosing(driver.generate(request)) as stream:
            async for piece in stream:
                pieces.append(piece)  # noqa: PERF401 - each piece is looked at as it comes
        running.cancel()
    sizes = [len(piece.token_ids) for piece in pieces]
    assert sum(sizes) == sum(len(piece.stamps) for piece in pieces) == 12
    assert pieces[0].first is not None
    assert len(pieces) <= most
    assert all(size >= interval for size in sizes[1:-1])
    stamps = [stamp for piece in pieces for stamp in piece.stamps]
    assert stamps == sorted(set(stamps))
