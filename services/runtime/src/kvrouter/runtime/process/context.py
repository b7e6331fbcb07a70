"""Resources shared by the services of one process: discovery, NATS, metrics, registrations, background tasks."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import structlog
from aetcd import rpc
from kvrouter.net.auth import CallerCheck, ServiceToken, showing
from kvrouter.net.etcd import AWAY, Change, EtcdAccess, LeasedKeys, connect
from kvrouter.net.local import LocalKeys, LocalMessages, LocalSystem
from kvrouter.net.nats.client import TolerantClient
from kvrouter.net.nats.connection import connect_nats
from kvrouter.net.tls import Tls
from kvrouter.runtime.config.settings import ServiceSettings
from kvrouter.runtime.discovery.directory import Directory, ServiceRegistrar
from kvrouter.runtime.discovery.static_directory import StaticDiscovery
from kvrouter.runtime.telemetry.connection_metrics import CallerMetrics, CallStreamMetrics, NatsMetrics
from kvrouter.runtime.telemetry.metrics import metered_quarantine, new_registry
from kvrouter.runtime.tracing.configuration import tracing
from prometheus_client import CollectorRegistry
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

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
        local: LocalSystem | None = None,
    ) -> None:
        """``local`` takes the place of etcd and NATS; None for those of the settings."""
        self.settings = settings
        self.registry = registry
        """Registry of the process's metrics."""
        self.instance_id = settings.instance_id
        self.local = local
        """The registry and the messages of a system in one process; None for other systems."""
        listed = settings.static_endpoints()
        access = settings.etcd_access()
        self.etcd = access if listed is None and local is None else None
        """Where etcd is; None for a system without etcd."""
        self.keys: LeasedKeys | LocalKeys = (
            LeasedKeys(access, ttl_seconds=settings.lease_seconds) if local is None else LocalKeys(local.registry)
        )
        """Registrations with the lifetime of this process."""
        self.call_streams = CallStreamMetrics(registry)
        """Counts of the process's call streams."""
        self.quarantine = metered_quarantine(registry)
        """Entries of etcd and NATS skipped because they cannot be decoded."""
        self.tls = Tls.of(settings.tls_options())
        """TLS of this process's servers and clients; None for plain text."""
        self.callers = CallerCheck(self.tls, token)
        """Decides which processes may call this one."""
        CallerMetrics(registry, lambda: [self.callers])
        self.listed = None if listed is None else StaticDiscovery(listed, settings.namespace, registry, self.tls)
        """Discovery of listed workers; None if workers are discovered in etcd."""
        self.directory = Directory(
            access,
            settings.namespace,
            registry,
            source=self._source_of_entries(),
            quarantine=self.quarantine,
            tls=self.tls,
        )
        self.registrar = ServiceRegistrar(self.keys, settings.namespace, settings.instance_id)
        self._tasks = tasks
        self._background: set[asyncio.Task[None]] = set()
        self._nats_access = settings.nats_access()
        self._nats_metrics = NatsMetrics(registry)
        self._nats: asyncio.Future[TolerantClient] | None = None

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs a background task until it ends or the runtime is closed. Its failure ends the runtime."""
        task = self._tasks.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _source_of_entries(self) -> Callable[[], AsyncGenerator[Change]] | None:
        """Returns what yields the registrations; None for etcd."""
        if self.local is not None:
            return self.local.registry.changes
        return None if self.listed is None else self.listed.changes

    async def messages(self) -> TolerantClient | LocalMessages:
        """Returns where to receive messages of other processes, or of others in this one. Waits while NATS is away."""
        return await self.nats() if self.local is None else self.local.messages

    async def nats(self) -> TolerantClient:
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

    async def _keep_nats(self, connected: asyncio.Future[TolerantClient]) -> None:
        try:
            async with connect_nats(self._nats_access, self.instance_id, self._nats_metrics) as client:
                connected.set_result(client)
                await client.wait_closed()
                raise NatsClosed(f"NATS refused the connection: {client.last_error}")
        finally:
            connected.cancel()


@asynccontextmanager
async def open_runtime(
    settings: ServiceSettings, registry: CollectorRegistry | None = None, *, local: LocalSystem | None = None
) -> AsyncIterator[Runtime]:
    """Opens a runtime, following etcd, the listed workers, or a local registry, while the context lasts.

    Neither etcd nor NATS has to be reachable yet. With listed workers, and with ``local`` in their place, neither is
    used at all.
    """
    registry = registry if registry is not None else new_registry()
    token = ServiceToken.of(settings.service_token_file)
    with showing(token):
        async with _running(settings, registry, token, local) as runtime:
            yield runtime


@asynccontextmanager
async def _running(
    settings: ServiceSettings, registry: CollectorRegistry, token: ServiceToken | None, local: LocalSystem | None
) -> AsyncIterator[Runtime]:
    async with tracing(settings, registry), asyncio.TaskGroup() as tasks:
        runtime = Runtime(settings, registry, tasks, token, local)
        runtime.spawn(runtime.directory.run(), "directory")
        if runtime.listed is None:
            runtime.spawn(runtime.keys.run(), "keys")
        if runtime.etcd is not None:
            runtime.spawn(warn_if_outdated(runtime.etcd), "etcd version")
        try:
            yield runtime
        finally:
            await runtime.close()


log = structlog.get_logger(component="discovery")

_CALL_SECONDS = 3.0
REPAIRED = ((3, 5, 33), (3, 6, 14), (3, 7, 1))
"""First release of each series not affected by CVE-2026-33343, -33413, -44283 and -73499."""


def is_outdated(version: str) -> bool:
    """Returns whether users of this version of etcd can evade their permissions; False for an unknown form."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None:
        return False
    numbers = tuple(map(int, found.groups()))
    return numbers < next((first for first in REPAIRED if first[:2] >= numbers[:2]), (0,))


async def warn_if_outdated(etcd: EtcdAccess) -> None:
    """Logs ``etcd.outdated`` if this process has a user in an etcd whose users can evade their permissions."""
    if not etcd.user:
        return
    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(AWAY), wait=wait_random_exponential(multiplier=0.5, max=30)
    ):
        with attempt:
            async with connect(etcd) as client:
                # Not `client.status`, which asks for the members as well: only administrators may list them.
                status = client.maintenancestub.Status
                answer = await status(rpc.StatusRequest(), metadata=client.metadata, timeout=_CALL_SECONDS)
                version = str(answer.version)
    if is_outdated(version):
        advice = f"use {', '.join('.'.join(map(str, each)) for each in REPAIRED)} or newer"
        log.warning("etcd.outdated", version=version, consequence="users read and write all keys", advice=advice)
