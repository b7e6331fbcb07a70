"""Builds views of components and services from registry entries, and decides which descriptors count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import TypeAlias

from kvrouter.net.decoding import Undecodable, decode_message
from kvrouter.net.etcd.registry_entries import read_descriptor, read_service, read_worker
from kvrouter.runtime.contracts import SERVICES
from kvrouter.runtime.discovery.retention import Process
from kvrouter.v1.common_pb2 import Component, Role, RoutingRequest
from kvrouter.v1.names import (
    ComponentName,
    InvalidName,
    components_prefix,
    drained_worker_of_key,
    namespace_prefix,
    worker_id_of_key,
)
from kvrouter.v1.registry_pb2 import (
    ComponentDescriptor,
    ServiceKind,
    ServiceRegistration,
    WorkerDrain,
    WorkerRegistration,
)

_OUTVOTE = 2
"""Workers that must agree before they outvote a written descriptor. One worker alone never does."""

_Shared: TypeAlias = tuple[str, int, str, int, int]


def followed_descriptor(
    name: ComponentName,
    written: ComponentDescriptor | None,
    former: ComponentDescriptor | None,
    workers: Collection[WorkerRegistration],
) -> ComponentDescriptor | None:
    """Returns the descriptor to follow; None if nothing describes the component.

    The key of a descriptor belongs to all workers of a component, so one of them could replace it. Each live worker
    has one vote for the properties in its registration. The former descriptor stays while it has as
    many votes as any other. Then the written one counts, unless at least two workers outvote it. If there is none, most
    votes decide, and of as many votes the lowest worker id.

    Args:
        name: The component.
        written: Its descriptor in etcd.
        former: The descriptor followed so far.
        workers: Its registered workers.
    """
    votes = Counter(map(_shared, workers))
    if not votes:
        return written
    most = max(votes.values())
    if former is not None and votes[_shared(former)] == most:
        return former
    if written is not None and (votes[_shared(written)] == most or most < _OUTVOTE):
        return written
    return _described(
        name, min((each for each in workers if votes[_shared(each)] == most), key=lambda each: each.worker_id)
    )


def _shared(entry: ComponentDescriptor | WorkerRegistration) -> _Shared:
    role = entry.role or Role.ROLE_BOTH
    return entry.model, entry.block_size, entry.hash_scheme, role, entry.max_model_len


def _described(name: ComponentName, worker: WorkerRegistration) -> ComponentDescriptor:
    return ComponentDescriptor(
        component=Component(namespace=name.namespace, name=name.name),
        model=worker.model,
        block_size=worker.block_size,
        hash_scheme=worker.hash_scheme,
        default_transport=worker.transport,
        role=worker.role or Role.ROLE_BOTH,
        max_model_len=worker.max_model_len or None,
    )


_REMEMBERED = 1 << 16

KINDS: Mapping[str, ServiceKind] = {
    "indexer": ServiceKind.SERVICE_KIND_INDEXER,
    "scheduler": ServiceKind.SERVICE_KIND_SCHEDULER,
    "frontend": ServiceKind.SERVICE_KIND_FRONTEND,
}
"""Kinds of services by their names in etcd."""


@dataclass
class ComponentView:
    """A component with its live workers. Read-only: its owner replaces it when something changes."""

    name: ComponentName
    descriptor: ComponentDescriptor
    workers: Mapping[int, WorkerRegistration] = field(default_factory=dict)
    """Live workers by id, without those contradicting the descriptor."""
    drains: Mapping[int, WorkerDrain] = field(default_factory=dict)
    """Drains that operators requested, by worker id. Their workers' registrations say they drain."""
    is_written: bool = True
    """Whether etcd has a descriptor, so the followed one need not be written."""

    @cached_property
    def model(self) -> str:
        """Name of its model. Reading it from the message takes many times as long."""
        return self.descriptor.model

    @cached_property
    def block_size(self) -> int:
        """Tokens of its blocks."""
        return self.descriptor.block_size

    @cached_property
    def role(self) -> Role:
        """Role of its workers."""
        return self.descriptor.role

    @cached_property
    def max_model_len(self) -> int:
        """Context length of its model, tokens; 0 if it is not known."""
        return self.descriptor.max_model_len

    @cached_property
    def routing_base(self) -> RoutingRequest:
        """The fields that all routing requests to the component have in common. Copy it, never change it."""
        return RoutingRequest(component=self.descriptor.component, block_size=self.block_size)

    @cached_property
    def publishes_events(self) -> bool:
        """Whether any worker does. Computed once, since it looks at all of them."""
        return any(worker.publishes_events for worker in self.workers.values())


