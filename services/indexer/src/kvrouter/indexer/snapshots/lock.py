"""State of snapshots in etcd: the lock, the pointer to the newest snapshots, and the applied records of replicas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kvrouter.net.decoding import Quarantine, Undecodable, decode_message, decode_text, printable
from kvrouter.net.etcd import AWAY, EtcdAccess, connect
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import AppliedRecord
from kvrouter.v1.snapshot_pb2 import SnapshotLock, SnapshotPointer


class LockLost(Exception):
    """Raised when another replica has the lock, or the lease of this one expired. The pointer must not be changed."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """The pointer to the newest snapshots, as read from etcd."""

    value: SnapshotPointer
    revision: int
    """Modification revision of its key; 0 if there is none."""


async def read_pointer(client: Any, component: ComponentName, quarantine: Quarantine) -> Pointer:
    """Returns the pointer. An undecodable one is quarantined, and returned as empty with its revision.

    Raises:
        One of ``kvrouter.net.etcd.AWAY``: etcd is unreachable.
    """
    key = component.snapshot_key
    entry = await client.get(key.encode())
    pointer = SnapshotPointer()
    try:
        if entry is not None:
            pointer = decode_message(SnapshotPointer, entry.value)
        quarantine.release("etcd", key)
    except Undecodable as error:
        quarantine.reject("etcd", key, error)
    return Pointer(pointer, 0 if entry is None else entry.mod_revision)


async def live_replicas(client: Any, component: ComponentName, quarantine: Quarantine) -> dict[str, AppliedRecord]:
    """Returns how far each live replica has applied the stream, by replica id.

    An undecodable record is quarantined. With a lease it may belong to a live replica, so it counts as one
    that has applied nothing. Without a lease it is ignored.
    """
    prefix = component.applied_key("x")[:-1]
    records = {}
    for pair in await client.get_prefix(prefix.encode()):
        name = printable(pair.key)
        try:
            key = decode_text(pair.key)
            records[key[len(prefix) :]] = decode_message(AppliedRecord, pair.value)
            quarantine.release("etcd", name)
        except Undecodable as error:
            quarantine.reject("etcd", name, error)
            if pair.lease:
                records[name[len(prefix) :]] = AppliedRecord()
    return records


class AcquiredLock:
    """The acquired snapshot lock. Writes are fenced: a process paused past its lease cannot write."""

    def __init__(self, client: Any, component: ComponentName, revision: int) -> None:
        self.client = client
        self._component = component
        self._key = component.snapshot_lock_key.encode()
        self._revision = revision

    async def check(self) -> None:
        """Checks that this process has the lock.

        Raises:
            LockLost: it no longer does.
        """
        entry = await self.client.get(self._key)
        if entry is None or entry.create_revision != self._revision:
            raise LockLost("expected to have the snapshot lock, but its lease expired or another replica has it")

    async def move(self, before: Pointer, after: SnapshotPointer | None) -> None:
        """Replaces the pointer; None deletes it.

        Raises:
            LockLost: this process no longer has the lock, or the pointer is not ``before``.
        """
        transactions = self.client.transactions
        name = self._component.snapshot_key.encode()
        change = transactions.delete(name) if after is None else transactions.put(name, after.SerializeToString())
        written, _responses = await self.client.transaction(
            compare=[transactions.create(self._key) == self._revision, transactions.mod(name) == before.revision],
            success=[change],
            failure=[],
        )
        if not written:
            raise LockLost("the snapshot lock expired, or another replica has changed the pointer")


@asynccontextmanager
async def acquired(
    etcd: str | EtcdAccess, component: ComponentName, replica_id: str, ttl_seconds: int, quarantine: Quarantine
) -> AsyncIterator[AcquiredLock]:
    """Acquires the component's snapshot lock under a lease of ``ttl_seconds``, which is renewed until the context ends.

    A lock key without a lease belongs to no replica. It is quarantined and replaced.

    Raises:
        LockLost: another replica has the lock.
        One of ``kvrouter.net.etcd.AWAY``: etcd is unreachable.
    """
    key = component.snapshot_lock_key.encode()
    async with connect(etcd) as client:
        lease = await client.lease(ttl_seconds)
        value = SnapshotLock(replica_id=replica_id).SerializeToString()
        await _delete_unleased(client, component, quarantine)
        try:
            taken, _responses = await client.transaction(
                compare=[client.transactions.create(key) == 0],
                success=[client.transactions.put(key, value, lease.id)],
                failure=[],
            )
            entry = await client.get(key) if taken else None
            if entry is None:
                raise LockLost("another replica has the snapshot lock; try again later")
            renewing = asyncio.ensure_future(_renew(client, lease.id, ttl_seconds))
            try:
                yield AcquiredLock(client, component, entry.create_revision)
            finally:
                renewing.cancel()
                await asyncio.wait({renewing})
        finally:
            with contextlib.suppress(*AWAY):
                await client.revoke_lease(lease.id)


async def _delete_unleased(client: Any, component: ComponentName, quarantine: Quarantine) -> None:
    key = component.snapshot_lock_key
    entry = await client.get(key.encode())
    if entry is None or entry.lease:
        quarantine.release("etcd", key)
        return
    quarantine.reject("etcd", key, Undecodable("not_leased", "expected a lock under a lease, received none"))
    await client.transaction(
        compare=[client.transactions.mod(key.encode()) == entry.mod_revision],
        success=[client.transactions.delete(key.encode())],
        failure=[],
    )


async def _renew(client: Any, lease_id: int, ttl_seconds: int) -> None:
    while True:
        await asyncio.sleep(ttl_seconds / 3)
        # The fenced transaction detects a lost lease.
        with contextlib.suppress(*AWAY):
            await client.refresh_lease(lease_id)
