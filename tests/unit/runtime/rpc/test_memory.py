"""A request that was refused, or whose call failed, is freed with its answer; it does not wait for the collector."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from kvrouter.v1 import errors
from kvrouter.v1.worker_pb2 import AbortRequest

from ....garbage import no_request_is_garbage
from .rpc_harness import WORKER, Worker, serving, tokens, until_idle

LONG = AbortRequest(request_ids=["a" * 100])
SILENT = b"\x12\x64" + bytes(100)
"""A request without ids, to which the worker gives no answer, with an unknown field."""

TIMES = 3
"""Of which the last may still be under way when its client has its answer."""


async def ended(call: Any) -> grpc.StatusCode:
    return await call.code()


@pytest.mark.parametrize("failure", [errors.BadRequest("no"), RuntimeError("broken"), TimeoutError()])
async def test_a_refused_request_is_freed(failure: Exception) -> None:
    class Refusing(Worker):
        async def abort(self, request: AbortRequest, *, deadline: Any) -> Any:
            raise type(failure)(*failure.args)

    worker = Refusing()
    worker.failure = failure
    async with serving(WORKER, worker) as (server, channel):
        unary: Any = channel.unary_unary("/kvrouter.v1.WorkerService/Abort")
        stream: Any = channel.unary_stream("/kvrouter.v1.WorkerService/Generate")
        with no_request_is_garbage():
            for _ in range(TIMES):
                assert await ended(unary(LONG.SerializeToString())) != grpc.StatusCode.OK
                assert await ended(unary(b"\xff" * 100)) == grpc.StatusCode.INVALID_ARGUMENT
                worker.failure = type(failure)(*failure.args)
                call = stream(tokens(1).SerializeToString() + SILENT)
                await call.read()
                assert await ended(call) != grpc.StatusCode.OK
            await until_idle(server)


async def test_a_request_that_timed_out_is_freed() -> None:
    async with serving(WORKER, Worker()) as (server, channel):
        unary: Any = channel.unary_unary("/kvrouter.v1.WorkerService/Abort")
        with no_request_is_garbage():
            for _ in range(TIMES):
                assert await ended(unary(SILENT, timeout=0.05)) == grpc.StatusCode.DEADLINE_EXCEEDED
                await until_idle(server)


async def test_a_cancelled_request_is_freed() -> None:
    worker = Worker()
    async with serving(WORKER, worker) as (server, channel):
        unary: Any = channel.unary_unary("/kvrouter.v1.WorkerService/Abort")
        with no_request_is_garbage():
            for _ in range(TIMES):
                worker.entered.clear()
                call = unary(SILENT)
                await worker.entered.wait()
                call.cancel()
                await until_idle(server)
