from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace

import pytest
from kvrouter.net import budgets
from kvrouter.net.budgets import LoopBudget, loop_budget

from ...waiting import until


async def _passes(taken: list[int], until: int) -> list[int]:
    """Returns how much was taken in each pass of the loop, until so much was taken in sum."""
    passes = []
    seen = 0
    while seen < until:
        await asyncio.sleep(0)
        passes.append(len(taken) - seen)
        seen = len(taken)
    return passes


async def test_readers_share_the_work_of_a_pass_in_turn() -> None:
    budget = LoopBudget(pass_us=100)
    taken: list[int] = []

    async def read(reader: int) -> None:
        for _ in range(10):
            await budget.turn(10)
            taken.append(reader)

    async with asyncio.TaskGroup() as group:
        passes = group.create_task(_passes(taken, until=400))
        for reader in range(40):
            group.create_task(read(reader))
    assert max(passes.result()) <= 10
    # The first reader used up the first pass. From then on each waits for all others between two turns of its own.
    assert sorted(taken[10:49]) == list(range(1, 40))


async def test_work_beyond_a_pass_gets_one_of_its_own() -> None:
    budget = LoopBudget(pass_us=100)
    order: list[str] = []

    async def read(name: str, cost: int) -> None:
        await budget.turn(cost)
        order.append(name)

    async with asyncio.TaskGroup() as group:
        for name, cost in (("small", 60), ("large", 1_000), ("next", 60)):
            group.create_task(read(name, cost))
    assert order == ["small", "large", "next"]


async def test_a_little_work_now_and_then_takes_no_further_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = LoopBudget(pass_us=100)
    scheduled: list[object] = []
    call_soon = asyncio.get_running_loop().call_soon
    monkeypatch.setattr(
        budgets, "asyncio", SimpleNamespace(get_running_loop=lambda: SimpleNamespace(call_soon=scheduled.append))
    )
    assert [budget.take(10) for _ in range(6)] == [True] * 6
    assert len(scheduled) == 1, "only once half of the budget is used"
    assert [budget.take(10) for _ in range(5)] == [True] * 4 + [False]
    call_soon(*scheduled)
    await asyncio.sleep(0)
    assert budget.take(100)


async def test_a_cancelled_reader_takes_no_turn() -> None:
    budget = LoopBudget(pass_us=100)
    first, cancelled = (asyncio.create_task(budget.turn(100)) for _ in range(2))
    await first
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    async with asyncio.timeout(10):
        await budget.turn(100)


async def test_work_that_fails_holds_up_nobody() -> None:
    budget = LoopBudget(pass_us=100)
    reports: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report["exception"]))
    failure = ValueError("no")
    done: list[int] = []

    def fail() -> None:
        raise failure

    budget.call(100, lambda: done.append(1))
    for work in (fail, lambda: done.append(2)):
        budget.call(10, work)
    await until(lambda: done == [1, 2])
    assert reports == [failure]
    async with asyncio.timeout(10):
        await budget.turn(100)


async def test_a_loop_has_one_budget() -> None:
    assert loop_budget() is loop_budget()


def test_a_closed_loop_is_freed_with_its_budget() -> None:
    async def take() -> weakref.ref[asyncio.AbstractEventLoop]:
        assert loop_budget().take(1)
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(take())
    gc.collect()
    assert loop() is None
