"""Open channels to workers, and the calls over them."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol, cast

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvrouter.frontend.worker_client.attempt import RunningCall
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import worker_pb2

_DESCRIPTOR = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
_PROBE_SECONDS = 30.0
"""Timeout of one probe call, seconds. A worker is suspected long before; a call that was lost is made again."""
_NO_ANSWER = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN}
)
"""Codes that gRPC may generate without any answer from the worker. Any other code comes from its event loop."""


class ResponseReceiver(Protocol):
    """Receives the responses of one call. Its methods are called from the connection's reader and must not block."""

    def on_response(self, encoded: bytes) -> None:
        """Receives an encoded response."""
        ...

    def on_end(self) -> None:
        """Receives the end of a call that succeeded."""
        ...

    def on_error(self, error: Exception) -> None:
        """Receives the error of a call that failed: a KvRouterError, unless this process is at fault."""
        ...


class _EncodedWorker(Protocol):
    def generate(self, request: bytes, *, deadline: Deadline) -> AsyncGenerator[bytes, None]: ...


class _Line(NamedTuple):
    channel: grpc.aio.Channel
    worker: _EncodedWorker
    health: Any


class WorkerPool:
    """One channel per worker address. Beyond ``max_channels`` the least recently used idle channels are closed."""

    def __init__(self, max_channels: int = 4096) -> None:
        self._max_channels = max_channels
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._calls: Counter[str] = Counter()
        self._reading: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._lines)

    def start(self, endpoint: str, request: bytes, receiver: ResponseReceiver, *, deadline: Deadline) -> RunningCall:
        """Calls Generate with an encoded WorkerServiceGenerateRequest.

        The receiver gets encoded WorkerServiceGenerateResponse messages, then the end or the error of the call.
        """
        line = self._line(endpoint)
        self._calls[endpoint] += 1
        reading = asyncio.create_task(self._read(endpoint, line.worker, request, receiver, deadline))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        return reading

    async def _read(
        self, endpoint: str, worker: _EncodedWorker, request: bytes, receiver: ResponseReceiver, deadline: Deadline
    ) -> None:
        try:
            responses = worker.generate(request, deadline=deadline)
            del request  # gRPC keeps it for as long as it needs it.
            async with aclosing(responses):
                async for response in responses:
                    receiver.on_response(response)
            receiver.on_end()
        except Exception as error:
            receiver.on_error(error)
        finally:
            self._calls[endpoint] -= 1
            await self._close_surplus()

    async def probe(self, endpoint: str) -> bool:
        """Checks a worker's health over the connection that its requests use. Returns whether it answered.

        Any answer counts, even that the worker is draining or does not implement grpc.health.
        """
        health = self._line(endpoint).health
        self._calls[endpoint] += 1
        try:
            await health.Check(health_pb2.HealthCheckRequest(service=_DESCRIPTOR.full_name), timeout=_PROBE_SECONDS)
        except grpc.aio.AioRpcError as error:
            return error.code() not in _NO_ANSWER
        finally:
            self._calls[endpoint] -= 1
            await self._close_surplus()
        return True

    async def close(self) -> None:
        """Cancels running calls and closes all channels."""
        for reading in self._reading:
            reading.cancel()
        if self._reading:
            await asyncio.wait(self._reading)
        async with asyncio.TaskGroup() as group:
            while self._lines:
                group.create_task(self._lines.popitem()[1].channel.close())

    def _line(self, endpoint: str) -> _Line:
        line = self._lines.get(endpoint)
        if line is None:
            channel = open_channel(endpoint)
            stub = cast(_EncodedWorker, remote(_DESCRIPTOR, channel, raw_responses=frozenset({"Generate"})))
            line = self._lines[endpoint] = _Line(channel, stub, health_pb2_grpc.HealthStub(channel))
        self._lines.move_to_end(endpoint)
        return line

    async def _close_surplus(self) -> None:
        surplus = len(self._lines) - self._max_channels
        if surplus <= 0:
            return
        idle = [endpoint for endpoint in self._lines if not self._calls[endpoint]]
        for endpoint in idle[:surplus]:
            del self._calls[endpoint]
            await self._lines.pop(endpoint).channel.close()
