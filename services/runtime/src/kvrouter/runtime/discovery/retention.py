"""Keeps a registration that vanished for as long as the process behind it answers, for a bounded time.

Leases of live processes end where etcd itself was away for longer than they last, and keys go where somebody deletes
them; in both cases the process registers again within seconds, and can be called meanwhile. A process that is gone
refuses the connection, one that is frozen does not answer, and one that stops says so in grpc.health: their entries go
at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvrouter.runtime.rpc.client import open_channel

log = structlog.get_logger(component="discovery")

KEPT_SECONDS = 10.0
"""Longest time for which an entry is kept: a process registers again within a third of its lease, 3.3 s by default."""
_PROBE_SECONDS = 1.0
"""Deadline of a probe."""
_PAUSE_SECONDS = 0.5
"""Pause between two probes of one process."""
_PROBES = 64
"""Probes at one time."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process that was registered."""

    endpoint: str
    """Address of its gRPC server, host:port."""
    service: str
    """Full name of its gRPC service, which grpc.health reports on."""


class Retention:
    """Entries that are kept although etcd does not have them any more."""

    def __init__(self, drop: Callable[[str], None]) -> None:
        """``drop`` is called with the key of an entry that is not kept any longer."""
        self._drop = drop
        self._kept: dict[str, tuple[Process, asyncio.Task[None]]] = {}
        self._keys_at: dict[str, str] = {}
        self._slots = asyncio.Semaphore(_PROBES)

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        """Entries that are kept."""
        return len(self._kept)

    def keep(self, key: str, process: Process, tasks: asyncio.TaskGroup) -> None:
        """Keeps an entry for as long as its process answers, ``KEPT_SECONDS`` at most."""
        if key not in self._kept:
            self._kept[key] = process, tasks.create_task(self._verify(key, process), name=f"retention of {key}")
            self._keys_at[process.endpoint + process.service] = key

    def registered(self, key: str, process: Process | None) -> None:
        """Ends the keeping of an entry that is registered again, and of one whose address another process has now."""
        former = self._keys_at.get(process.endpoint + process.service, key) if process is not None else key
        for known in {key, former} & self._kept.keys():
            self._forget(known).cancel()
            if known != key:
                self._drop(known)

    def _forget(self, key: str) -> asyncio.Task[None]:
        process, task = self._kept.pop(key)
        place = process.endpoint + process.service
        if self._keys_at.get(place) == key:
            del self._keys_at[place]
        return task

    async def _verify(self, key: str, process: Process) -> None:
        answered = False
        try:
            async with asyncio.timeout(KEPT_SECONDS), open_channel(process.endpoint) as channel:
                while await self._answers(channel, process.service):
                    if not answered:
                        answered = True
                        log.info("registration.retained", key=key, endpoint=process.endpoint)
                    await asyncio.sleep(_PAUSE_SECONDS)
        except TimeoutError:
            log.warning("registration.expired", key=key, endpoint=process.endpoint)
        self._forget(key)
        self._drop(key)

    async def _answers(self, channel: grpc.aio.Channel, service: str) -> bool:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        async with self._slots:
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_PROBE_SECONDS)
            except grpc.aio.AioRpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
