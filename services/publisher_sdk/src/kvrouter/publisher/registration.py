"""Where a worker registers and publishes. In etcd it negotiates its component's descriptor and its incarnation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import aetcd
from kvrouter.net.decoding import Undecodable, decode_message
from kvrouter.net.etcd import AWAY, KeyTaken, LeasedKeys, connect, is_forbidden
from kvrouter.net.etcd.registry_entries import read_descriptor
from kvrouter.net.logs import get_logger
from kvrouter.publisher.config import WorkerConfig
from kvrouter.publisher.errors import DescriptorMismatch
from kvrouter.publisher.publishing.transport import Link, NatsLink
from kvrouter.publisher.snapshots.rank_file import Recovered
from kvrouter.v1.common_pb2 import Role, Transport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, IncarnationRecord, WorkerRegistration
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

log = get_logger(__name__)

_MAX_INCARNATION = 1 << 63
"""Nanoseconds since 1970, in the year 2262. No worker begins a higher incarnation, and none could follow it, so that a
higher value in etcd is invalid."""


async def join_component(
    client: aetcd.Client, component: ComponentName, desired: ComponentDescriptor
) -> ComponentDescriptor:
    """Returns the component's descriptor, and writes ``desired`` if there is none.

    Where the worker's user may not write it, a Scheduler does so as soon as the worker is registered.

    Raises:
        DescriptorMismatch: a shared property of all workers differs.
        One of ``kvrouter.net.etcd.AWAY``: etcd is away.
    """
    name = component.descriptor_key.encode()
    entry = await client.get(name)
    if entry is None:
        return await _create_descriptor(client, component, desired)
    try:
        settled = read_descriptor(component, entry.value)
    except Undecodable as error:
        # No reader accepts it, so the next worker to join replaces it unless another process did so meanwhile.
        log.warning("descriptor.replaced", key=component.descriptor_key, reason=error.reason, detail=str(error))
        await client.transaction(
            compare=[client.transactions.mod(name) == entry.mod_revision],
            success=[client.transactions.put(name, desired.SerializeToString())],
            failure=[],
        )
        return await join_component(client, component, desired)
    check_descriptor(component, settled, desired)
    return settled


def check_descriptor(component: ComponentName, settled: ComponentDescriptor, desired: ComponentDescriptor) -> None:
    """Compares a worker's descriptor with that of the component it joins.

    Raises:
        DescriptorMismatch: a shared property of all workers differs.
    """
    differences = {
        field: (getattr(settled, field), getattr(desired, field))
        for field in ("model", "block_size", "hash_scheme", "max_model_len")
        if getattr(settled, field) != getattr(desired, field)
    }
    if (settled.role or Role.ROLE_BOTH) != desired.role:
        differences["role"] = (Role.Name(settled.role), Role.Name(desired.role))
    if differences:
        raise DescriptorMismatch(str(component), differences)


async def _create_descriptor(
    client: aetcd.Client, component: ComponentName, desired: ComponentDescriptor
) -> ComponentDescriptor:
    name = component.descriptor_key.encode()
    try:
        written, _responses = await client.transaction(
            compare=[client.transactions.create(name) == 0],
            success=[client.transactions.put(name, desired.SerializeToString())],
            failure=[],
        )
    except AWAY as error:
        if not is_forbidden(error):
            raise
        return desired
    return desired if written else await join_component(client, component, desired)


async def begin_incarnation(client: aetcd.Client, component: ComponentName, worker_id: int, now_ns: int) -> int:
    """Begins a new incarnation of the worker: the higher of ``now_ns`` (wall clock) and the last incarnation plus one.

    The last incarnation is the higher of the recorded and the registered one, since the record can be lost while the
    registration remains.

    Raises:
        One of ``kvrouter.net.etcd.AWAY``: etcd is away.
    """
    name = component.incarnation_key(worker_id).encode()
    while True:
        entry = await client.get(name)
        last, revision = (_incarnation(entry.value), entry.mod_revision) if entry is not None else (0, 0)
        live = await client.get(component.worker_key(worker_id).encode())
        registered = registered_incarnation(live.value) if live is not None else 0
        incarnation = max(now_ns, last + 1, registered + 1)
        if await _put_incarnation(client, name, revision, incarnation):
            return incarnation


async def resume_incarnation(client: aetcd.Client, component: ComponentName, worker_id: int, incarnation: int) -> bool:
    """Resumes an incarnation unless a later one has begun. Returns whether it was resumed.

    Raises:
        One of ``kvrouter.net.etcd.AWAY``: etcd is away.
    """
    name = component.incarnation_key(worker_id).encode()
    entry = await client.get(name)
    if entry is not None and _incarnation(entry.value) > incarnation:
        return False
    # The unchanged record is written, so that this and a worker that begins an incarnation now notice each other.
    return await _put_incarnation(client, name, entry.mod_revision if entry else 0, incarnation)


async def keep_incarnation(client: aetcd.Client, component: ComponentName, worker_id: int, incarnation: int) -> None:
    """Restores the incarnation record if etcd lost it, or has an earlier or undecodable one.

    Raises:
        KeyTaken: a later one has begun, though its worker may be gone: it fences all reports of this one.
        One of ``kvrouter.net.etcd.AWAY``: etcd is away.
    """
    name = component.incarnation_key(worker_id).encode()
    entry = await client.get(name)
    recorded = 0 if entry is None else _incarnation(entry.value)
    if recorded > incarnation:
        raise KeyTaken(component.worker_key(worker_id))
    if recorded < incarnation:
        # If another incarnation is written at this moment, it stays, and the next renewal checks again.
        await _put_incarnation(client, name, 0 if entry is None else entry.mod_revision, incarnation)


def companions(component: ComponentName, worker_id: int, incarnation: int) -> dict[str, Callable[[bytes], bool]]:
    """Returns a worker's keys without a lease in etcd, each with a function to check a value."""

    def is_descriptor(value: bytes) -> bool:
        try:
            read_descriptor(component, value)
        except Undecodable:
            return False
        return True

    return {
        component.descriptor_key: is_descriptor,
        component.incarnation_key(worker_id): lambda value: _incarnation(value) >= incarnation,
    }


