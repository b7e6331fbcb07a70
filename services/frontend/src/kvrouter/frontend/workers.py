"""Calls to workers, over channels that are kept open."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple, cast

import grpc.aio
from kvrouter.runtime.contracts import Worker
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import worker_pb2
from kvrouter.v1.worker_pb2 import WorkerServiceGenerateRequest

_DESCRIPTOR = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]


class _Line(NamedTuple):
    channel: grpc.aio.Channel
    worker: Worker


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
        worker = self._worker(endpoint)
        self._calls[endpoint] += 1
        try:
            async with aclosing(worker.generate(request, deadline=deadline)) as pieces:
                async for piece in pieces:
                    yield cast(bytes, piece)
        finally:
            self._calls[endpoint] -= 1
            await self._close_surplus()

    async def close(self) -> None:
        """Closes every channel; calls that are under way are cancelled."""
        async with asyncio.TaskGroup() as group:
            while self._lines:
                group.create_task(self._lines.popitem()[1].channel.close())

    def _worker(self, endpoint: str) -> Worker:
        line = self._lines.get(endpoint)
        if line is None:
            channel = open_channel(endpoint)
            stub = cast(Worker, remote(_DESCRIPTOR, channel, raw_responses=frozenset({"Generate"})))
            line = self._lines[endpoint] = _Line(channel, stub)
        self._lines.move_to_end(endpoint)
        return line.worker

    async def _close_surplus(self) -> None:
        surplus = len(self._lines) - self._max_channels
        if surplus <= 0:
            return
        idle = [endpoint for endpoint in self._lines if not self._calls[endpoint]]
        for endpoint in idle[:surplus]:
            del self._calls[endpoint]
            await self._lines.pop(endpoint).channel.close()
