"""A request that is refused, at once or after queueing, is freed with its answer: no exception refers to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress

import grpc
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import BadRequest, KvRouterError, SessionLost
from kvrouter.v1.scheduler_pb2 import SessionRequest

from ....garbage import no_request_is_garbage
from ..harness import Parts, constraints, routing, selecting, view, worker
from ..queue.test_queued_requests import look, parts_of, request
from .test_sessions import line

TIMES = 3


async def test_a_refused_request() -> None:
    parts = Parts(view(worker(1)))
    excluding = routing(constraints=constraints(excluded_worker_ids=[1]))
    with no_request_is_garbage():
        for number in range(TIMES):
            with suppress(KvRouterError):
                await parts.selector.select(
                    selecting(f"r{number}", excluding), session_id="", deadline=Deadline.never()
                )


async def test_a_request_that_is_queued_until_its_deadline() -> None:
    parts = parts_of()
    async with line(parts) as client:
        for number, name in enumerate("xy", 2):
            assert (await client.ask(call_id=number, select=request(name))).HasField("select")
        with no_request_is_garbage():
            for number in range(10, 10 + TIMES):
                client.send(call_id=number, select=request(f"late{number}", time_left_ms=60_000))
                while parts.selector.queued is not None and not len(parts.selector.queued):
                    client.send(call_id=1)
                    await client.answer()
                look(parts, after=120)
                refused = await client.answer()
                assert refused.failed.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


async def test_a_session_that_is_taken_over() -> None:
    parts = Parts(view(worker(1)))

    async def requests() -> AsyncIterator[SessionRequest]:
        yield SessionRequest(call_id=1, open={"session_id": "s"})
        yield SessionRequest(call_id=2, select=selecting("r"))
        await asyncio.Event().wait()

    with no_request_is_garbage():
        for _ in range(TIMES):
            async with aclosing(parts.sessions.serve(requests(), Deadline.never())) as old:
                for _ in range(2):
                    await anext(old)
                async with line(parts):
                    with suppress(SessionLost):
                        await anext(old)


async def test_a_session_with_a_message_that_cannot_be_parsed() -> None:
    parts = Parts(view(worker(1)))

    async def requests() -> AsyncIterator[SessionRequest]:
        yield SessionRequest(call_id=1, open={"session_id": "s"})
        yield SessionRequest(call_id=2, select=selecting("r"))
        raise BadRequest("the request cannot be parsed")

    with no_request_is_garbage():
        for _ in range(TIMES):
            with suppress(BadRequest):
                async for _ in parts.sessions.serve(requests(), Deadline.never()):
                    pass