@dataclass(frozen=True, slots=True)
class DescriptorKey:
    """Key of a component's descriptor."""

    component: ComponentName


@dataclass(frozen=True, slots=True)
class WorkerKey:
    """Key of a worker's registration."""

    component: ComponentName
    worker_id: int


@dataclass(frozen=True, slots=True)
class DrainKey:
    """Key of the drain of a worker."""

    component: ComponentName
    worker_id: int


@dataclass(frozen=True, slots=True)
class ServiceKey:
    """Key of a service's registration."""

    kind: str
    instance_id: str


@lru_cache(_REMEMBERED)
def parse_key(key: str, namespace: str) -> DescriptorKey | WorkerKey | DrainKey | ServiceKey | None:
    """Parses a registry key; returns None for keys of other kinds.

    Raises:
        Undecodable: the key has an invalid component or an unknown kind of service (reason ``invalid``).
    """
    services = f"{namespace_prefix(namespace)}services/"
    if key.startswith(services):
        kind, _, instance_id = key[len(services) :].partition("/")
        if kind not in KINDS or not instance_id:
            raise Undecodable("invalid", f"expected a key {services}KIND/ID with KIND one of {', '.join(KINDS)}")
        return ServiceKey(kind, instance_id)
    prefix = components_prefix(namespace)
    if not key.startswith(prefix):
        return None
    worker_id, drained_id = worker_id_of_key(key), drained_worker_of_key(key)
    if worker_id is None and drained_id is None and not key.endswith("/descriptor"):
        return None
    try:
        component = ComponentName(namespace, key[len(prefix) :].partition("/")[0])
    except InvalidName as error:
        raise Undecodable("invalid", str(error)) from None
    name: DescriptorKey | WorkerKey | DrainKey
    if worker_id is not None:
        name, expected = WorkerKey(component, worker_id), component.worker_key(worker_id)
    elif drained_id is not None:
        name, expected = DrainKey(component, drained_id), component.drain_key(drained_id)
    else:
        name, expected = DescriptorKey(component), component.descriptor_key
    if key != expected:
        raise Undecodable("invalid", f"expected the key {expected}")
    return name


def read_entry(
    key: str, raw: bytes, namespace: str
) -> ComponentDescriptor | WorkerRegistration | WorkerDrain | ServiceRegistration | None:
    """Parses a registry entry; returns None for keys of other kinds. Equal bytes return the same object.

    Raises:
        Undecodable: the key or the value is invalid.
    """
    match parse_key(key, namespace):
        case DescriptorKey(component):
            return _descriptor(component, raw)
        case WorkerKey(component, worker_id):
            return _worker(component, worker_id, raw)
        case DrainKey():
            return _drain(raw)
        case ServiceKey(_, instance_id):
            return read_service(instance_id, raw)
        case None:
            return None


def process_of(key: str, raw: bytes, namespace: str) -> Process | None:
    """Returns the process behind an entry; None for other entries, and for a stopping process."""
    try:
        name, entry = parse_key(key, namespace), read_entry(key, raw, namespace)
    except Undecodable:
        return None
    if isinstance(entry, WorkerRegistration) and entry.endpoint and not entry.draining:
        return Process(entry.endpoint, SERVICES["worker"].full_name, "worker")
    if isinstance(name, ServiceKey) and isinstance(entry, ServiceRegistration) and entry.ready:
        return Process(entry.endpoint, SERVICES[name.kind].full_name, name.kind)
    return None


