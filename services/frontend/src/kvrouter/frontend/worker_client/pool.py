"""Channels to workers, which are kept open, and the calls over them."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple, cast

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvrouter.runtime.contracts import Worker
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import worker_pb2
from kvrouter.v1.worker_pb2 import WorkerServiceGenerateRequest

_DESCRIPTOR = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
_PROBE_SECONDS = 30.0
"""Longest wait for the answer to one probe. A worker is suspected long before; this makes a lost call be made anew."""
_NO_ANSWER = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN}
)
"""Codes that gRPC gives where the worker may have said nothing. Any other is an answer of its event loop."""


class _Line(NamedTuple):
    channel: grpc.aio.Channel
    worker: Worker
    health: Any


class WorkerPool:
    """One channel for each worker address. Beyond ``max_channels`` the least recently used idle ones are closed."""

    def __init__(self, max_channels: int = 4096) -> None:
        self._max_channels = max_channels
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._calls: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._lines)

    async def generate(
        self, endpoint: str, request: WorkerServiceGenerateRequest, *, deadline: Deadline
    ) -> AsyncGenerator[bytes, None]:
        """The worker's answer, piece by piece, as encoded WorkerServiceGenerateResponse.

        Raises:
            KvRouterError: the worker refused the request, failed, or is out of reach.
        """
        worker = self._line(endpoint).worker
        self._calls[endpoint] += 1
        try:
            answer = worker.generate(request, deadline=deadline)
            del request  # See WorkerClient.generate.
            async with aclosing(answer) as pieces:
                async for piece in pieces:
                    yield cast(bytes, piece)
        finally:
            self._calls[endpoint] -= 1
            await self._close_surplus()

    async def probe(self, endpoint: str) -> bool:
        """Asks a worker for its health, over the connection that its requests use. Returns whether it answered.

        Any answer will do, also that it is draining, or that it does not offer grpc.health.
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
        """Closes every channel; calls that are under way are cancelled."""
        async with asyncio.TaskGroup() as group:
            while self._lines:
                group.create_task(self._lines.popitem()[1].channel.close())

    def _line(self, endpoint: str) -> _Line:
        line = self._lines.get(endpoint)
        if line is None:
            channel = open_channel(endpoint)
            stub = cast(Worker, remote(_DESCRIPTOR, channel, raw_responses=frozenset({"Generate"})))
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
