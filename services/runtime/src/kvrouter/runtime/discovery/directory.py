"""The live components, workers and services of a namespace, as etcd lists them.

While etcd is away, ``Directory`` keeps its last state, so routing continues.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing

import structlog
from kvrouter.net.decoding import Quarantine, Undecodable
from kvrouter.net.etcd import Change, Delete, EtcdAccess, LeasedKeys, Put, Snapshot, watch_prefix
from kvrouter.net.local import LocalKeys
from kvrouter.net.ticks import REST_PER_WORK
from kvrouter.net.tls import Tls
from kvrouter.runtime.discovery.registry_views import (
    KINDS,
    ComponentView,
    build_services,
    build_views,
    differences,
    process_of,
    read_entry,
)
from kvrouter.runtime.discovery.retention import Retention
from kvrouter.v1.names import ComponentName, namespace_prefix, service_key
from kvrouter.v1.registry_pb2 import ServiceRegistration
from prometheus_client import CollectorRegistry, Counter, Gauge

__all__ = ["ComponentView", "Directory", "ServiceRegistrar", "build_views", "differences"]

log = structlog.get_logger(component="discovery")

_CONFLICT_ADVICE = "find out who wrote it; kvrouter component forget deletes it"


class Directory:
    """The registrations of a namespace. ``run`` must be running."""

    def __init__(
        self,
        etcd: str | EtcdAccess,
        namespace: str,
        registry: CollectorRegistry,
        *,
        source: Callable[[], AsyncGenerator[Change]] | None = None,
        quarantine: Quarantine | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Reads nothing yet.

        Args:
            etcd: etcd endpoints, separated by commas, or with user and certificates.
            namespace: The namespace to follow.
            registry: Registry for the metrics.
            source: Yields the entries and their changes; None for etcd. Only entries from etcd are retained when they
                vanish while their processes answer (``kvrouter.runtime.discovery.retention``).
            quarantine: Receives undecodable entries.
            tls: Encrypts connections to the processes found here.
        """
        self.tls = tls
        """TLS for connections to the registered processes; None for plain text."""
        self._quarantine = Quarantine() if quarantine is None else quarantine
        self._source = source or (
            lambda: watch_prefix(
                etcd, namespace_prefix(namespace), quarantine=self._quarantine, on_contact=self._confirm
            )
        )
        self._retains = source is None
        self._retention = Retention(self._drop, tls)
        self._undecodable: dict[str, str] = {}
        self._confirmed_at: float | None = None
        self._namespace = namespace
        self._entries: dict[str, bytes] = {}
        self.components: Mapping[ComponentName, ComponentView] = {}
        """Components with a descriptor. A new mapping with new views after each change."""
        self._services: dict[str, dict[str, ServiceRegistration]] = {}
        self.ignored: dict[str, str] = {}
        """Registrations left out, by key, with the reason."""
        self._synced = asyncio.Event()
        self._next_change = asyncio.Event()
        self._rebuilding: asyncio.TimerHandle | None = None
        self._rest_seconds = 0.0
        self._ignored_total = Counter(
            "kvrouter_directory_ignored",
            "Registrations ignored because they do not fit their component.",
            registry=registry,
        )
        conflicts = Gauge(
            "kvrouter_directory_conflicts",
            "Descriptors in etcd that are not followed, because live workers disagree with them.",
            registry=registry,
        )
        conflicts.set_function(lambda: len(self._conflicts(self.ignored)))
        workers = Gauge("kvrouter_directory_workers", "Live workers.", registry=registry)
        workers.set_function(lambda: sum(len(view.workers) for view in self.components.values()))
        retained = Gauge(
            "kvrouter_directory_retained",
            "Registrations that vanished from etcd and are retained because their processes answer.",
            registry=registry,
        )
        retained.set_function(lambda: len(self._retention))
        age = Gauge(
            "kvrouter_directory_age_seconds",
            "Time since etcd last confirmed the registrations; 0 before the first time, and without etcd.",
            registry=registry,
        )
        age.set_function(lambda: self.age_seconds or 0.0)

    def services(self, kind: str) -> Mapping[str, ServiceRegistration]:
        """Returns the live services of a kind (indexer, scheduler, frontend) by instance id."""
        return self._services.get(kind, {})

    def _conflicts(self, ignored: Mapping[str, str]) -> set[str]:
        keys = {name.descriptor_key for name in self.components}
        return keys & ignored.keys() - self._undecodable.keys()

    def ready_indexers(self, component: ComponentName) -> list[str]:
        """Returns the addresses of the ready Indexers of a component, in order of their ids."""
        name = (component.namespace, component.name)
        return [
            each.endpoint
            for _, each in sorted(self.services("indexer").items())
            if each.ready and (not each.components or any((one.namespace, one.name) == name for one in each.components))
        ]

    @property
    def is_synced(self) -> bool:
        """Whether the registrations have been read once."""
        return self._synced.is_set()

    @property
    def age_seconds(self) -> float | None:
        """Seconds since etcd last confirmed the registrations; None before the first time, and without etcd."""
        return None if self._confirmed_at is None else time.monotonic() - self._confirmed_at

    def _confirm(self) -> None:
        self._confirmed_at = time.monotonic()

    async def synced(self) -> None:
        """Returns when the registrations have been read once."""
        await self._synced.wait()

    async def changed(self) -> None:
        """Returns at the next change after this call."""
        await self._next_change.wait()

    async def wait_for(self, predicate: Callable[[Directory], bool]) -> None:
        """Returns when the predicate holds."""
        while not predicate(self):
            await self.changed()

    async def changes(self) -> AsyncIterator[Directory]:
        """Yields itself once it is synced and after each change; changes in quick succession count as one."""
        await self.synced()
        while True:
            change = self._next_change
            yield self
            await change.wait()

    async def run(self) -> None:
        """Follows etcd or another source until cancelled."""
        try:
            await self._follow()
        finally:
            if self._rebuilding is not None:
                self._rebuilding.cancel()

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as tasks, aclosing(self._source()) as changes:
            async for change in changes:
                match change:
                    case Snapshot(entries):
                        for key in (self._entries.keys() | self._undecodable.keys()) - entries.keys():
                            self._release(key)
                            self._vanish(key, tasks)
                        for key, value in entries.items():
                            self._put(key, value, tasks)
                        self._rebuild_soon()
                    case Put(key, value):
                        self._put(key, value, tasks)
                    case Delete(key):
                        self._release(key)
                        self._vanish(key, tasks)

    def _put(self, key: str, value: bytes, tasks: asyncio.TaskGroup) -> None:
        try:
            entry = read_entry(key, value, self._namespace)
        except Undecodable as error:
            self._quarantine.reject("etcd", key, error)
            self._undecodable[key] = str(error)
            self._vanish(key, tasks)
            self._rebuild_soon()
            return
        self._release(key)
        if entry is not None and self._entries.get(key) != value:
            self._entries[key] = value
            self._rebuild_soon()
        if self._retention:
            self._retention.registered(key, process_of(key, value, self._namespace))

    def _release(self, key: str) -> None:
        if self._undecodable.pop(key, None) is not None:
            self._quarantine.release("etcd", key)
            self._rebuild_soon()

    def _vanish(self, key: str, tasks: asyncio.TaskGroup) -> None:
        """Removes or retains an entry that etcd no longer has, or has in an undecodable form."""
        value = self._entries.get(key)
        if value is None:
            return
        process = process_of(key, value, self._namespace) if self._retains else None
        if process is not None:
            self._retention.keep(key, process, tasks)
        else:
            self._drop(key)

    def _drop(self, key: str) -> None:
        self._entries.pop(key, None)
        self._rebuild_soon()

    def _rebuild_soon(self) -> None:
        if self._rebuilding is None:
            self._rebuilding = asyncio.get_running_loop().call_later(self._rest_seconds, self._rebuild)

    def _rebuild(self) -> None:
        # Not clock time: a process that was frozen meanwhile would miss changes for many times as long.
        began = time.thread_time()
        self._rebuilding = None
        self._read_entries()
        # When thousands of entries change at once, rebuilds and their readers must leave time for other tasks.
        self._rest_seconds = REST_PER_WORK * (time.thread_time() - began)

    def _read_entries(self) -> None:
        self.components, ignored = build_views(self._entries, self._namespace, self.components)
        self._services = build_services(self._entries, self._namespace)
        ignored |= {key: reason for key, reason in self._undecodable.items() if key not in self._entries}
        for key in ignored.keys() - self.ignored.keys():
            self._ignored_total.inc()
            if key in self._undecodable:
                continue
            if key in self._conflicts(ignored):
                log.error("descriptor.conflict", key=key, reason=ignored[key], advice=_CONFLICT_ADVICE)
            else:
                log.warning("registration.ignored", key=key, reason=ignored[key])
        self.ignored = ignored
        self._synced.set()
        change, self._next_change = self._next_change, asyncio.Event()
        change.set()


