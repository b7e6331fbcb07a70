"""Implements ``kvrouter component forget``."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from kvrouter.cli.arguments import component_name
from kvrouter.cli.connections import command_etcd
from kvrouter.cli.errors import CommandFailed, WrongUsage
from kvrouter.cli.terminal import PlainConsole
from kvrouter.net.etcd import AWAY, InvalidEndpoint, connect
from kvrouter.runtime.discovery.registry_views import build_views
from kvrouter.v1.names import ComponentName, worker_id_of_key
from kvrouter.v1.registry_pb2 import ComponentDescriptor


async def forget_component(component: str, etcd: str) -> None:
    """Deletes a component's descriptor in etcd, and prints it.

    Raises:
        WrongUsage: the name or an endpoint is malformed.
        CommandFailed: a worker of the component is registered, there is no descriptor, or etcd does not answer.
    """
    name = component_name(component)
    try:
        descriptor = await _forget(name, etcd)
    except InvalidEndpoint as error:
        raise WrongUsage(f"--etcd: {error}") from None
    except AWAY as error:
        raise CommandFailed(f"etcd at {etcd} does not answer: {error!r}") from None
    PlainConsole().print(f"{name} forgotten: {descriptor}")


async def _forget(name: ComponentName, etcd: str) -> str:
    async with connect(command_etcd(etcd)) as client:
        entries = {
            entry.key.decode(errors="replace"): entry.value for entry in await client.get_prefix(name.prefix.encode())
        }
        workers = [_worker_of(key) for key in entries if key.startswith(name.workers_prefix)]
        _, not_followed = build_views(entries, name.namespace)
        if workers and name.descriptor_key not in not_followed:
            shown = ", ".join(workers[:8]) + (", …" if len(workers) > 8 else "")
            raise CommandFailed(
                f"{name} has registered workers ({len(workers)}: {shown}): stop them and wait until their leases expire"
            )
        found = await client.get(name.descriptor_key.encode())
        if found is None:
            raise CommandFailed(f"{name} has no descriptor in etcd: check the name and --etcd")
        await client.delete(name.descriptor_key.encode())
        return _described(found.value)


def _worker_of(key: str) -> str:
    """Returns the worker id of a registration as it is shown everywhere, or the key if it has none."""
    worker_id = worker_id_of_key(key)
    return key if worker_id is None else str(worker_id)


def _described(value: bytes) -> str:
    try:
        descriptor = ComponentDescriptor.FromString(value)
    except DecodeError:
        return "its descriptor could not be decoded"
    return f"model {descriptor.model!r}, {descriptor.block_size} tokens a block"
