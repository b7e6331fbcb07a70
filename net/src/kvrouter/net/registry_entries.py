"""Reads the registry's entries: descriptors, workers and services as etcd has them.

An entry must not only decode: what every reader relies on must hold, so that no reader has to check it again.
"""

from __future__ import annotations

import re

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from kvrouter.net.decoding import Undecodable, decode_message
from kvrouter.v1.common_pb2 import Component, Role, Transport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, ServiceRegistration, WorkerRegistration

_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]\x00-\x1f]+):[0-9]{1,5}")
_MAX_BLOCKS = (1 << 63) - 1


def read_descriptor(name: ComponentName, raw: bytes) -> ComponentDescriptor:
    """Reads a component's descriptor; its component is filled in where it has none.

    Raises:
        Undecodable: it cannot be decoded, is of another component, or describes nothing that can be served.
    """
    descriptor = decode_message(ComponentDescriptor, raw)
    _check_component(descriptor.component, name)
    if not descriptor.block_size:
        raise Undecodable("invalid", "expected a block_size of 1 or more, received 0")
    if not descriptor.model:
        raise Undecodable("invalid", "expected a model, received an empty name")
    _check_enum(descriptor.role, Role, "role")
    _check_enum(descriptor.default_transport, Transport, "default_transport")
    descriptor.component.CopyFrom(Component(namespace=name.namespace, name=name.name))
    return descriptor


def read_worker(name: ComponentName, worker_id: int, raw: bytes) -> WorkerRegistration:
    """Reads the registration of a worker.

    Raises:
        Undecodable: it cannot be decoded, is of another worker than its key names, or cannot be routed to.
    """
    worker = decode_message(WorkerRegistration, raw)
    if worker.worker_id != worker_id:
        raise Undecodable("invalid", f"the key names another worker than the entry, {worker.worker_id}")
    _check_component(worker.component, name)
    _check_address(worker.endpoint)
    _check_enum(worker.role, Role, "role")
    _check_enum(worker.transport, Transport, "transport")
    dp_ranks = [rank.dp_rank for rank in worker.ranks]
    if len(set(dp_ranks)) != len(dp_ranks):
        raise Undecodable("invalid", "expected each dp_rank once, received one twice")
    if any(rank.total_blocks > _MAX_BLOCKS for rank in worker.ranks):
        raise Undecodable("invalid", f"expected at most {_MAX_BLOCKS} blocks of a rank, received more")
    return worker


def read_service(instance_id: str, raw: bytes) -> ServiceRegistration:
    """Reads the registration of a service.

    Raises:
        Undecodable: it cannot be decoded, is of another instance than its key names, or is ready at no address.
    """
    service = decode_message(ServiceRegistration, raw)
    if service.instance_id not in ("", instance_id):
        raise Undecodable("invalid", f"the key names another instance than the entry, {service.instance_id!r}")
    _check_address(service.endpoint)
    _check_address(service.http_endpoint)
    if service.ready and not service.endpoint:
        raise Undecodable("invalid", "expected the endpoint of a service that is ready, received none")
    return service


def _check_component(component: Component, name: ComponentName) -> None:
    if component.ByteSize() and (component.namespace, component.name) != (name.namespace, name.name):
        raise Undecodable("invalid", f"the entry is of component {component.namespace}/{component.name}, not of {name}")


def _check_address(address: str) -> None:
    if address and not _ADDRESS.fullmatch(address):
        raise Undecodable("invalid", f"expected host:port, received {address[:100]!r}")


def _check_enum(value: int, kind: EnumTypeWrapper, field: str) -> None:
    if value not in kind.values():
        raise Undecodable("invalid", f"expected a known {field}, received {value}")
