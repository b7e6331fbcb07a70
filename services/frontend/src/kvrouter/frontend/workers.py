"""Calls to workers, over channels that are kept open."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import grpc.aio
from kvrouter.runtime.contracts import Worker
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import worker_pb2
from kvrouter.v1.worker_pb2 import WorkerServiceGenerateRequest

_DESCRIPTOR = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]


class WorkerPool:
    """One channel for each worker address, the most recently used ``max_channels`` of them."""

    def __init__(self, max_channels: int = 4096) -> None:
        self._max_channels = max_channels
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._in_use: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._channels)

    async def generate(
        self, endpoint: str, request: WorkerServiceGenerateRequest, *, deadline: Deadline
    ) -> AsyncGenerator[bytes, None]:
        """The worker's answer, piece by piece, as encoded WorkerServiceGenerateResponse.

        Raises:
            KvRouterError: the worker refused the request, failed, or is out of reach.
        """
        worker = cast(Worker, remote(_DESCRIPTOR, self._channel(endpoint), raw_responses=frozenset({"Generate"})))
        self._in_use[endpoint] = self._in_use.get(endpoint, 0) + 1
        try:
            async with aclosing(worker.generate(request, deadline=deadline)) as pieces:
                async for piece in pieces:
                    yield cast(bytes, piece)
        finally:
            self._in_use[endpoint] -= 1
            if not self._in_use[endpoint]:
                del self._in_use[endpoint]
                await self._close_surplus()

    async def close(self) -> None:
        """Closes every channel; calls that are under way are cancelled."""
        async with asyncio.TaskGroup() as group:
            while self._channels:
                _, channel = self._channels.popitem()
                group.create_task(channel.close())

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = self._channels[endpoint] = open_channel(endpoint)
        self._channels.move_to_end(endpoint)
        return channel

    async def _close_surplus(self) -> None:
        surplus = len(self._channels) - self._max_channels
        idle = [endpoint for endpoint in self._channels if endpoint not in self._in_use][: max(0, surplus)]
        for endpoint in idle:
            await self._channels.pop(endpoint).close()
