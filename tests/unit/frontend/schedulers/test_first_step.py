"""Calls whose first step runs at once."""

from __future__ import annotations

import asyncio

import pytest
from kvrouter.frontend.schedulers.session import rest_of


async def test_a_call_that_waits_goes_on_where_it_is_awaited() -> None:
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def call() -> int:
        await asyncio.sleep(0)
        return await answer + await answer

    waiting = call()
    first = waiting.send(None)
    answer.set_result(3)
    assert await rest_of(waiting, first) == 6


async def test_what_fails_while_a_call_waits_is_raised_in_it() -> None:
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def call() -> str:
        try:
            await answer
        except KeyError:
            await asyncio.sleep(0)
            return "handled"
        return "not reached"

    waiting = call()
    first = waiting.send(None)
    answer.set_exception(KeyError())
    assert await rest_of(waiting, first) == "handled"


async def test_a_cancellation_reaches_the_call_that_waits() -> None:
    ended = []

    async def call() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def caller() -> None:
        waiting = call()
        await rest_of(waiting, waiting.send(None))

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
