"""A system with an endpoint picker, for tests."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
from kvrouter.publisher.worker import WorkerConfig, running
from kvrouter.v1.names import ComponentName

from ....waiting import until
from ..gateway import MODEL, System
from .gateway_stream import GatewayStream


class Gateway:
    """A system with an endpoint picker."""

    def __init__(self, system: System, address: str) -> None:
        self.system = system
        self.address = address
        # A channel of its own: by default one to an earlier server at the same port lends its connection.
        self.channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._streams: list[GatewayStream] = []

    def stream(self) -> GatewayStream:
        """Opens a stream. It is kept: gRPC cancels a call that nobody refers to, which would free its booking."""
        self._streams.append(GatewayStream(self.channel))
        return self._streams[-1]

    async def add_engine(self, worker_id: int, **fields: Any) -> str:
        """Registers a worker whose requests reach the engine by another way; its OpenAI address, once it is picked."""
        config = self.config(worker_id, **fields)
        await self.system.stack.enter_async_context(running(config))
        await self.system.until_candidate(worker_id)
        await until(self.system.frontend.ready)
        return config.openai_endpoint.removeprefix("http://")

    def config(self, worker_id: int, component: str = "workers", **fields: Any) -> WorkerConfig:
        """Returns the registration of such a worker."""
        known: dict[str, Any] = {"openai_endpoint": f"http://127.0.0.1:{20_000 + worker_id}", "ranks": {0: 1000}}
        where = self.system.where
        return WorkerConfig(
            component=ComponentName(where["namespace"], component),
            block_size=16,
            worker_id=worker_id,
            etcd=where["etcd"],
            nats=where["nats"],
            **({"model": MODEL} | known | fields),
        )

    async def until_booked(self, *counts: int) -> None:
        """Returns when the workers have so many bookings, in the order of their ids."""
        async with asyncio.timeout(30):
            while True:
                loads = await self.system.loads()
                if tuple(loads[worker_id].active_requests for worker_id in sorted(loads)) == counts:
                    return
                await asyncio.sleep(0.01)