def differences(descriptor: ComponentDescriptor, worker: WorkerRegistration) -> list[str]:
    """Returns how a worker differs from its component, as ``field received/expected``; empty if it matches."""
    pairs = (
        ("model", worker.model, descriptor.model),
        ("block_size", worker.block_size, descriptor.block_size),
        ("hash_scheme", worker.hash_scheme, descriptor.hash_scheme),
    )
    return [f"{name} {got!r}/{expected!r}" for name, got, expected in pairs if got != expected]


def build_views(
    entries: Mapping[str, bytes], namespace: str, former: Mapping[ComponentName, ComponentView] = MappingProxyType({})
) -> tuple[dict[ComponentName, ComponentView], dict[str, str]]:
    """Returns the components of a namespace, and for each entry left out, the reason by key.

    A worker is left out if it cannot be decoded, or differs from its component's descriptor. A descriptor is left out
    if it cannot be decoded, or live workers outvote it.

    Args:
        entries: Values by key.
        namespace: The namespace.
        former: The components as they were before the last change.
    """
    written: dict[ComponentName, ComponentDescriptor] = {}
    registered: dict[ComponentName, dict[int, WorkerRegistration]] = {}
    ignored: dict[str, str] = {}
    drains: dict[ComponentName, dict[int, WorkerDrain]] = {}
    for key, raw in entries.items():
        try:
            match parse_key(key, namespace):
                case DescriptorKey(component):
                    written[component] = _descriptor(component, raw)
                case WorkerKey(component, worker_id):
                    registered.setdefault(component, {})[worker_id] = _worker(component, worker_id, raw)
                case DrainKey(component, worker_id):
                    drains.setdefault(component, {})[worker_id] = _drain(raw)
        except Undecodable as error:
            ignored[key] = str(error)
    views: dict[ComponentName, ComponentView] = {}
    for name in dict.fromkeys([*written, *registered]):
        workers, known = registered.get(name, {}), former.get(name)
        found = written.get(name)
        descriptor = followed_descriptor(name, found, None if known is None else known.descriptor, workers.values())
        if descriptor is None:
            continue
        if found is not None and found != descriptor:
            ignored[name.descriptor_key] = "conflict: the component's workers do not agree with this descriptor"
        view = views[name] = ComponentView(name, descriptor, {}, drains.get(name, {}), is_written=found is not None)
        fitting: dict[int, WorkerRegistration] = {}
        for worker_id, worker in workers.items():
            if wrong := differences(descriptor, worker):
                ignored[name.worker_key(worker_id)] = f"differs from its component: {', '.join(wrong)}"
            elif worker_id in view.drains:
                fitting[worker_id] = _drained(name, worker_id, entries[name.worker_key(worker_id)])
            else:
                fitting[worker_id] = worker
        view.workers = fitting
    return views, ignored


def build_services(entries: Mapping[str, bytes], namespace: str) -> dict[str, dict[str, ServiceRegistration]]:
    """Returns the services of a namespace by kind and instance id, without undecodable entries."""
    services: dict[str, dict[str, ServiceRegistration]] = {}
    for key, raw in entries.items():
        try:
            name = parse_key(key, namespace)
            if isinstance(name, ServiceKey):
                services.setdefault(name.kind, {})[name.instance_id] = read_service(name.instance_id, raw)
        except Undecodable:
            continue
    return services


@lru_cache(_REMEMBERED)
def _worker(component: ComponentName, worker_id: int, raw: bytes) -> WorkerRegistration:
    # Cached, so that after a change only changed entries are parsed, and views share the other objects.
    return read_worker(component, worker_id, raw)


@lru_cache(_REMEMBERED)
def _drained(component: ComponentName, worker_id: int, raw: bytes) -> WorkerRegistration:
    registration = WorkerRegistration()
    registration.CopyFrom(_worker(component, worker_id, raw))
    registration.draining = True
    return registration


@lru_cache(_REMEMBERED)
def _drain(raw: bytes) -> WorkerDrain:
    return decode_message(WorkerDrain, raw)


@lru_cache(_REMEMBERED)
def _descriptor(component: ComponentName, raw: bytes) -> ComponentDescriptor:
    return read_descriptor(component, raw)
