"""Calls with streams of responses, each on a connection of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio
import pytest
from kvrouter.net.http2.side import CONNECTION_WINDOW_BYTES
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import remote_on_connections
from kvrouter.v1 import errors
from kvrouter.v1.error_encoding import set_error
from kvrouter.v1.worker_pb2 import GenerateOutput, WorkerServiceGenerateRequest, WorkerServiceGenerateResponse

from .rpc_harness import WORKER, Worker, serving, soon, tokens, until_idle

GONE = errors.OutOfRange("the events are gone", field="start", advice="Fetch the state.")


def worker_at(target: str, max_message_bytes: int = 1 << 20) -> Any:
    return remote_on_connections(WORKER, target, max_message_bytes=max_message_bytes)


async def generate(target: str, count: int, deadline: Deadline | None = None) -> list[int]:
    responses = worker_at(target).generate(tokens(count), deadline=deadline or soon())
    return [response.output.token_ids[0] async for response in responses]


async def test_a_call_gets_all_responses() -> None:
    async with serving(WORKER, Worker()) as (server, _):
        assert await generate(server.endpoint(), 3) == [0, 1, 2]
        assert await generate(server.endpoint(), 1000) == list(range(1000))


async def test_the_error_of_the_service_follows_its_responses() -> None:
    worker = Worker()
    worker.failure = GONE
    async with serving(WORKER, worker) as (server, _):
        responses = worker_at(server.endpoint()).generate(tokens(2), deadline=soon())
        assert [(await anext(responses)).output.token_ids[0] for _ in range(2)] == [0, 1]
        with pytest.raises(errors.OutOfRange, match="the events are gone") as raised:
            await anext(responses)
    assert (raised.value.info.field, raised.value.advice) == ("start", "Fetch the state.")


async def test_the_deadline_ends_a_call_on_both_sides() -> None:
    worker = Worker()
    async with serving(WORKER, worker) as (server, _):
        with pytest.raises(errors.DeadlineExceeded):
            await generate(server.endpoint(), 0, Deadline.after(0.2))
        async with asyncio.timeout(10):
            await worker.closed.wait()
    assert 0 < worker.deadlines[0].remaining() + 0.2 <= 0.3  # type: ignore[operator]


async def test_a_call_that_is_left_ends_at_its_server() -> None:
    worker = Worker()
    worker.endless = True
    async with serving(WORKER, worker) as (server, _):
        async with aclosing(worker_at(server.endpoint()).generate(tokens(0), deadline=soon())) as responses:
            async for _ in responses:
                break
        async with asyncio.timeout(10):
            await worker.closed.wait()
        await until_idle(server)


async def test_a_server_that_leaves_is_a_dependency_that_is_away() -> None:
    worker = Worker()
    async with serving(WORKER, worker) as (server, _):
        target = server.endpoint()
        calling = asyncio.create_task(generate(target, 0))
        async with asyncio.timeout(10):
            while not worker.deadlines:
                await asyncio.sleep(0.005)
        await server.drain(0)
        with pytest.raises(errors.KvRouterError):
            await calling
    with pytest.raises(errors.DependencyAway, match="cannot connect"):
        await generate(target, 1)


async def test_a_response_that_is_too_long_is_refused() -> None:
    async with serving(WORKER, Worker()) as (server, _):
        with pytest.raises(errors.TooLarge):
            await anext(worker_at(server.endpoint(), max_message_bytes=1).generate(tokens(1), deadline=soon()))


PIECE = WorkerServiceGenerateResponse(output=GenerateOutput(text="x" * (256 << 10)))


async def test_a_server_of_grpc_is_called_and_sends_no_more_than_is_read() -> None:
    sent = 0
    blocked = asyncio.Event()

    async def generate_pieces(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal sent
        count = WorkerServiceGenerateRequest.FromString(request).stop_conditions.max_tokens
        for _ in range(count):
            asyncio.get_running_loop().call_later(0.2, blocked_since, sent)
            yield PIECE.SerializeToString()
            sent += 1
        set_error(context, GONE)

    def blocked_since(before: int) -> None:
        if sent == before:
            blocked.set()

    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(generate_pieces)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(WORKER.full_name, {"Generate": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        responses = worker_at(f"127.0.0.1:{port}").generate(tokens(128), deadline=Deadline.after(30))
        assert await anext(responses) == PIECE
        async with asyncio.timeout(10):
            await blocked.wait()
        assert sent * PIECE.ByteSize() < 4 * CONNECTION_WINDOW_BYTES
        assert [await anext(responses) for _ in range(127)] == [PIECE] * 127
        with pytest.raises(errors.OutOfRange, match="the events are gone"):
            await anext(responses)
    finally:
        await server.stop(None)
