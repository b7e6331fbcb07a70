"""Parses and validates registry entries from etcd: descriptors, workers and services.

Checks the assumptions of all readers, once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from kvrouter.net.decoding import Undecodable, decode_message
from kvrouter.v1.common_pb2 import Component, Role, Transport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, RankRegistration, ServiceRegistration, WorkerRegistration

_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]\x00-\x1f]+):[0-9]{1,5}")
_URL = re.compile(r"https?://[^\s/]")
_MAX_BLOCKS = (1 << 63) - 1
MAX_NAME_CHARACTERS = 1024
"""Longest name of a model, an adapter or a label. Names become labels of metrics and lines of logs."""


def name_fault(name: str) -> str:
    """Returns the fault in the name of a model, an adapter or a label; empty for none."""
    if len(name) > MAX_NAME_CHARACTERS:
        return f"expected at most {MAX_NAME_CHARACTERS} characters, received {len(name)}"
    if not name.isprintable():
        return f"expected printable characters, received {name[:100]!a}"
    return ""


def read_descriptor(name: ComponentName, raw: bytes) -> ComponentDescriptor:
    """Parses a component's descriptor, and fills in its component if it has none.

    Raises:
        Undecodable: it cannot be decoded, belongs to another component, or has an invalid field.
    """
    descriptor = decode_message(ComponentDescriptor, raw)
    _check_component(descriptor.component, name)
    if not descriptor.block_size:
        raise Undecodable("invalid", "expected a block_size of 1 or more, received 0")
    if not descriptor.model:
        raise Undecodable("invalid", "expected a model, received an empty name")
    _check_names("model", [descriptor.model])
    _check_enum(descriptor.role, Role, "role")
    _check_enum(descriptor.default_transport, Transport, "default_transport")
    descriptor.component.CopyFrom(Component(namespace=name.namespace, name=name.name))
    return descriptor


def read_worker(name: ComponentName, worker_id: int, raw: bytes) -> WorkerRegistration:
    """Parses the registration of a worker.

    Raises:
        Undecodable: it cannot be decoded, does not match its key, or has an invalid field.
    """
    worker = decode_message(WorkerRegistration, raw)
    if worker.worker_id != worker_id:
        raise Undecodable("invalid", f"expected worker_id {worker_id} as in the key, received {worker.worker_id}")
    _check_component(worker.component, name)
    is_openai_server = _URL.match(worker.endpoint) and worker.endpoint == worker.openai_endpoint
    if not is_openai_server:
        _check_address(worker.endpoint)
    _check_enum(worker.role, Role, "role")
    _check_enum(worker.transport, Transport, "transport")
    _check_names("model", [worker.model])
    _check_names("lora_names", worker.lora_names)
    _check_names("labels", [*worker.labels, *worker.labels.values()])
    dp_ranks = [rank.dp_rank for rank in worker.ranks]
    if len(set(dp_ranks)) != len(dp_ranks):
        raise Undecodable("invalid", "expected each dp_rank once, received one twice")
    for field in ("max_batched_tokens", "max_sequences", "heartbeat_ms", "vocabulary_size"):
        _check_known(worker, field)
    for rank in worker.ranks:
        _check_known(rank, "total_blocks")
    if any(rank.total_blocks > _MAX_BLOCKS for rank in worker.ranks):
        raise Undecodable("invalid", f"expected at most {_MAX_BLOCKS} blocks per rank, received more")
    return worker


def read_service(instance_id: str, raw: bytes) -> ServiceRegistration:
    """Parses the registration of a service.

    Raises:
        Undecodable: it cannot be decoded, does not match its key, or is ready without an address.
    """
    service = decode_message(ServiceRegistration, raw)
    if service.instance_id not in ("", instance_id):
        raise Undecodable("invalid", f"expected instance {instance_id!r} by the key, received {service.instance_id!r}")
    _check_address(service.endpoint)
    _check_address(service.http_endpoint)
    if service.ready and not service.endpoint:
        raise Undecodable("invalid", "expected an endpoint, because the service is ready, received none")
    return service


def _check_component(component: Component, name: ComponentName) -> None:
    if component.ByteSize() and (component.namespace, component.name) != (name.namespace, name.name):
        raise Undecodable("invalid", f"expected component {name}, received {component.namespace}/{component.name}")


def _check_names(field: str, names: Iterable[str]) -> None:
    for name in names:
        if fault := name_fault(name):
            raise Undecodable("invalid", f"{field}: {fault}")


def _check_known(entry: WorkerRegistration | RankRegistration, field: str) -> None:
    if field in entry and not getattr(entry, field):
        raise Undecodable("invalid", f"expected {field} of 1 or more, or unset while unknown, received 0")


def _check_address(address: str) -> None:
    if address and not _ADDRESS.fullmatch(address):
        raise Undecodable("invalid", f"expected host:port, received {address[:100]!r}")


def _check_enum(value: int, kind: EnumTypeWrapper, field: str) -> None:
    if value not in kind.DESCRIPTOR.values_by_number:
        raise Undecodable("invalid", f"expected a known {field}, received {value}")
