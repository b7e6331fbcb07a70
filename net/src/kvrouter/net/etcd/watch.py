"""Watches a prefix of etcd. The client library's watches end with their connection; these resume."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aetcd
import grpc
from aetcd import rpc
from kvrouter.net.backoff import Backoff
from kvrouter.net.decoding import Quarantine, Undecodable, decode_text, printable
from kvrouter.net.etcd.access import EtcdAccess
from kvrouter.net.etcd.connection import AWAY, RETRY_SECONDS, EtcdAway, connect
from kvrouter.net.logs import get_logger

log = get_logger(__name__)

_LASTING_SECONDS = 10.0
"""A watch this long was healthy: its failure counts as the first."""
_PROGRESS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys under the prefix. Keys of earlier snapshots missing in this one were deleted."""

    entries: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Put:
    """A key was written."""

    key: str
    value: bytes
    revision: int = field(default=0, compare=False)
    """etcd revision of the write."""


@dataclass(frozen=True, slots=True)
class Delete:
    """A key was deleted."""

    key: str


Change = Snapshot | Put | Delete


def _ignore_contact() -> None:
    return None


async def watch_prefix(
    target: str | EtcdAccess,
    prefix: str,
    *,
    progress_seconds: float = _PROGRESS_SECONDS,
    quarantine: Quarantine | None = None,
    on_contact: Callable[[], None] = _ignore_contact,
) -> AsyncGenerator[Change]:
    """Yields all keys under a prefix as a ``Snapshot``, then every change, forever.

    While etcd is away, nothing is yielded. Afterwards a new ``Snapshot`` follows, which the consumer compares with its
    state. Keys outside of UTF-8 go to the ``quarantine`` instead. A connected watch without any response for twice
    ``progress_seconds`` counts as lost. To end the iteration, close the iterator (``contextlib.aclosing``) or cancel
    its consumer.

    ``on_contact`` is called whenever etcd responds, at least every ``progress_seconds`` while nothing changes: what was
    yielded so far is then complete.

    Raises:
        InvalidEndpoint: an endpoint is malformed.
    """
    keys = _Keys(prefix, Quarantine() if quarantine is None else quarantine)
    backoff = Backoff(*RETRY_SECONDS)
    while True:
        began = time.monotonic()
        try:
            async with connect(target) as client:
                listing = await client.get_prefix(prefix.encode())
                if backoff.failures:
                    log.info("etcd.watch_resumed", prefix=prefix, failures=backoff.failures)
                on_contact()
                yield Snapshot(keys.listed({pair.key: pair.value for pair in listing}))
                async with contextlib.aclosing(
                    _changes(client, keys, listing.header.revision, progress_seconds, on_contact)
                ) as changes:
                    async for change in changes:
                        yield change
        except AWAY as error:
            if not backoff.failures:
                log.warning("etcd.watch_interrupted", prefix=prefix, error=str(error))
        # A listing costs etcd more than a watch, so a watch that fails at once is repeated only after a pause.
        if time.monotonic() - began > _LASTING_SECONDS:
            backoff.succeeded()
        await asyncio.sleep(backoff.failed())


class _Keys:
    """Decodes the keys below a prefix; keys not UTF-8 go to the quarantine."""

    def __init__(self, prefix: str, quarantine: Quarantine) -> None:
        self.prefix = prefix
        self._quarantine = quarantine

    def listed(self, entries: Mapping[bytes, bytes]) -> dict[str, bytes]:
        """Returns all entries whose keys can be decoded."""
        self._quarantine.release_missing("etcd", self.prefix, {printable(raw) for raw in entries})
        decoded = {raw: self.put(raw) for raw in entries}
        return {key: entries[raw] for raw, key in decoded.items() if key is not None}

    def put(self, raw: bytes) -> str | None:
        """Returns the key of an entry written; None if it cannot be decoded."""
        try:
            return decode_text(raw)
        except Undecodable as error:
            self._quarantine.reject("etcd", printable(raw), error)
            return None

    def deleted(self, raw: bytes) -> str | None:
        """Returns the key of a deleted entry; None if it cannot be decoded."""
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
                    yield Put(name, event.kv.value, event.kv.mod_revision)
    finally:
        call.cancel()
        if reading is not None:
            await asyncio.wait({reading})
            if not reading.cancelled():
                reading.exception()
