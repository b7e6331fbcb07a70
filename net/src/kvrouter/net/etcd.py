"""Leases and watches on etcd that outlive etcd's absence.

The client library's leases are not renewed and its watches end with the connection; ``LeasedKeys`` and ``watch_prefix``
hold both. Each keeps a connection of its own, so that one that is lost or moves to another endpoint disturbs no other.
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
import structlog
from aetcd import rpc
from kvrouter.net.decoding import Quarantine, Undecodable, decode_text, printable

log = structlog.get_logger(__name__)

DEFAULT_TTL_SECONDS = 10
"""Life of a lease that nobody renews: how long a dead process is taken for a live one."""

_CALL_SECONDS = 3.0
_RETRY_SECONDS = (0.25, 2.0)  # first and longest pause; they vary, so that a fleet does not come back in one moment
_LASTING_SECONDS = 10.0
"""A watch that lasted for so long was in order: what ends it is counted as the first failure."""
_PROGRESS_SECONDS = 5.0
_CHANNEL_OPTIONS = {
    # A channel of its own, and a short wait before it dials again: gRPC's default grows to two minutes.
    "grpc.use_local_subchannel_pool": 1,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
    # Sees a peer that vanished without closing; etcd refuses pings more often than every 5 s.
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
    # A listing of some 10,000 workers is a few megabytes; the default limit is 4 MiB.
    "grpc.max_receive_message_length": 64 << 20,
}


class InvalidEndpoint(ValueError):
    """An etcd endpoint is not ``host:port``."""


class EtcdAway(Exception):
    """None of the etcd endpoints answers."""


class KeyTaken(Exception):
    """Another process registered under the same key: two live processes have one identity."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key} was registered by another process; give each process an id of its own")
        self.key = key


# A call on a stream that has just ended raises InvalidStateError.
AWAY = (EtcdAway, aetcd.ClientError, grpc.aio.AioRpcError, TimeoutError, OSError, asyncio.InvalidStateError)
"""What calls raise when etcd is away; trying again later is the remedy."""


def parse_endpoints(endpoints: str) -> tuple[tuple[str, int], ...]:
    """Reads ``host:port`` or ``http://host:port``, several separated by commas.

    Raises:
        InvalidEndpoint: one has another form, or names a scheme other than http.
    """
    parsed = []
    for text in filter(None, (part.strip() for part in endpoints.split(","))):
        url = urlsplit(text if "://" in text else f"http://{text}")
        try:
            host, port = url.hostname, url.port
        except ValueError as error:
            raise InvalidEndpoint(f"etcd endpoint {text!r}: {error}") from None
        if url.scheme != "http" or not host or port is None or url.path.strip("/"):
            raise InvalidEndpoint(f"etcd endpoint {text!r}: write host:port or http://host:port")
        parsed.append((f"[{host}]" if ":" in host else host, port))
    if not parsed:
        raise InvalidEndpoint("no etcd endpoint given: write host:port")
    return tuple(parsed)


