"""Leases and watches on etcd that survive etcd's absence.

The client library does not renew leases, and its watches end with the connection. ``LeasedKeys`` renews a lease and
rewrites its keys; ``watch_prefix`` resumes a watch. Each uses a connection of its own, so that a lost connection
disturbs no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aetcd
import grpc
from aetcd import rpc
from kvrouter.net.decoding import Quarantine, Undecodable, decode_text, printable
from kvrouter.net.logs import get_logger

log = get_logger(__name__)

DEFAULT_TTL_SECONDS = 10
"""Time after which an unrenewed lease expires: how long a dead process appears to be alive."""

_CALL_SECONDS = 3.0
_RETRY_SECONDS = (0.25, 2.0)  # first and maximum pause; random, so that a fleet does not reconnect at one moment
_LASTING_SECONDS = 10.0
"""A watch that lasted this long was healthy: the failure that ends it counts as the first."""
_PROGRESS_SECONDS = 5.0
_CHANNEL_OPTIONS = {
    # Each client has its own connection, and redials soon: gRPC's default back-off grows to two minutes.
    "grpc.use_local_subchannel_pool": 1,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
    # Detects a peer that vanished without closing. etcd refuses pings more often than every 5 s.
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
    # A listing of 10,000 workers takes a few megabytes; the default limit is 4 MiB.
    "grpc.max_receive_message_length": 64 << 20,
}


class InvalidEndpoint(ValueError):
    """An etcd endpoint is not ``host:port``."""


class EtcdAway(Exception):
    """None of the etcd endpoints answers."""


class KeyTaken(Exception):
    """Another process registered the same key, so that two live processes have one identity."""

    def __init__(self, key: str) -> None:
        super().__init__(f"another process registered {key}: give each process an id of its own")
        self.key = key


# A call on a stream that has just ended raises InvalidStateError.
AWAY = (EtcdAway, aetcd.ClientError, grpc.aio.AioRpcError, TimeoutError, OSError, asyncio.InvalidStateError)
"""Exceptions that calls raise while etcd is away. Try again later."""


def parse_endpoints(endpoints: str) -> tuple[tuple[str, int], ...]:
    """Parses endpoints as ``host:port`` or ``http://host:port``, separated by commas.

    Raises:
        InvalidEndpoint: an endpoint has another form, or a scheme other than http.
    """
    parsed = []
    for text in filter(None, (part.strip() for part in endpoints.split(","))):
        url = urlsplit(text if "://" in text else f"http://{text}")
        try:
            host, port = url.hostname, url.port
        except ValueError as error:
            raise InvalidEndpoint(f"etcd endpoint {text!r}: {error}") from None
        if url.scheme != "http" or not host or port is None or url.path.strip("/"):
            raise InvalidEndpoint(f"etcd endpoint {text!r}: expected host:port or http://host:port")
        parsed.append((f"[{host}]" if ":" in host else host, port))
    if not parsed:
        raise InvalidEndpoint("expected an etcd endpoint as host:port, received none")
    return tuple(parsed)


@asynccontextmanager
async def connect(endpoints: str) -> AsyncIterator[aetcd.Client]:
    """Connects to the first endpoint that answers, while the context lasts. Calls time out after 3 s.

    Raises:
        InvalidEndpoint: an endpoint is malformed.
        EtcdAway: none of the endpoints answers.
    """
    errors = []
    for host, port in parse_endpoints(endpoints):
        async with aetcd.Client(host, port, timeout=_CALL_SECONDS, options=_CHANNEL_OPTIONS) as client:
            try:
                await client.get(b"kvrouter-probe")
            except AWAY as error:
                errors.append(f"{host}:{port}: {error}")
                continue
            yield client
            return
    raise EtcdAway("; ".join(errors))


async def _pause(failures: int) -> None:
    """Waits before the next attempt, longer after each consecutive failure."""
    first, longest = _RETRY_SECONDS
    await asyncio.sleep(min(longest, first * 2.0 ** min(failures - 1, 16)) * random.uniform(0.5, 1.5))


class LeasedKeys:
    """Keys that exist in etcd for as long as this process lives.

    ``run`` writes the keys under one lease and renews it. It writes all keys again if the lease expired, etcd lost its
    data, or somebody deleted a key. The process that registers a key last owns it; the previous owner gets
    ``KeyTaken``. If values contain an incarnation, the highest incarnation owns the key, whoever registers last.

    Companions are keys without a lease that must exist as well. Each renewal checks them.
    """

    def __init__(
        self,
        endpoints: str,
        *,
        ttl_seconds: int = DEFAULT_TTL_SECONDS,
        on_registered: Callable[[], Awaitable[None]] | None = None,
        incarnation_of: Callable[[bytes], int] | None = None,
        companions: Mapping[str, Callable[[bytes], bool]] | None = None,
    ) -> None:
        """Writes nothing yet.

        Args:
            endpoints: etcd endpoints, separated by commas.
            ttl_seconds: Time after which the keys expire without renewal, seconds.
            on_registered: Awaited each time that all keys were written under a new lease, and when a companion is
                missing or invalid. It should write the companions.
            incarnation_of: Returns the incarnation in a value; None if values have no incarnation.
            companions: For each companion key, a function that returns whether a value is valid.

        Raises:
            InvalidEndpoint: an endpoint is malformed.
        """
        parse_endpoints(endpoints)
        self._endpoints = endpoints
        self._ttl = ttl_seconds
        self._on_registered = on_registered
        self._incarnation_of = incarnation_of
        self._companions = companions or {}
        self._desired: dict[str, bytes] = {}
        self._deleted: set[str] = set()
        self._owned: set[str] = set()
        self._lease: int | None = None
        # An earlier lease that seemed lost may exist until its TTL expires; keys under it are still this process's.
        self._leases: deque[int] = deque(maxlen=64)
        self._expires = 0.0
        self._changed = asyncio.Event()
        self._registered = asyncio.Event()
        self._announce = False
        self._stopping = False
        self._failures = 0
        self.registrations = 0
        """Number of times that all keys were written under a new lease."""

    def put(self, key: str, value: bytes) -> None:
        """Sets the value that ``run`` writes for ``key``. Await ``wait_registered`` for it to be written."""
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
    def lease_id(self) -> int | None:
        """Id of the current lease; None if there is none."""
        return self._lease

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
                    async with connect(self._endpoints) as client:
                        await self._hold(client)
                except AWAY as error:
                    if not self._failures:
                        log.warning("etcd.unreachable", endpoints=self._endpoints, error=str(error))
                    self._failures += 1
                    if time.monotonic() >= self._expires:
                        self._registered.clear()
                    await _pause(self._failures)
        finally:
            self._registered.clear()
            with contextlib.suppress(*AWAY):
                await self._revoke()

    async def _hold(self, client: aetcd.Client) -> None:
        while not self._stopping:
            await self._renew(client)
            await self._write(client)
            await self._check_companions(client)
            if self._failures:
                log.info("etcd.reachable", endpoints=self._endpoints, failures=self._failures)
                self._failures = 0
            # ``_write`` clears the event, which ``stop`` may have set just before.
            if self._stopping:
                return
            # Two renewals may fail before the lease expires.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._ttl / 3):
                    await self._changed.wait()

    async def _renew(self, client: aetcd.Client) -> None:
        asked = time.monotonic()
        if self._lease is not None:
            reply = await client.refresh_lease(self._lease)
            if reply is not None and reply.TTL > 0:
                self._expires = asked + float(reply.TTL)
                return
            log.warning("etcd.lease_expired", lease=self._lease)
            self._lease = None
            self._registered.clear()
        lease = await client.lease(self._ttl)
        self._lease = int(lease.id)
        self._leases.append(self._lease)
        self._expires = asked + float(lease.ttl)
        self._announce = True

    async def _write(self, client: aetcd.Client) -> None:
        self._changed.clear()
        desired = dict(self._desired)
        lease = self._lease
        for key in sorted(self._deleted):
            await self._delete_own(client, key)
        for key, value in desired.items():
            # Writing many keys may take longer than the lease lasts.
            if time.monotonic() > self._expires - self._ttl * 2 / 3:
                await self._renew(client)
            if self._lease != lease:
                self._changed.set()
                return
            await self._put_own(client, key, value)
        if self._changed.is_set() or not desired:
            return
        self._registered.set()
        if self._announce:
            self.registrations += 1
            log.info("registration.written", keys=sorted(desired), lease=self._lease)
            if self._on_registered is not None:
                await self._on_registered()
            self._announce = False

    async def _check_companions(self, client: aetcd.Client) -> None:
        for key, will_do in self._companions.items():
            found = await client.get(key.encode())
            if found is not None and will_do(found.value):
                continue
            log.warning("etcd.key_lost", key=key, reason="missing" if found is None else "replaced")
            if self._on_registered is not None:
                await self._on_registered()
            return

    async def _put_own(self, client: aetcd.Client, key: str, value: bytes) -> None:
        name = key.encode()
        for _ in range(16):
            found = await client.get(name)
            if found is not None and found.lease == self._lease and found.value == value:
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
            written, _responses = await client.transaction(
                compare=[client.transactions.mod(name) == revision],
                success=[client.transactions.put(name, value, lease=self._lease)],
                failure=[],
            )
            if written:
                self._owned.add(key)
                return
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
        lease, self._lease = self._lease, None
        if lease is not None:
            async with asyncio.timeout(_CALL_SECONDS), connect(self._endpoints) as client:
                await client.revoke_lease(lease)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys under the prefix. Keys of an earlier snapshot that are not in this one were deleted."""

    entries: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Put:
    """A key was written."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    """A key was deleted."""

    key: str


Change = Snapshot | Put | Delete


def _ignore_contact() -> None:
    return None


async def watch_prefix(
    endpoints: str,
    prefix: str,
    *,
    progress_seconds: float = _PROGRESS_SECONDS,
    quarantine: Quarantine | None = None,
    on_contact: Callable[[], None] = _ignore_contact,
) -> AsyncGenerator[Change]:
    """Yields all keys under a prefix as a ``Snapshot``, then every change, forever.

    While etcd is away, nothing is yielded. Afterwards a new ``Snapshot`` follows, which the consumer compares with its
    state. Keys that are not UTF-8 go to the ``quarantine`` instead. A connected watch without any response for twice
    ``progress_seconds`` counts as lost. To end the iteration, close the iterator (``contextlib.aclosing``) or cancel
    its consumer.

    ``on_contact`` is called whenever etcd responds, at least every ``progress_seconds`` while nothing changes: what was
    yielded so far is then complete.

    Raises:
        InvalidEndpoint: an endpoint is malformed.
    """
    keys = _Keys(prefix, Quarantine() if quarantine is None else quarantine)
    failures = 0
    while True:
        began = time.monotonic()
        try:
            async with connect(endpoints) as client:
                listing = await client.get_prefix(prefix.encode())
                if failures:
                    log.info("etcd.watch_resumed", prefix=prefix, failures=failures)
                on_contact()
                yield Snapshot(keys.listed({pair.key: pair.value for pair in listing}))
                async with contextlib.aclosing(
                    _changes(client, keys, listing.header.revision, progress_seconds, on_contact)
                ) as changes:
                    async for change in changes:
                        yield change
        except AWAY as error:
            if not failures:
                log.warning("etcd.watch_interrupted", prefix=prefix, error=str(error))
        # A listing costs etcd more than a watch, so a watch that fails at once is repeated only after a pause.
        failures = 1 if time.monotonic() - began > _LASTING_SECONDS else failures + 1
        await _pause(failures)


class _Keys:
    """Decodes the keys below a prefix; keys that are not UTF-8 go to the quarantine."""

    def __init__(self, prefix: str, quarantine: Quarantine) -> None:
        self.prefix = prefix
        self._quarantine = quarantine

    def listed(self, entries: Mapping[bytes, bytes]) -> dict[str, bytes]:
        """Returns all entries whose keys can be decoded."""
        self._quarantine.release_missing("etcd", self.prefix, {printable(raw) for raw in entries})
        decoded = {raw: self.put(raw) for raw in entries}
        return {key: entries[raw] for raw, key in decoded.items() if key is not None}

    def put(self, raw: bytes) -> str | None:
        """Returns the key of an entry that was written; None if it cannot be decoded."""
        try:
            return decode_text(raw)
        except Undecodable as error:
            self._quarantine.reject("etcd", printable(raw), error)
            return None

    def deleted(self, raw: bytes) -> str | None:
        """Returns the key of an entry that was deleted; None if it cannot be decoded."""
        self._quarantine.release("etcd", printable(raw))
        try:
            return decode_text(raw)
        except Undecodable:
            return None


async def _changes(
    client: aetcd.Client, keys: _Keys, revision: int, progress_seconds: float, on_contact: Callable[[], None]
) -> AsyncGenerator[Put | Delete]:
    """Yields the changes after a revision. Ends, or raises one of AWAY, when the watch does."""
    call: Any = rpc.WatchStub(client.channel).Watch(metadata=client.metadata)
    reading: asyncio.Future[Any] | None = None
    try:
        key = keys.prefix.encode()
        end = aetcd.utils.prefix_range_end(key)
        # Starts at this revision, not the next: etcd 3.5.35 reports no progress of a watch that begins in the future.
        create = rpc.WatchCreateRequest(key=key, range_end=end, start_revision=revision, progress_notify=True)
        await call.write(rpc.WatchRequest(create_request=create))
        asked = False
        while True:
            # Kept across timeouts, because cancelling a read ends the call.
            reading = reading or asyncio.ensure_future(call.read())
            done, _ = await asyncio.wait({reading}, timeout=progress_seconds)
            if not done:
                if asked:
                    raise EtcdAway(f"the watch received no response for {2 * progress_seconds:g} s")
                await call.write(rpc.WatchRequest(progress_request=rpc.WatchProgressRequest()))
                asked = True
                continue
            response, reading, asked = reading.result(), None, False
            if response is grpc.aio.EOF or response.canceled:
                return
            on_contact()
            for event in response.events:
                if event.kv.mod_revision <= revision:
                    continue
                if event.type == rpc.Event.DELETE:
                    if (name := keys.deleted(event.kv.key)) is not None:
                        yield Delete(name)
                elif (name := keys.put(event.kv.key)) is not None:
                    yield Put(name, event.kv.value)
    finally:
        call.cancel()
        if reading is not None:
            await asyncio.wait({reading})
            if not reading.cancelled():
                reading.exception()
