"""A request that is refused, at once or after queueing, is freed with its answer: no exception refers to it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.errors import DeadlineExceeded, KvRouterError, SessionLost

from ....garbage import no_request_is_garbage
from ..harness import Parts, constraints, routing, selecting, view, worker
from ..queue.test_queued_requests import look, parts_of, request
from .session_client import Client, opened, reassert

TIMES = 3


async def test_a_refused_request() -> None:
    parts = Parts(view(worker(1)))
    excluding = routing(constraints=constraints(excluded_worker_ids=[1]))
    with no_request_is_garbage():
        for number in range(TIMES):
            with suppress(KvRouterError):
                await parts.selector.select(selecting(f"r{number}", excluding), deadline=Deadline.never())


async def test_a_request_that_is_queued_until_its_deadline() -> None:
    parts = parts_of()
    async with opened(parts, "call stream") as client:
        for name in "xy":
            await client.select(name, request=request(name).request)
        with no_request_is_garbage():
            for number in range(TIMES):
                await refused_late(parts, client, f"late{number}")


async def refused_late(parts: Parts, client: Client, name: str) -> None:
    selecting = asyncio.create_task(client.select(name, request=request(name).request, time_left_ms=60_000))
    while not len(parts.queued):
        await asyncio.sleep(0.001)
    look(parts, after=120)
    await asyncio.wait([selecting])
    assert isinstance(selecting.exception(), DeadlineExceeded)


async def test_calls_of_a_session_that_was_opened_again() -> None:
    parts = Parts(view(worker(1)))
    async with opened(parts, "call stream") as client:
        await client.open()
        client.opening_number = 1
        with no_request_is_garbage():
            for number in range(TIMES):
                for call in (client.select(f"r{number}"), client.update(reassert("r"))):
                    with suppress(SessionLost):
                        await call


async def test_updates_that_are_refused() -> None:
    parts = Parts(view(worker(1)))
    async with opened(parts, "call stream") as client:
        with no_request_is_garbage():
            for _ in range(TIMES):
                assert (await client.update(reassert("r", blocks=3))).refused
