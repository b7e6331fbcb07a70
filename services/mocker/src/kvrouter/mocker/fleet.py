"""Many simulated workers in one process, which share a connection to NATS and a lease in etcd."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrouter.mocker.app import running
from kvrouter.mocker.settings import MockerSettings
from kvrouter.net.etcd import LeasedKeys
from kvrouter.net.local import LocalKeys
from kvrouter.publisher.config import WorkerConfig
from kvrouter.publisher.publishing.transport import Link, NatsLink
from kvrouter.publisher.registration import EtcdAndNats, Keys
from kvrouter.v1.common_pb2 import Transport

_START_SECONDS = 60.0
"""Longest time without collection of garbage: a start waits for an etcd that is away, and retries make garbage."""


@asynccontextmanager
async def running_fleet(settings: MockerSettings) -> AsyncIterator[None]:
    """Runs ``workers_per_process`` workers, registered and serving, while the context lasts.

    A given worker id is that of the first; the others follow.

    Raises:
        ExceptionGroup: of what ``running`` raises.
    """
    system, stopping = _SharedSystem(settings), asyncio.Event()
    serving = asyncio.Barrier(settings.workers_per_process + 1)

    async def run(number: int) -> None:
        worker_id = None if settings.worker_id is None else settings.worker_id + number
        own = settings.model_copy(update={"worker_id": worker_id})
        async with running(own, None, system) as worker:  # Nobody can read metrics of one of them.
            await worker.registered()
            await serving.wait()
            await stopping.wait()

    async with system.open(), asyncio.TaskGroup() as workers:
        gc.disable()  # It would look at all of them again and again, and none is garbage.
        collecting = asyncio.get_running_loop().call_later(_START_SECONDS, gc.enable)
        try:
            for number in range(settings.workers_per_process):
                workers.create_task(run(number), name=f"worker {number}")
            await serving.wait()
        finally:
            collecting.cancel()
            gc.collect()  # What is frozen is never collected.
            gc.freeze()
            gc.enable()
        try:
            yield
        finally:
            stopping.set()


class _SharedSystem(EtcdAndNats):
    """The etcd and the NATS of all workers. Their incarnations are not recorded: each begins when it starts."""

    def __init__(self, settings: MockerSettings) -> None:
        self._keys = LeasedKeys(settings.etcd_access(), ttl_seconds=settings.lease_seconds)
        self._link = _SharedLink(settings.nats_access(), "kvrouter-workers")
        self._joining: asyncio.Task[tuple[int, Transport]] | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Keeps the connection and the lease while the context lasts."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._keys.run()), tasks.create_task(self._link.open())]
            try:
                yield
            finally:
                for task in running:
                    task.cancel()

    async def settle(self, config: WorkerConfig, former: int | None) -> tuple[int, Transport]:
        """Implements System. One worker joins the component for all."""
        self._joining = self._joining or asyncio.create_task(super().settle(config, former))
        _, transport = await asyncio.shield(self._joining)
        return time.time_ns(), transport

    def keys(self, config: WorkerConfig, incarnation: int) -> Keys:  # noqa: ARG002 - one lease is for all
        """Implements System."""
        return _OwnKeys(self._keys)

    def link(self, config: WorkerConfig) -> Link:  # noqa: ARG002 - one connection is for all
        """Implements System."""
        return self._link


class _OwnKeys(LocalKeys):
    """Implements Keys for one worker. The lease is that of all workers."""

    def __init__(self, shared: LeasedKeys) -> None:
        super().__init__(shared)
        self._shared = shared

    @property
    def registered(self) -> bool:
        """Implements Keys."""
        return self._shared.registered

    @property
    def registrations(self) -> int:
        """Implements Keys."""
        return self._shared.registrations

    async def wait_registered(self) -> None:
        """Implements Keys."""
        await self._shared.wait_registered()


class _SharedLink(NatsLink):
    """A connection that is open already when a worker runs it."""

    open = NatsLink.run

    async def run(self) -> None:
        """Implements Link."""
        await asyncio.Event().wait()
