"""Objects of a contract behind a real gRPC server, called through a real channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import RpcServer, call_stream_client, open_channel, remote, remote_on_call_stream
from kvrouter.v1 import indexer_pb2, scheduler_pb2, worker_pb2
from kvrouter.v1.worker_pb2 import (
    AbortRequest,
    AbortResponse,
    WorkerServiceGenerateRequest,
    WorkerServiceGenerateResponse,
)

INDEXER = indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"]

SCHEDULER = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]

WORKER = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]


class Worker:
    """Generates as many pieces as asked for; says what it saw."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()
        self.deadlines: list[Deadline] = []
        self.failure: Exception | None = None
        self.endless = False

    async def generate(
        self, request: WorkerServiceGenerateRequest, *, deadline: Deadline
    ) -> AsyncGenerator[WorkerServiceGenerateResponse, None]:
        self.deadlines.append(deadline)
        try:
            produced = 0
            while self.endless or produced < request.stop_conditions.max_tokens:
                yield WorkerServiceGenerateResponse(output=worker_pb2.GenerateOutput(token_ids=[produced]))
                produced += 1
                self.entered.set()
            if self.failure is not None:
                raise self.failure
            if not request.stop_conditions.max_tokens:
                await self.go_on.wait()
        finally:
            self.closed.set()

    async def abort(self, request: AbortRequest, *, deadline: Deadline) -> AbortResponse:
        self.deadlines.append(deadline)
        self.entered.set()
        try:
            if self.failure is not None:
                raise self.failure
            if not request.request_ids:
                await self.go_on.wait()
            return AbortResponse(aborted=len(request.request_ids))
        finally:
            self.closed.set()


@asynccontextmanager
async def serving(
    descriptor: Any, implementation: object, *, address: str = "127.0.0.1:0"
) -> AsyncIterator[tuple[RpcServer, grpc.aio.Channel]]:
    server = RpcServer(address)
    server.add_service(descriptor, implementation)
    await server.start()
    channel = open_channel(server.endpoint())
    try:
        yield server, channel
    finally:
        await channel.close()
        await server.drain(0)


TRANSPORTS = pytest.mark.parametrize("transport", ["rpc", "call stream"])


@asynccontextmanager
async def called(descriptor: Any, implementation: object, transport: str) -> AsyncIterator[tuple[RpcServer, Any]]:
    """A server, and a stub whose calls travel as ordinary RPCs or on a call stream."""
    async with serving(descriptor, implementation) as (server, channel):
        if transport == "rpc":
            yield server, remote(descriptor, channel)
            return
        client = call_stream_client(server.endpoint(), client_name="tester")
        running = asyncio.create_task(client.run())
        try:
            yield server, remote_on_call_stream(descriptor, client)
        finally:
            running.cancel()
            await asyncio.wait([running])


def soon() -> Deadline:
    return Deadline.after(10)


def tokens(count: int) -> WorkerServiceGenerateRequest:
    return WorkerServiceGenerateRequest(stop_conditions=worker_pb2.StopConditions(max_tokens=count))


async def until_idle(server: RpcServer) -> None:
    async with asyncio.timeout(10):
        while server.calls:
            await asyncio.sleep(0.005)
