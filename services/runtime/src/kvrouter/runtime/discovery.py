"""Who is there: components with their workers, and services, as etcd has them.

``Directory`` follows a namespace. While etcd is away it keeps what it last knew: workers that serve go on serving.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import lru_cache

import structlog
from google.protobuf.message import DecodeError
from kvrouter.publisher.etcd import Change, Delete, LeasedKeys, Put, Snapshot, watch_prefix
from kvrouter.v1.names import (
    ComponentName,
    InvalidName,
    components_prefix,
    namespace_prefix,
    service_key,
    worker_id_of_key,
)
from kvrouter.v1.registry_pb2 import ComponentDescriptor, ServiceKind, ServiceRegistration, WorkerRegistration
from prometheus_client import CollectorRegistry, Counter, Gauge

log = structlog.get_logger(component="discovery")

_REMEMBERED = 1 << 16
_REST = 20.0
"""Between two readings of all entries pass so many times what one takes."""

KINDS: Mapping[str, ServiceKind] = {
    "indexer": ServiceKind.SERVICE_KIND_INDEXER,
    "scheduler": ServiceKind.SERVICE_KIND_SCHEDULER,
    "frontend": ServiceKind.SERVICE_KIND_FRONTEND,
}
"""Kinds of services by their names in etcd."""


@dataclass(slots=True)
class ComponentView:
    """A component as it is. Readers leave it alone; its owner replaces what changes."""

    name: ComponentName
    descriptor: ComponentDescriptor
    workers: Mapping[int, WorkerRegistration] = field(default_factory=dict)
    """Live workers by id, those left out that differ from the descriptor."""


def differences(descriptor: ComponentDescriptor, worker: WorkerRegistration) -> list[str]:
    """What a worker has otherwise than its component, as ``field got/expected``. Empty for one that fits."""
    pairs = (
        ("model", worker.model, descriptor.model),
        ("block_size", worker.block_size, descriptor.block_size),
        ("hash_scheme", worker.hash_scheme, descriptor.hash_scheme),
    )
    return [f"{name} {got!r}/{expected!r}" for name, got, expected in pairs if got != expected]


def build_views(
    entries: Mapping[str, bytes], namespace: str
) -> tuple[dict[ComponentName, ComponentView], dict[str, str]]:
    """The components that a namespace's entries in etcd describe, and by key, why entries were left out.

    A worker is left out if it cannot be read, if its component has no descriptor, or if it differs from the descriptor.
    """
    views: dict[ComponentName, ComponentView] = {}
    ignored: dict[str, str] = {}
    prefix = components_prefix(namespace)
    for key, value in entries.items():
        if key.startswith(prefix) and key.endswith("/descriptor"):
            try:
                name = ComponentName(namespace, key[len(prefix) :].removesuffix("/descriptor"))
                views[name] = ComponentView(name, ComponentDescriptor.FromString(value))
            except (DecodeError, InvalidName) as error:
                ignored[key] = str(error)
    named = {name.name: view for name, view in views.items()}
    workers: dict[str, dict[int, WorkerRegistration]] = {name: {} for name in named}
    for key, value in entries.items():
        worker_id = worker_id_of_key(key) if key.startswith(prefix) else None
        if worker_id is None:
            continue
        try:
            worker = _worker(value)
        except DecodeError as error:
            ignored[key] = str(error)
            continue
        name_text = key[len(prefix) :].partition("/")[0]
        if worker.worker_id != worker_id:
            ignored[key] = f"the key names another worker than the entry, {worker.worker_id}"
        elif name_text not in named:
            ignored[key] = "the component has no descriptor"
        elif wrong := differences(named[name_text].descriptor, worker):
            ignored[key] = f"differs from its component: {', '.join(wrong)}"
        else:
            workers[name_text][worker_id] = worker
    for name_text, view in named.items():
        view.workers = workers[name_text]
    return views, ignored


@lru_cache(_REMEMBERED)
def _worker(value: bytes) -> WorkerRegistration:
    """A registration; the same object for the same bytes, so that a change costs no more than what it changed."""
    return WorkerRegistration.FromString(value)


class Directory:
    """What is registered in a namespace. ``run`` must be running."""

    def __init__(
        self,
        etcd_endpoints: str,
        namespace: str,
        registry: CollectorRegistry,
        *,
        source: Callable[[], AsyncGenerator[Change]] | None = None,
    ) -> None:
        """``source`` tells the entries and their changes where they do not come from etcd."""
        self._source = source or (lambda: watch_prefix(etcd_endpoints, namespace_prefix(namespace)))
        self._namespace = namespace
        self._entries: dict[str, bytes] = {}
        self._components: dict[ComponentName, ComponentView] = {}
        self._services: dict[str, dict[str, ServiceRegistration]] = {}
        self._ignored: dict[str, str] = {}
        self._synced = asyncio.Event()
        self._next_change = asyncio.Event()
        self._rebuilding: asyncio.TimerHandle | None = None
        self._rest_seconds = 0.0
        self._ignored_total = Counter(
            "kvrouter_directory_ignored", "Registrations left out because they do not fit.", registry=registry
        )
        workers = Gauge("kvrouter_directory_workers", "Live workers.", registry=registry)
        workers.set_function(lambda: sum(len(view.workers) for view in self._components.values()))

    @property
    def components(self) -> Mapping[ComponentName, ComponentView]:
        """The components that have a descriptor. A new mapping, with new views, after each change."""
        return self._components

    def services(self, kind: str) -> Mapping[str, ServiceRegistration]:
        """The live services of a kind (indexer, scheduler, frontend), by instance id."""
        return self._services.get(kind, {})

    @property
    def ignored(self) -> Mapping[str, str]:
        """Registrations that are left out, by key, with the reason."""
        return self._ignored

    @property
    def is_synced(self) -> bool:
        """Whether etcd has been read once."""
        return self._synced.is_set()

    async def synced(self) -> None:
        """Returns when etcd has been read once."""
        await self._synced.wait()

    async def changed(self) -> None:
        """Returns at the next change. What changes between this call and its answer is not missed."""
        await self._next_change.wait()

    async def wait_for(self, predicate: Callable[[Directory], bool]) -> None:
        """Returns when the predicate holds."""
        while not predicate(self):
            await self.changed()

    async def changes(self) -> AsyncIterator[Directory]:
        """Itself, at once if it is synced, and after each change; changes that come close together count as one."""
        await self.synced()
        while True:
            change = self._next_change
            yield self
            await change.wait()

    async def run(self) -> None:
        """Follows etcd, or what stands for it, until cancelled."""
        try:
            await self._follow()
        finally:
            if self._rebuilding is not None:
                self._rebuilding.cancel()

    async def _follow(self) -> None:
        async with aclosing(self._source()) as changes:
            async for change in changes:
                match change:
                    case Snapshot(entries):
                        self._entries = dict(entries)
                    case Put(key, value):
                        self._entries[key] = value
                    case Delete(key):
                        self._entries.pop(key, None)
                if self._rebuilding is None:
                    self._rebuilding = asyncio.get_running_loop().call_later(self._rest_seconds, self._rebuild)

    def _rebuild(self) -> None:
        began = time.perf_counter()
        self._rebuilding = None
        self._read_entries()
        # Where thousands come back at once, this and those who wait for changes must leave the loop to others.
        self._rest_seconds = _REST * (time.perf_counter() - began)

    def _read_entries(self) -> None:
        self._components, ignored = build_views(self._entries, self._namespace)
        self._services = _build_services(self._entries, self._namespace, ignored)
        for key in ignored.keys() - self._ignored.keys():
            self._ignored_total.inc()
            log.warning("registration ignored", key=key, reason=ignored[key])
        self._ignored = ignored
        self._synced.set()
        change, self._next_change = self._next_change, asyncio.Event()
        change.set()


def _build_services(
    entries: Mapping[str, bytes], namespace: str, ignored: dict[str, str]
) -> dict[str, dict[str, ServiceRegistration]]:
    services: dict[str, dict[str, ServiceRegistration]] = {}
    prefix = f"{namespace_prefix(namespace)}services/"
    for key, value in entries.items():
        if not key.startswith(prefix):
            continue
        kind, _, instance_id = key[len(prefix) :].partition("/")
        try:
            services.setdefault(kind, {})[instance_id] = ServiceRegistration.FromString(value)
        except DecodeError as error:
            ignored[key] = str(error)
    return services


class ServiceRegistrar:
    """Keeps the registrations of the services in this process in etcd."""

    def __init__(self, keys: LeasedKeys, namespace: str, instance_id: str) -> None:
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
        """Says whether a service is ready."""
        entry = self._registered.get(kind)
        if entry is not None and entry.ready != ready:
            entry.ready = ready
            self.register(kind, entry)

    def withdraw(self) -> None:
        """Takes all registrations back, so that clients go elsewhere before the calls under way have finished."""
        for kind in self._registered:
            self._keys.delete(service_key(self._namespace, kind, self._instance_id))
        self._registered.clear()

    async def wait_held(self) -> None:
        """Returns when etcd has all registrations."""
        await self._keys.wait_held()
