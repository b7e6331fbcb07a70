"""Retains a vanished registration while its process answers, for a limited time.

The lease of a live process ends if etcd was away for longer than the lease lasts, and a key vanishes if somebody
deletes it. In both cases the process registers again within seconds and can serve meanwhile. A dead process refuses the
connection, a frozen one does not answer, and a stopping one reports that in grpc.health: their entries are dropped at
once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvrouter.net.tls import Tls
from kvrouter.runtime.rpc.client import open_channel

log = structlog.get_logger(component="discovery")

KEPT_SECONDS = 10.0
"""Maximum time to retain an entry. A process registers again within a third of its lease, 3.3 s by default."""
_PROBE_SECONDS = 1.0
"""Deadline of a probe."""
_PAUSE_SECONDS = 0.5
"""Pause between two probes of one process."""
_PROBES = 64
"""Maximum number of concurrent probes."""


@dataclass(frozen=True, slots=True)
class Process:
    """A registered process."""

    endpoint: str
    """Address of its gRPC server, host:port."""
    service: str
    """Full name of its gRPC service in grpc.health."""
    role: str
    """frontend, scheduler, indexer or worker."""


class Retention:
    """Retained entries."""

    def __init__(self, drop: Callable[[str], None], tls: Tls | None = None) -> None:
        """``drop`` is called with the key of an entry after its retention; ``tls`` is used for probes."""
        self._tls = tls
        self._drop = drop
        self._kept: dict[str, tuple[Process, asyncio.Task[None]]] = {}
        self._keys_at: dict[str, str] = {}
        self._slots = asyncio.Semaphore(_PROBES)

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        """Returns the number of retained entries."""
        return len(self._kept)

    def keep(self, key: str, process: Process, tasks: asyncio.TaskGroup) -> None:
        """Retains an entry while its process answers, at most ``KEPT_SECONDS``."""
        if key not in self._kept:
            self._kept[key] = process, tasks.create_task(self._verify(key, process), name=f"retention of {key}")
            self._keys_at[process.endpoint + process.service] = key

    def registered(self, key: str, process: Process | None) -> None:
        """Ends the retention of an entry registered again, or whose address belongs to another process now."""
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
            async with asyncio.timeout(KEPT_SECONDS), self._channel(process) as channel:
                while await self._answers(channel, process.service):
                    if not answered:
                        answered = True
                        log.info("registration.retained", key=key, endpoint=process.endpoint)
                    await asyncio.sleep(_PAUSE_SECONDS)
        except TimeoutError:
            log.warning("registration.expired", key=key, endpoint=process.endpoint)
        self._forget(key)
        self._drop(key)

    def _channel(self, process: Process) -> grpc.aio.Channel:
        return open_channel(process.endpoint, tls=self._tls, role=process.role)

    async def _answers(self, channel: grpc.aio.Channel, service: str) -> bool:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        async with self._slots:
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_PROBE_SECONDS)
            except grpc.aio.AioRpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
