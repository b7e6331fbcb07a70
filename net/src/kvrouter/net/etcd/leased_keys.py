"""Keeps keys in etcd under a lease. The client library does not renew leases."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aetcd
import grpc
from aetcd import rpc
from kvrouter.net.backoff import Backoff
from kvrouter.net.etcd.access import EtcdAccess
from kvrouter.net.etcd.connection import AWAY, CALL_SECONDS, RETRY_SECONDS, EtcdAway, connect, reason_of
from kvrouter.net.logs import get_logger

log = get_logger(__name__)

DEFAULT_TTL_SECONDS = 10
"""Time after which an unrenewed lease expires: how long a dead process appears to be alive."""
_READ_TOGETHER = 64
"""Keys per read; etcd takes at most 128 operations by default."""
_WRITTEN_TOGETHER = 32
"""Keys written at the same time. Written one by one, each costs this process and etcd three times the CPU."""


class KeyTaken(Exception):
    """Another process registered the same key, so two live processes have one identity."""

    def __init__(self, key: str) -> None:
        super().__init__(f"another process registered {key}: give each process an id of its own")
        self.key = key


class LeasedKeys:
    """Keys in etcd with the lifetime of this process.

    ``run`` writes the keys under one lease and renews it. It writes all keys again if the lease expired, etcd lost its
    data, or somebody deleted a key. The last process to register a key owns it; the previous owner gets
    ``KeyTaken``. If values contain an incarnation, the highest incarnation owns the key, whoever registers last.

    Companions are further keys, without a lease. Each renewal checks them.
    """

    def __init__(
        self,
        target: str | EtcdAccess,
        *,
        ttl_seconds: int = DEFAULT_TTL_SECONDS,
        on_registered: Callable[[], Awaitable[None]] | None = None,
        incarnation_of: Callable[[bytes], int] | None = None,
        companions: Mapping[str, Callable[[bytes], bool]] | None = None,
    ) -> None:
        """Writes nothing yet.

        Args:
            target: etcd endpoints, separated by commas, or with user and certificates.
            ttl_seconds: Time after which the keys expire without renewal, seconds.
            on_registered: Awaited each time all keys were written under a new lease, and when a companion is
                missing or invalid. It should write the companions.
            incarnation_of: Returns the incarnation in a value; None if values have no incarnation.
            companions: For each companion key, a function to check its value.

        Raises:
            InvalidEndpoint: an endpoint is malformed.
        """
        self._access = EtcdAccess.of(target)
        self._ttl = ttl_seconds
        self._on_registered = on_registered
        self._incarnation_of = incarnation_of
        self._companions = companions or {}
        self._desired: dict[str, bytes] = {}
        self._deleted: set[str] = set()
        self._owned: set[str] = set()
        self.lease_id: int | None = None
        """Id of the current lease; None if there is none."""
        # An earlier lease that seemed lost may exist until its TTL expires; keys under it are still this process's.
        self._leases: deque[int] = deque(maxlen=64)
        self._expires = 0.0
        self._renewals: Any = None
        """Stream on which etcd renews leases, kept open: a new one for each renewal would cost more than the rest."""
        self._changed = asyncio.Event()
        self._registered = asyncio.Event()
        self._announce = False
        self._stopping = False
        self._backoff = Backoff(*RETRY_SECONDS)
        self.registrations = 0
        """Number of times all keys were written under a new lease."""

    def put(self, key: str, value: bytes) -> None:
        """Sets the value of ``key``, written by ``run``. Await ``wait_registered`` for it to be written."""
        self._desired[key] = value
        self._deleted.discard(key)
        self._touch()

    def delete(self, key: str) -> None:
        """Lets ``run`` delete ``key``."""
        if self._desired.pop(key, None) is not None:
            self._deleted.add(key)
            self._touch()

    def stop(self) -> None:
        """Makes ``run`` revoke the lease, which deletes the keys, and return."""
        self._stopping = True
        self._changed.set()

    @property
    def registered(self) -> bool:
        """Whether every key was written and its lease has not expired by this process's clock."""
        return self._registered.is_set() and time.monotonic() < self._expires

    async def wait_registered(self) -> None:
        """Waits until every key is written."""
        while not self.registered:
            self._registered.clear()
            await self._registered.wait()

    def _touch(self) -> None:
        self._registered.clear()
        self._changed.set()

    async def run(self) -> None:
        """Keeps the keys in etcd until ``stop`` or cancellation, then revokes the lease.

        Raises:
            KeyTaken: another process registered one of the keys.
        """
        try:
            while not self._stopping:
                try:
                    async with connect(self._access) as client:
                        await self._keep(client)
                except AWAY as error:
                    if not self._backoff.failures:
                        log.warning("etcd.unreachable", endpoints=str(self._access), error=reason_of(error))
                    if time.monotonic() >= self._expires:
                        self._registered.clear()
                    await asyncio.sleep(self._backoff.failed())
        finally:
            self._registered.clear()
            with contextlib.suppress(*AWAY):
                await self._revoke()

    async def _keep(self, client: aetcd.Client) -> None:
        try:
            while not self._stopping:
                await self._renew(client)
                await self._write(client)
                await self._check_companions(client)
                if failures := self._backoff.succeeded():
                    log.info("etcd.reachable", endpoints=str(self._access), failures=failures)
                # ``_write`` clears the event, which ``stop`` may have set just before.
                if self._stopping:
                    return
                # Two renewals may fail before the lease expires. Processes that start together do not renew together.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._ttl / 3 * random.uniform(0.8, 1.0)):
                        await self._changed.wait()
        finally:
            # Closing the channel ends no stream that nothing waits for, and etcd waits for streams when it stops.
            renewals, self._renewals = self._renewals, None
            if renewals is not None:
                renewals.cancel()

    async def _renew(self, client: aetcd.Client) -> None:
        asked = time.monotonic()
        if self.lease_id is not None:
            ttl = await self._refresh(client, self.lease_id)
            if ttl > 0:
                self._expires = asked + ttl
                return
            log.warning("etcd.lease_expired", lease=self.lease_id)
            self.lease_id = None
            self._registered.clear()
        lease = await client.lease(self._ttl)
        self.lease_id = int(lease.id)
        self._leases.append(self.lease_id)
        self._expires = asked + float(lease.ttl)
        self._announce = True

    async def _refresh(self, client: aetcd.Client, lease: int) -> float:
        """Renews a lease. Returns its time to live, seconds; 0 if it has expired."""
        if self._renewals is None or self._renewals.done():
            self._renewals = client.leasestub.LeaseKeepAlive(metadata=client.metadata)
        async with asyncio.timeout(CALL_SECONDS):
            await self._renewals.write(rpc.LeaseKeepAliveRequest(ID=lease))
            reply = await self._renewals.read()
        if reply is grpc.aio.EOF:
            raise EtcdAway("etcd ended the renewals of leases")
        return float(reply.TTL)

    async def _write(self, client: aetcd.Client) -> None:
        self._changed.clear()
        desired = dict(self._desired)
        lease = self.lease_id
        for key in sorted(self._deleted):
            await self._delete_own(client, key)
        unchanged = await self._unchanged(client, desired)
        changed = [key for key in desired if key not in unchanged]
        for first in range(0, len(changed), _WRITTEN_TOGETHER):
            # Writing many keys may take longer than the lease lasts.
            if time.monotonic() > self._expires - self._ttl * 2 / 3:
                await self._renew(client)
            if self.lease_id != lease:
                self._changed.set()
                return
            together = changed[first : first + _WRITTEN_TOGETHER]
            writes = (self._put_own(client, key, desired[key]) for key in together)
            # All are awaited, also if one fails: a write that continues could replace a later value.
            for error in await asyncio.gather(*writes, return_exceptions=True):
                if error is not None:
                    raise error
        if self._changed.is_set() or not desired:
            return
        self._registered.set()
        if self._announce:
            self.registrations += 1
            log.info("registration.written", keys=sorted(desired), lease=self.lease_id)
            if self._on_registered is not None:
                await self._on_registered()
            self._announce = False

    async def _check_companions(self, client: aetcd.Client) -> None:
        found = await _read(client, list(self._companions))
        for key, is_valid in self._companions.items():
            if key in found and is_valid(found[key].value):
                continue
            log.warning("etcd.key_lost", key=key, reason="replaced" if key in found else "missing")
            if self._on_registered is not None:
                await self._on_registered()
            return

    async def _unchanged(self, client: aetcd.Client, desired: Mapping[str, bytes]) -> set[str]:
        """Returns the keys that etcd has as desired, under the current lease."""
        found = await _read(client, [key for key in desired if key in self._owned])
        return {key for key, pair in found.items() if pair.lease == self.lease_id and pair.value == desired[key]}

    async def _put_own(self, client: aetcd.Client, key: str, value: bytes) -> None:
        name = key.encode()
        found = await client.get(name) if key in self._owned else None
        for _ in range(16):
            if found is not None and found.lease == self.lease_id and found.value == value:
                self._owned.add(key)
                return
            # A key without a lease was written by hand: no process maintains it, so it may be replaced.
            if (
                found is not None
                and found.lease
                and found.lease not in self._leases
                and self._is_later(key, found.value, value)
            ):
                raise KeyTaken(key)
            # Compares the revision, so that a process that registers at the same moment is noticed.
            revision = 0 if found is None else found.mod_revision
            written, responses = await client.transaction(
                compare=[client.transactions.mod(name) == revision],
                success=[client.transactions.put(name, value, lease=self.lease_id)],
                failure=[client.transactions.get(name)],
            )
            if written:
                self._owned.add(key)
                return
            found = _pair(responses[0])
        raise KeyTaken(key)

    def _is_later(self, key: str, theirs: bytes, ours: bytes) -> bool:
        """Returns whether another process's value takes precedence over this one's."""
        if self._incarnation_of is not None:
            there, here = self._incarnation_of(theirs), self._incarnation_of(ours)
            if there != here:
                return there > here
        return key in self._owned

    async def _delete_own(self, client: aetcd.Client, key: str) -> None:
        name = key.encode()
        found = await client.get(name)
        if found is not None and found.lease in self._leases:
            await client.transaction(
                compare=[client.transactions.mod(name) == found.mod_revision],
                success=[client.transactions.delete(name)],
                failure=[],
            )
        self._deleted.discard(key)
        self._owned.discard(key)

    async def _revoke(self) -> None:
        lease, self.lease_id = self.lease_id, None
        if lease is not None:
            async with asyncio.timeout(CALL_SECONDS), connect(self._access) as client:
                await client.revoke_lease(lease)


async def _read(client: aetcd.Client, keys: Sequence[str]) -> dict[str, Any]:
    """Returns the pairs of those keys that etcd has."""
    found: dict[str, Any] = {}
    for first in range(0, len(keys), _READ_TOGETHER):
        part = keys[first : first + _READ_TOGETHER]
        reads = [client.transactions.get(key.encode()) for key in part]
        _, responses = await client.transaction(compare=[], success=reads, failure=[])
        found |= {key: pair for key, pair in zip(part, map(_pair, responses), strict=True) if pair is not None}
    return found


def _pair(response: Sequence[tuple[bytes, Any]]) -> Any:
    """Returns the pair in the response to a read of one key; None if there is none."""
    return response[0][1] if response else None
