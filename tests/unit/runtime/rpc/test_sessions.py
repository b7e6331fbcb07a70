"""Calls whose requests are a stream: sessions, and uploads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
import pytest
from kvrouter.runtime import errors
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import remote
from kvrouter.v1.indexer_pb2 import LoadRequest, LoadResponse
from kvrouter.v1.scheduler_pb2 import SessionRequest

from .rpc_harness import INDEXER, SCHEDULER, TRANSPORTS, Sessions, called, serving, soon


@TRANSPORTS
async def test_both_sides_of_a_session_are_streams(transport: str) -> None:
    turns: asyncio.Queue[int] = asyncio.Queue()

    async def requests() -> AsyncIterator[SessionRequest]:
        while (call_id := await turns.get()) != 0:
            yield SessionRequest(call_id=call_id)

    sessions = Sessions()
    async with called(SCHEDULER, sessions, transport) as (_, stub):
        async with aclosing(stub.session(requests(), deadline=Deadline.never())) as responses:
            for call_id in (1, 2, 3):
                turns.put_nowait(call_id)
                assert (await anext(responses)).call_id == call_id
            turns.put_nowait(0)
            with pytest.raises(StopAsyncIteration):
                await anext(responses)
        await sessions.closed.wait()


@TRANSPORTS
async def test_a_session_that_fails_raises_at_its_client_and_stops_its_requests(transport: str) -> None:
    stopped = asyncio.Event()

    async def requests() -> AsyncIterator[SessionRequest]:
        try:
            yield SessionRequest(call_id=99)
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with called(SCHEDULER, Sessions(), transport) as (_, stub):
        async with aclosing(stub.session(requests(), deadline=Deadline.never())) as responses:
            with pytest.raises(errors.SessionLost):
                await anext(responses)
        await stopped.wait()


@TRANSPORTS
async def test_an_error_in_the_requests_of_a_session_is_the_callers_own(transport: str) -> None:
    async def requests() -> AsyncIterator[SessionRequest]:
        yield SessionRequest(call_id=1)
        raise ZeroDivisionError

    sessions = Sessions()
    async with called(SCHEDULER, sessions, transport) as (_, stub):
        with pytest.raises(ZeroDivisionError):
            async for _ in stub.session(requests(), deadline=Deadline.never()):
                pass
        await sessions.closed.wait()


async def test_a_client_stream_gets_one_answer_even_before_it_has_sent_all() -> None:
    class Indexer:
        async def load(self, requests: AsyncIterator[LoadRequest], *, deadline: Deadline) -> LoadResponse:
            count = 0
            async for _ in requests:
                count += 1
                if count == 3:
                    break
            return LoadResponse(ranks=count)

    async def requests(count: int | None) -> AsyncIterator[LoadRequest]:
        for _ in range(count or 3):
            yield LoadRequest()
        if count is None:
            await asyncio.Event().wait()

    async with serving(INDEXER, Indexer()) as (_, channel):
        stub = remote(INDEXER, channel)
        assert (await stub.load(requests(2), deadline=soon())).ranks == 2
        assert (await stub.load(requests(None), deadline=soon())).ranks == 3


async def test_a_malformed_message_in_a_session_ends_it_as_a_bad_request() -> None:
    sessions = Sessions()
    async with serving(SCHEDULER, sessions) as (_, channel):
        session: Any = channel.stream_stream("/kvrouter.v1.SchedulerService/Session")
        rpc = session(iter([b"\xff\xff"]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in rpc:
                pass
        assert isinstance(errors.from_rpc_error(refused.value), errors.BadRequest)
        await sessions.closed.wait()


@TRANSPORTS
async def test_draining_ends_sessions_at_once_and_tells_their_clients(transport: str) -> None:
    async def requests() -> AsyncIterator[SessionRequest]:
        yield SessionRequest(call_id=1)
        await asyncio.Event().wait()

    async with called(SCHEDULER, Sessions(), transport) as (server, stub):
        async with aclosing(stub.session(requests(), deadline=Deadline.never())) as responses:
            await anext(responses)
            drained = asyncio.ensure_future(server.drain(3600))
            with pytest.raises(errors.Draining):
                await anext(responses)
        await drained