@asynccontextmanager
async def connect(endpoints: str) -> AsyncIterator[aetcd.Client]:
    """A client of the first endpoint that answers. Its calls have a deadline of a few seconds.

    Raises:
        InvalidEndpoint: the endpoints cannot be read.
        EtcdAway: none of them answers.
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
    """Waits before the next attempt, for longer with each that failed in a row."""
    first, longest = _RETRY_SECONDS
    await asyncio.sleep(min(longest, first * 2.0 ** min(failures - 1, 16)) * random.uniform(0.5, 1.5))


class LeasedKeys:
    """Keys that are in etcd for as long as this process lives.

    ``run`` writes them under one lease, renews it, and writes all of them again after the lease lapsed, etcd lost its
    data, or somebody deleted a key. The last process to register a key owns it; the one before gets ``TakenOver``.
    Where values tell which life they are of, the latest life owns the key, whoever registers last.

    Keys without a lease that have to be there too are its companions: each renewal looks whether they are.
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
        """``on_registered`` is awaited each time that all keys were written under a new lease, to write companions.

        ``companions`` tells by key whether a value will do. Where one is missing or will not do, ``on_registered`` is
        awaited again.

        ``life_of`` reads from a value the number of the life that it is of, which rises; None if values tell no life.

        Raises:
            InvalidEndpoint: the endpoints cannot be read.
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
        # A lease that seemed lost can live on for its TTL: keys under it are still ours.
        self._leases: deque[int] = deque(maxlen=64)
        self._expires = 0.0
        self._changed = asyncio.Event()
        self._registered = asyncio.Event()
        self._announce = False
        self._stopping = False
        self._failures = 0
        self.registrations = 0
        """Times that all keys were written under a new lease."""

    def put(self, key: str, value: bytes) -> None:
        """Wants ``key`` to have ``value``; ``run`` writes it. ``wait_registered`` tells when it is there."""
        self._desired[key] = value
        self._deleted.discard(key)
        self._touch()

    def delete(self, key: str) -> None:
        """Wants ``key`` gone."""
        if self._desired.pop(key, None) is not None:
            self._deleted.add(key)
            self._touch()

    def stop(self) -> None:
        """Makes ``run`` revoke the lease, which deletes the keys, and return."""
        self._stopping = True
        self._changed.set()

    @property
    def lease_id(self) -> int | None:
        """The lease that the keys are under."""
        return self._lease

    @property
    def registered(self) -> bool:
        """Whether every key is in etcd as wanted, under a lease that has not run out by this process's clock."""
        return self._registered.is_set() and time.monotonic() < self._expires

    async def wait_registered(self) -> None:
        """Waits until every key is in etcd as wanted."""
        while not self.registered:
            self._registered.clear()
            await self._registered.wait()

    def _touch(self) -> None:
        self._registered.clear()
        self._changed.set()

    async def run(self) -> None:
        """Keeps the keys in etcd until ``stop`` or cancellation, then revokes the lease.

        Raises:
            TakenOver: another process registered one of the keys.
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
            # ``_write`` clears the event that ``stop`` may have set a moment before.
            if self._stopping:
                return
            # Two renewals may fail before the lease runs out.
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
            # Many keys may take longer to write than the lease lives.
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
            # What is under no lease was put by hand: no process keeps it, and it is replaced.
            if (
                found is not None
                and found.lease
                and found.lease not in self._leases
                and self._is_later(key, found.value, value)
            ):
                raise KeyTaken(key)
            # Only the key as it was read is replaced, so that a process that registers meanwhile is seen.
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
        """Whether a value of another process has the better right to a key."""
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
    """All keys under the prefix. Keys that an earlier snapshot had and this one lacks are gone."""

    entries: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Put:
    """A key has a value."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    """A key is gone."""

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
    """All keys under a prefix, then every change of them, for ever.

    After etcd was away, a new Snapshot comes, which the consumer compares with what it knows; meanwhile nothing comes.
    Keys that are not UTF-8 go to the ``quarantine`` and do not come.
    A watch that gives no sign of life for two spans of ``progress_seconds`` is taken for lost, though connected.
    Close the iterator (``contextlib.aclosing``) or cancel its consumer to end it. ``on_contact`` is called whenever
    etcd answers, every ``progress_seconds`` where nothing changes: what was yielded so far is all that there is.

    Raises:
        InvalidEndpoint: the endpoints cannot be read.
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
        # A listing costs etcd more than a watch: one that ends at once each time is not begun anew at once.
        failures = 1 if time.monotonic() - began > _LASTING_SECONDS else failures + 1
        await _pause(failures)


class _Keys:
    """Decodes the keys below a prefix; those that are not UTF-8 go to the quarantine."""

    def __init__(self, prefix: str, quarantine: Quarantine) -> None:
        self.prefix = prefix
        self._quarantine = quarantine

    def listed(self, entries: Mapping[bytes, bytes]) -> dict[str, bytes]:
        """All entries whose keys can be decoded."""
        self._quarantine.release_missing("etcd", self.prefix, {printable(raw) for raw in entries})
        decoded = {raw: self.put(raw) for raw in entries}
        return {key: entries[raw] for raw, key in decoded.items() if key is not None}

    def put(self, raw: bytes) -> str | None:
        """The key of an entry that was written; None if it cannot be decoded."""
        try:
            return decode_text(raw)
        except Undecodable as error:
            self._quarantine.reject("etcd", printable(raw), error)
            return None

    def deleted(self, raw: bytes) -> str | None:
        """The key of an entry that was deleted; None if it cannot be decoded."""
        self._quarantine.release("etcd", printable(raw))
        try:
            return decode_text(raw)
        except Undecodable:
            return None


async def _changes(
    client: aetcd.Client, keys: _Keys, revision: int, progress_seconds: float, on_contact: Callable[[], None]
) -> AsyncGenerator[Put | Delete]:
    """Changes after a revision; ends, or raises one of AWAY, where the watch does."""
    call: Any = rpc.WatchStub(client.channel).Watch(metadata=client.metadata)
    reading: asyncio.Future[Any] | None = None
    try:
        key = keys.prefix.encode()
        end = aetcd.utils.prefix_range_end(key)
        # Not from the revision after it: etcd 3.5.35 tells no progress of a watch that begins in the future.
        create = rpc.WatchCreateRequest(key=key, range_end=end, start_revision=revision, progress_notify=True)
        await call.write(rpc.WatchRequest(create_request=create))
        asked = False
        while True:
            # Kept across time-outs: cancelling a read ends the call.
            reading = reading or asyncio.ensure_future(call.read())
            done, _ = await asyncio.wait({reading}, timeout=progress_seconds)
            if not done:
                if asked:
                    raise EtcdAway(f"the watch answered nothing for {2 * progress_seconds:g} s")
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