class ServiceRegistrar:
    """Keeps the registrations of this process's services."""

    def __init__(self, keys: LeasedKeys | LocalKeys, namespace: str, instance_id: str) -> None:
        self._keys = keys
        self._namespace = namespace
        self._instance_id = instance_id
        self._registered: dict[str, ServiceRegistration] = {}

    def register(self, kind: str, registration: ServiceRegistration) -> None:
        """Registers a service of a kind (indexer, scheduler, frontend), or replaces its registration."""
        entry = ServiceRegistration()
        entry.CopyFrom(registration)
        entry.kind = KINDS[kind]
        entry.instance_id = self._instance_id
        self._registered[kind] = entry
        self._keys.put(service_key(self._namespace, kind, self._instance_id), entry.SerializeToString())

    def set_ready(self, kind: str, ready: bool) -> None:
        """Publishes whether a service is ready."""
        entry = self._registered.get(kind)
        if entry is not None and entry.ready != ready:
            entry.ready = ready
            self.register(kind, entry)

    def withdraw(self) -> None:
        """Deletes all registrations, so clients move to other replicas while running calls finish."""
        for kind in self._registered:
            self._keys.delete(service_key(self._namespace, kind, self._instance_id))
        self._registered.clear()

    async def wait_registered(self) -> None:
        """Returns when all registrations are in etcd."""
        await self._keys.wait_registered()
