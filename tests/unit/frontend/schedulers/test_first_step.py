"""Calls whose first step runs at once."""

from __future__ import annotations

import asyncio

import pytest
from kvrouter.frontend.schedulers.session import FirstStep


async def test_a_call_that_does_not_wait_has_its_result_at_once() -> None:
    async def call() -> int:
        return 7

    first = FirstStep(call())
    assert (first.waits, first.result) == (False, 7)


async def test_an_error_of_the_first_step_is_raised_at_once() -> None:
    async def call() -> int:
        raise ValueError("expected")

    with pytest.raises(ValueError, match="expected"):
        FirstStep(call())


async def test_a_call_that_waits_goes_on_where_it_is_awaited() -> None:
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def call() -> int:
        await asyncio.sleep(0)
        return await answer + await answer

    first = FirstStep(call())
    assert first.waits
    answer.set_result(3)
    assert await first.rest() == 6


async def test_what_fails_while_a_call_waits_is_raised_in_it() -> None:
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def call() -> str:
        try:
            await answer
        except KeyError:
            await asyncio.sleep(0)
            return "handled"
        return "not reached"

    first = FirstStep(call())
    answer.set_exception(KeyError())
    assert await first.rest() == "handled"


async def test_a_cancellation_reaches_the_call_that_waits() -> None:
    ended = []

    async def call() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def caller() -> None:
        await FirstStep(call()).rest()

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
