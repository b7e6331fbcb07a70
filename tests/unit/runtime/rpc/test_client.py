"""Calls through a stub: deadlines, cancellation, streams, what is passed on unparsed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from kvrouter.devtools.system.ports import free_port
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import errors
from kvrouter.v1.indexer_pb2 import FindMatchesRequest, FindMatchesResponse
from kvrouter.v1.worker_pb2 import AbortRequest, AbortResponse

from .rpc_harness import INDEXER, WORKER, Worker, serving, soon, tokens, until_idle


async def test_the_clients_deadline_reaches_the_method() -> None:
    worker = Worker()
    async with serving(WORKER, worker) as (_, channel):
        stub = remote(WORKER, channel)
        await stub.abort(AbortRequest(request_ids=["a"]), deadline=Deadline.after(100))
        await stub.abort(AbortRequest(request_ids=["a"]), deadline=Deadline.never())
        async for _ in stub.generate(tokens(1), deadline=Deadline.never()):
            pass
    first, default, stream = (deadline.remaining() for deadline in worker.deadlines)
    assert first is not None
    assert 30 < first < 110  # gRPC rounds a timeout up on the wire
    assert default is not None
    assert default <= 30
    assert stream is None


async def test_a_channel_to_a_peer_that_returned_connects_at_once() -> None:
    address = f"127.0.0.1:{free_port()}"
    earlier = open_channel(address)  # is not closed: its pause after a failed attempt must not hold up the next channel
    with pytest.raises(errors.DependencyAway):
        await remote(WORKER, earlier).abort(AbortRequest(request_ids=["a"]), deadline=soon())
    async with serving(WORKER, Worker(), address=address) as (_, channel):
        response = await remote(WORKER, channel).abort(AbortRequest(request_ids=["a"]), deadline=soon())
        assert response.aborted == 1
    await earlier.close()


async def test_a_call_that_outlives_its_deadline_is_ended_on_both_sides() -> None:
    worker = Worker()
    async with serving(WORKER, worker) as (server, channel):
        stub = remote(WORKER, channel)
        with pytest.raises(errors.DeadlineExceeded):
            await stub.abort(AbortRequest(), deadline=Deadline.after(0.05))
        await worker.closed.wait()
        worker.closed.clear()
        with pytest.raises(errors.DeadlineExceeded):
            async for _ in stub.generate(tokens(0), deadline=Deadline.after(0.05)):
                pass
        await worker.closed.wait()
        with pytest.raises(errors.DeadlineExceeded):
            await stub.abort(AbortRequest(request_ids=["a"]), deadline=Deadline.after(-1))
        await until_idle(server)


async def test_closing_a_stream_early_closes_the_generator_behind_it() -> None:
    worker = Worker()
    worker.endless = True
    async with serving(WORKER, worker) as (server, channel):
        async with aclosing(remote(WORKER, channel).generate(tokens(1), deadline=Deadline.never())) as pieces:
            await anext(pieces)
        await worker.closed.wait()
        await until_idle(server)


async def test_cancelling_a_caller_cancels_the_method() -> None:
    worker = Worker()
    async with serving(WORKER, worker) as (server, channel):
        call = asyncio.ensure_future(remote(WORKER, channel).abort(AbortRequest(), deadline=soon()))
        await worker.entered.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await worker.closed.wait()
        await until_idle(server)


async def test_closing_the_channel_fails_its_calls_instead_of_cancelling_their_callers() -> None:
    worker = Worker()
    async with serving(WORKER, worker) as (server, _):
        channel = open_channel(server.endpoint())
        call = asyncio.ensure_future(remote(WORKER, channel).abort(AbortRequest(), deadline=soon()))
        await worker.entered.wait()
        await channel.close()
        with pytest.raises(errors.DependencyAway):
            await call


async def test_encoded_responses_pass_through_unparsed() -> None:
    class Encoded:
        async def generate_encoded(self, request: Any, *, deadline: Deadline) -> AsyncGenerator[bytes, None]:
            yield b"\xff not protobuf"
            yield b""

        def generate(self, request: Any, *, deadline: Deadline) -> Any:
            raise AssertionError

        async def abort(self, request: AbortRequest, *, deadline: Deadline) -> bytes:
            return AbortResponse(aborted=5).SerializeToString()

    async with serving(WORKER, Encoded()) as (_, channel):
        raw = remote(WORKER, channel, raw_responses=frozenset({"Generate"}))
        pieces = [piece async for piece in raw.generate(tokens(1), deadline=soon())]
        assert pieces == [b"\xff not protobuf", b""]
        assert (await raw.abort(AbortRequest(), deadline=soon())).aborted == 5
        with pytest.raises(errors.Internal):
            async for _ in remote(WORKER, channel).generate(tokens(1), deadline=soon()):
                pass


async def test_a_service_out_of_reach_is_a_dependency_away() -> None:
    async with serving(WORKER, Worker()) as (server, _):
        endpoint = server.endpoint()
    channel = open_channel(endpoint)
    with pytest.raises(errors.DependencyAway):
        await remote(WORKER, channel).abort(AbortRequest(), deadline=soon())
    await channel.close()


async def test_a_response_can_be_any_message_of_the_contract() -> None:
    class Indexer:
        async def find_matches(self, request: FindMatchesRequest, *, deadline: Deadline) -> FindMatchesResponse:
            return FindMatchesResponse()

    async with serving(INDEXER, Indexer()) as (_, channel):
        answer = await remote(INDEXER, channel).find_matches(FindMatchesRequest(), deadline=soon())
        assert answer == FindMatchesResponse()
