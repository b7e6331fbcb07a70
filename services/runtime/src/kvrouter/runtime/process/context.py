"""Resources shared by the services of one process: discovery, NATS, metrics, registrations, background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from kvrouter.net.auth import CallerCheck, ServiceToken, showing
from kvrouter.net.etcd import LeasedKeys
from kvrouter.net.nats.connection import connect_nats
from kvrouter.net.tls import Tls
from kvrouter.runtime.config.settings import ServiceSettings
from kvrouter.runtime.discovery.directory import Directory, ServiceRegistrar
from kvrouter.runtime.discovery.static_directory import StaticDiscovery
from kvrouter.runtime.process.etcd_version import warn_if_outdated
from kvrouter.runtime.telemetry.call_streams import CallStreamMetrics
from kvrouter.runtime.telemetry.callers import CallerMetrics
from kvrouter.runtime.telemetry.metrics import new_registry
from kvrouter.runtime.telemetry.nats import NatsMetrics
from kvrouter.runtime.telemetry.quarantine import metered_quarantine
from kvrouter.runtime.tracing.configuration import tracing
from nats.aio.client import Client
from prometheus_client import CollectorRegistry

_WITHDRAW_SECONDS = 5.0
"""Maximum time to delete registrations at the end; if etcd is away, the lease expires instead."""


class NatsClosed(Exception):
    """NATS closed the connection permanently, for example because it refused the credentials."""


class Runtime:
    """Created by ``open_runtime``. A failed background task ends the runtime's context with its error."""

    def __init__(
        self,
        settings: ServiceSettings,
        registry: CollectorRegistry,
        tasks: asyncio.TaskGroup,
        token: ServiceToken | None = None,
    ) -> None:
        self.settings = settings
        self.registry = registry
        """Registry of the process's metrics."""
        self.instance_id = settings.instance_id
        self.etcd = settings.etcd_access()
        """Where etcd is."""
        self.keys = LeasedKeys(self.etcd, ttl_seconds=settings.lease_seconds)
        """Keys that exist in etcd for as long as this process lives."""
        self.call_streams = CallStreamMetrics(registry)
        """Counts of the process's call streams."""
        self.quarantine = metered_quarantine(registry)
        """Entries of etcd and NATS that were skipped because they cannot be decoded."""
        self.tls = Tls.of(settings.tls_options())
        """TLS of this process's servers and clients; None for plain text."""
        self.callers = CallerCheck(self.tls, token)
        """Decides which processes may call this one."""
        CallerMetrics(registry, lambda: [self.callers])
        listed = settings.static_endpoints()
        self.listed = None if listed is None else StaticDiscovery(listed, settings.namespace, registry, self.tls)
        """Discovery of listed workers; None if workers are discovered in etcd."""
        self.directory = Directory(
            self.etcd,
            settings.namespace,
            registry,
            source=None if self.listed is None else self.listed.changes,
            quarantine=self.quarantine,
            tls=self.tls,
        )
        self.registrar = ServiceRegistrar(self.keys, settings.namespace, settings.instance_id)
        self._tasks = tasks
        self._background: set[asyncio.Task[None]] = set()
        self._nats_access = settings.nats_access()
        self._nats_metrics = NatsMetrics(registry)
        self._nats: asyncio.Future[Client] | None = None

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs a background task until it ends or the runtime is closed. Its failure ends the runtime."""
        task = self._tasks.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def nats(self) -> Client:
        """Returns the process's NATS connection, which the first call opens. Waits while NATS is away."""
        if self._nats is None:
            self._nats = asyncio.get_running_loop().create_future()
            self.spawn(self._keep_nats(self._nats), "nats")
        return await asyncio.shield(self._nats)

    async def close(self) -> None:
        """Deletes registrations and ends background tasks."""
        self.keys.stop()
        withdrawing = [task for task in self._background if task.get_name() == "keys"]
        if withdrawing:
            await asyncio.wait(withdrawing, timeout=_WITHDRAW_SECONDS)
        for task in list(self._background):
            task.cancel()

    async def _keep_nats(self, connected: asyncio.Future[Client]) -> None:
        try:
            async with connect_nats(self._nats_access, self.instance_id, self._nats_metrics) as client:
                connected.set_result(client)
                await client.wait_closed()
                raise NatsClosed(f"NATS refused the connection: {client.last_error}")
        finally:
            connected.cancel()


@asynccontextmanager
async def open_runtime(settings: ServiceSettings, registry: CollectorRegistry | None = None) -> AsyncIterator[Runtime]:
    """Opens a runtime that follows etcd, or the listed workers, while the context lasts.

    Neither etcd nor NATS has to be reachable yet. With listed workers, neither is used at all.
    """
    registry = registry if registry is not None else new_registry()
    token = ServiceToken.of(settings.service_token_file)
    with showing(token):
        async with _running(settings, registry, token) as runtime:
            yield runtime


@asynccontextmanager
async def _running(
    settings: ServiceSettings, registry: CollectorRegistry, token: ServiceToken | None
) -> AsyncIterator[Runtime]:
    async with tracing(settings, registry), asyncio.TaskGroup() as tasks:
        runtime = Runtime(settings, registry, tasks, token)
        runtime.spawn(runtime.directory.run(), "directory")
        if runtime.listed is None:
            runtime.spawn(runtime.keys.run(), "keys")
            runtime.spawn(warn_if_outdated(runtime.etcd), "etcd version")
        try:
            yield runtime
        finally:
            await runtime.close()