def registered_incarnation(value: bytes) -> int:
    """Returns the incarnation of an encoded registration; 0 if it cannot be decoded or is invalid."""
    try:
        ranks = decode_message(WorkerRegistration, value).ranks
    except Undecodable:
        return 0
    return max((rank.incarnation for rank in ranks if rank.incarnation < _MAX_INCARNATION), default=0)


async def _put_incarnation(client: aetcd.Client, name: bytes, revision: int, incarnation: int) -> bool:
    written, _responses = await client.transaction(
        compare=[client.transactions.mod(name) == revision],
        success=[client.transactions.put(name, IncarnationRecord(incarnation=incarnation).SerializeToString())],
        failure=[],
    )
    return bool(written)


def _incarnation(value: bytes) -> int:
    """Returns a recorded incarnation; 0 if it cannot be decoded or is invalid."""
    try:
        incarnation = decode_message(IncarnationRecord, value).incarnation
    except Undecodable:
        return 0
    return incarnation if incarnation < _MAX_INCARNATION else 0


class Keys(Protocol):
    """Registrations with the lifetime of a worker."""

    def put(self, key: str, value: bytes) -> None:
        """Sets the value of a key."""

    def stop(self) -> None:
        """Removes the keys, and lets ``run`` return."""

    async def run(self) -> None:
        """Keeps the keys until ``stop`` or cancellation."""

    @property
    def registered(self) -> bool:
        """Whether others see the keys, as far as is known."""

    @property
    def registrations(self) -> int:
        """How often all keys were written anew."""

    async def wait_registered(self) -> None:
        """Waits until others see the keys."""


class System(Protocol):
    """The system that a worker joins."""

    async def settle(self, config: WorkerConfig, former: int | None) -> tuple[int, Transport]:
        """Joins the component. Returns the incarnation, ``former`` if it can be resumed, and the transport.

        Raises:
            DescriptorMismatch: the worker does not fit its component.
        """

    def offer(self, config: WorkerConfig, states: Mapping[int, Recovered]) -> None:
        """Hands resumed states, by rank, to readers of the worker's events that know nothing of it."""

    def keys(self, config: WorkerConfig, incarnation: int) -> Keys:
        """Returns the worker's registrations, still without any."""

    def link(self, config: WorkerConfig) -> Link:
        """Returns the worker's way to the readers of its events and of its load."""


class EtcdAndNats:
    """Implements System with the etcd and the NATS of the worker's configuration."""

    async def settle(self, config: WorkerConfig, former: int | None) -> tuple[int, Transport]:
        """Implements System. Waits for etcd."""

        def tell(state: RetryCallState) -> None:
            if state.attempt_number == 1 and state.outcome is not None:
                log.warning("etcd.waiting", endpoints=str(config.etcd), error=str(state.outcome.exception()))

        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(AWAY), wait=wait_random_exponential(multiplier=0.2, max=3), before_sleep=tell
        ):
            with attempt:
                async with connect(config.etcd) as client:
                    descriptor = await join_component(client, config.component, config.descriptor())
                    transport = config.transport or descriptor.default_transport or Transport.TRANSPORT_DURABLE
                    if former and await resume_incarnation(client, config.component, config.worker_id, former):
                        return former, transport
                    begun = await begin_incarnation(client, config.component, config.worker_id, time.time_ns())
                    return begun, transport
        raise AssertionError("unreachable: the retry ends by return or by an exception")

    def offer(self, config: WorkerConfig, states: Mapping[int, Recovered]) -> None:
        """Implements System. Indexers ask the worker."""

    def keys(self, config: WorkerConfig, incarnation: int) -> Keys:
        """Implements System."""

        async def restore() -> None:
            """Restores the descriptor and the incarnation record, which etcd may have lost with the registration."""
            async with connect(config.etcd) as client:
                await join_component(client, config.component, config.descriptor())
                await keep_incarnation(client, config.component, config.worker_id, incarnation)

        return LeasedKeys(
            config.etcd,
            ttl_seconds=config.lease_ttl_seconds,
            on_registered=restore,
            incarnation_of=registered_incarnation,
            companions=companions(config.component, config.worker_id, incarnation),
        )

    def link(self, config: WorkerConfig) -> Link:
        """Implements System."""
        return NatsLink(config.nats, f"kvrouter-worker-{config.worker_id:016x}")
