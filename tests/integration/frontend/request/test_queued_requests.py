"""Mode forecast on the whole stack: what finds no room waits at the Scheduler, and nothing is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.errors import AllBusy
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.scheduler_pb2 import GetStatusRequest, QueueStatus
from kvrouter.v1.worker_pb2 import StopConditions

from ....waiting import until
from ..gateway import System, request, running_system

BLOCKS = 32
"""KV blocks of an engine; four prompts of ``unlike`` fit."""


@pytest.fixture
async def forecasting(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[System]:
    async with running_system(nats_url, etcd_endpoint, namespace, scheduling={"router_mode": "forecast"}) as system:
        yield system


def unlike(number: int, max_tokens: int = 4) -> FrontendServiceGenerateRequest:
    """100 tokens, 7 blocks, that no other request has."""
    tokens = range(1000 * number, 1000 * number + 100)
    return request(tokens, stop_conditions=StopConditions(max_tokens=max_tokens))


async def queued(system: System) -> QueueStatus:
    answer = await system.scheduler.get_status(GetStatusRequest(queued_requests=100), deadline=Deadline.after(10))
    return answer.components[0].queued


async def until_queued(system: System, count: int) -> None:
    async with asyncio.timeout(30):
        while (await queued(system)).requests != count:
            await asyncio.sleep(0.01)


async def test_a_burst_waits_for_room_and_all_of_it_finishes(forecasting: System) -> None:
    for worker_id in (1, 2):
        await forecasting.start_worker(worker_id, num_blocks=BLOCKS)
    tokens = await asyncio.gather(*[forecasting.generated(unlike(number, 40)) for number in range(60)])
    assert tokens == [40] * 60
    await forecasting.until_idle()
    left = await queued(forecasting)
    assert (left.requests, left.refused_full, left.refused_late) == (0, 0, 0)
    assert left.released > 0


async def test_one_that_is_cancelled_while_it_waits_leaves_nothing(forecasting: System) -> None:
    worker = await forecasting.start_worker(1, num_blocks=BLOCKS, clock_factor=0.001)
    running = [asyncio.create_task(forecasting.generated(unlike(number))) for number in range(4)]
    await until(lambda: worker.stats().requests == 4)
    waiting = [asyncio.create_task(forecasting.generated(unlike(number))) for number in range(4, 7)]
    await until_queued(forecasting, 3)
    assert len((await queued(forecasting)).longest) == 3
    waiting[1].cancel()
    await until_queued(forecasting, 2)
    for task in (*running, *waiting):
        task.cancel()
    await asyncio.wait([*running, *waiting])
    await until_queued(forecasting, 0)
    await forecasting.until_idle()
    await until(lambda: worker.stats().requests == 0)


async def test_one_that_ends_makes_room_for_one_that_waits(forecasting: System) -> None:
    worker = await forecasting.start_worker(1, num_blocks=BLOCKS, clock_factor=0.001)
    running = [asyncio.create_task(forecasting.generated(unlike(number))) for number in range(4)]
    await until(lambda: worker.stats().requests == 4)
    waiting = asyncio.create_task(forecasting.generated(unlike(4)))
    await until_queued(forecasting, 1)
    running[0].cancel()
    await until_queued(forecasting, 0)
    assert (await queued(forecasting)).released == 1
    for task in (*running, waiting):
        task.cancel()
    await asyncio.wait([*running, waiting])
    await forecasting.until_idle()


async def test_when_no_more_may_wait_all_are_busy(nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    options = {"router_mode": "forecast", "max_queued_requests": 1}
    async with running_system(nats_url, etcd_endpoint, namespace, scheduling=options) as system:
        worker = await system.start_worker(1, num_blocks=BLOCKS, clock_factor=0.001)
        asked = [asyncio.create_task(system.generated(unlike(number))) for number in range(5)]
        await until(lambda: worker.stats().requests == 4)
        await until_queued(system, 1)
        with pytest.raises(AllBusy) as caught:
            await system.generated(unlike(5))
        assert caught.value.info.retry_after_ms > 0
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)
        await system.until_idle()
