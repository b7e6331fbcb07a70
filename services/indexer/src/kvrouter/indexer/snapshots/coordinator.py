"""Takes a component's snapshots, and restores from them.

1. A snapshot contains the state of every rank with its cursor, the stream's identity, and the last applied sequence S.
   Ranks are dumped one after the other, so that queries continue. A rank may be ahead of S, because applying an event
   twice does no harm.
2. A snapshot is taken when ``snapshots.rules.is_due`` says so.
3. One replica at a time takes it. The pointer is replaced in a transaction fenced by the lock.
4. The object is read back before the pointer is replaced. Then other objects are deleted, and then the stream is
   purged up to the end of the previous snapshot.
5. A restore uses the newest readable snapshot, otherwise the previous one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TypeAlias

import structlog
from kvrouter.core import InvalidDump
from kvrouter.indexer.index.state import IndexState, StaleDump
from kvrouter.indexer.ingest.jetstream import AWAY as NATS_AWAY, created_unix_ns
from kvrouter.indexer.ingest.read_position import Position, StreamIdentity, StreamView
from kvrouter.indexer.snapshots.format import Snapshot
from kvrouter.indexer.snapshots.lock import AcquiredLock, LockLost, acquired, live_replicas, read_pointer
from kvrouter.indexer.snapshots.rules import SnapshotAges, is_due, purge_up_to
from kvrouter.indexer.snapshots.store import SnapshotFiles, SnapshotStore, stream_message
from kvrouter.net.backoff import Backoff
from kvrouter.net.decoding import Quarantine
from kvrouter.net.etcd import AWAY as ETCD_AWAY, EtcdAccess, connect
from kvrouter.net.snapshot_format import InvalidSnapshot
from kvrouter.runtime.process.lifecycle import StartRefused
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor
from kvrouter.v1.snapshot_pb2 import SnapshotPointer, SnapshotRef
from nats.aio.client import Client
from nats.js.api import StreamInfo
from nats.js.errors import NotFoundError

log = structlog.get_logger(component="indexer")

AWAY = (*NATS_AWAY, *ETCD_AWAY)
_RETRY_SECONDS = (0.3, 5.0)  # first and longest pause
PositionSource: TypeAlias = Callable[[], Position | None]
"""Returns how far the stream is applied; None before it was first viewed."""


class NothingApplied(Exception):
    """Raised when no snapshot can be taken: no stream was viewed, or the newest snapshot covers more."""


class OthersLive(Exception):
    """Raised by a reset while other replicas are live, because they would keep or rewrite the deleted state."""

    def __init__(self, replicas: list[str]) -> None:
        super().__init__(f"other replicas are live: {', '.join(replicas)}")


@dataclass(frozen=True, slots=True)
class SnapshotOptions:
    """Options of taking snapshots."""

    threshold: int = 1_000_000
    """Number of messages after the newest snapshot until the next one is due."""
    check_seconds: float = 5.0
    """Interval between checks of whether one is due."""
    lock_seconds: int = 10
    """Lease of the lock, whole seconds: the time until the lock of a crashed replica expires."""
    reset: bool = False
    """Whether to delete the stream's messages and all snapshots at the start."""
    reset_even_if_others_live: bool = False
    """Whether to reset while other replicas are live."""


@dataclass(frozen=True, slots=True)
class SnapshotHome:
    """Shared by the snapshots of all components: etcd, this replica's id, and options."""

    etcd: str | EtcdAccess
    """Endpoints of etcd as host:port, separated by commas, or with user and certificates."""
    replica_id: str
    options: SnapshotOptions = SnapshotOptions()
    quarantine: Quarantine = field(default_factory=Quarantine)

    def locked(self, component: ComponentName) -> AbstractAsyncContextManager[AcquiredLock]:
        """Acquires the snapshot lock of a component for this replica; see ``acquired``."""
        return acquired(self.etcd, component, self.replica_id, self.options.lock_seconds, self.quarantine)


@dataclass(eq=False)
class Snapshots:
    """Snapshots of one component, for one replica."""

    connection: Client
    home: SnapshotHome
    name: ComponentName
    descriptor: ComponentDescriptor
    state: IndexState

    def __post_init__(self) -> None:
        self._js = self.connection.jetstream()
        self._store = SnapshotStore(self._js, self.name)
        self._files = SnapshotFiles(
            self._store, self.name, self.descriptor, self.state, replica_id=self.home.replica_id
        )
        self._log = log.bind(component_name=str(self.name))
        self.current = SnapshotRef()
        """The newest snapshot, as last read from etcd; empty for none."""
        self.unusable = 0
        """Number of unreadable snapshots since the start."""
        self.taken = 0
        self._ages = SnapshotAges()
        self._pointer_lost = False
        self._known = ""
        """Name of the newest loaded or unusable snapshot."""

    async def restore(self, *, may_reset: bool = True) -> Position | None:
        """Loads the newest usable snapshot. Returns its position; None if there is none.

        Retries while etcd or NATS is unreachable. If the options request a reset and ``may_reset`` is set, it resets
        instead.

        Raises:
            StartRefused: a reset is requested while other replicas are live.
        """
        backoff = Backoff(*_RETRY_SECONDS)
        while True:
            try:
                if self.home.options.reset and may_reset:
                    await self._reset_first()
                    return None
                pointer = await self._read_pointer()
                position = await self._restore(pointer)
                if failures := backoff.succeeded():
                    self._log.info("snapshot.store_reachable", failures=failures)
                return position
            except (LockLost, *AWAY) as error:
                if not backoff.failures:
                    self._log.warning("snapshot.store_unreachable", error=repr(error))
                await asyncio.sleep(backoff.failed())

    async def load_later(self, stream: StreamView | None = None) -> Position | None:
        """Loads the newest snapshot if it is not loaded yet. Ranks ahead of it stay as they are.

        Returns its position in ``stream``; None if there is no such snapshot or it belongs to another
        stream. If etcd or NATS is unreachable it returns None without a retry, since resyncs can replace a snapshot.
        """
        try:
            pointer = await self._read_pointer()
            if pointer.current.object_name in ("", self._known):
                return None
            position = await self._restore(pointer)
            self._known = pointer.current.object_name
        except AWAY as error:
            self._log.warning("snapshot.store_unreachable", error=repr(error))
            return None
        if position is None or stream is None or position.identity != stream.identity:
            return None
        return position if position.applied <= stream.last_sequence else None

    async def _read_pointer(self) -> SnapshotPointer:
        async with connect(self.home.etcd) as client:
            return (await read_pointer(client, self.name, self.home.quarantine)).value

    async def _reset_first(self) -> None:
        try:
            messages, snapshots = await self.reset(even_if_others_live=self.home.options.reset_even_if_others_live)
        except OthersLive as error:
            raise StartRefused(
                f"cannot reset the states of {self.name}: {error}. Stop them, or add --reset-states-even-if-others-live"
            ) from error
        self._log.warning("snapshot.states_reset", messages=messages, snapshots=snapshots)

    async def _restore(self, pointer: SnapshotPointer) -> Position | None:
        for ref in (pointer.current, pointer.previous):
            if not ref.object_name:
                continue
            began = time.monotonic()
            try:
                snapshot = await self._files.read(ref.object_name)
            except InvalidSnapshot as error:
                self.unusable += 1
                self._log.error("snapshot.unusable", name=ref.object_name, reason=str(error))
                continue
            blocks = await self._load(snapshot)
            header = snapshot.header
            self.current = ref
            self._known = ref.object_name
            self._log.info(
                "snapshot.restored",
                name=ref.object_name,
                stream_sequence=header.stream_sequence,
                ranks=header.ranks,
                blocks=blocks,
                seconds=round(time.monotonic() - began, 3),
            )
            identity = StreamIdentity(header.stream.name, header.stream.created_unix_ns)
            return Position(identity, header.stream_sequence, 0)
        return None

    async def _load(self, snapshot: Snapshot) -> int:
        blocks = 0
        for dump in snapshot.ranks:
            try:
                blocks += await self.state.repair.load_rank(dump)
            except StaleDump:
                continue  # The index has a later incarnation or later events already.
            except InvalidDump as error:
                self._log.error("rank.restore_failed", worker_id=dump.rank[0], dp_rank=dump.rank[1], reason=str(error))
        return blocks

    async def keep_taking(self, position: PositionSource) -> None:
        """Takes snapshots when they are due, until cancelled."""
        while True:
            await asyncio.sleep(self.home.options.check_seconds)
            try:
                if await self._due():
                    await self.take(position, only_if_due=True)
            except (LockLost, NothingApplied) as error:
                self._log.info("snapshot.skipped", reason=str(error))
            except (InvalidSnapshot, *AWAY) as error:
                self._log.warning("snapshot.skipped", reason=repr(error))

    async def take(self, position: PositionSource, *, only_if_due: bool = False) -> tuple[SnapshotRef, int]:
        """Takes a snapshot. Returns its reference and the number of blocks in it.

        Raises:
            LockLost: another replica is taking one or has just taken it, or this one was paused past its lease.
            NothingApplied: no stream was viewed yet, or the newest snapshot covers more than this replica has applied.
            InvalidSnapshot: the written object cannot be read back.
            One of AWAY: etcd or NATS is unreachable.
        """
        async with self.home.locked(self.name) as lock:
            before = await read_pointer(lock.client, self.name, self.home.quarantine)
            if only_if_due and not await self._due():
                raise LockLost("another replica has just taken a snapshot")
            at = position()
            if at is None:
                raise NothingApplied(
                    "expected a position in the stream, but the stream was not read yet; try again later"
                )
            if only_if_due and _covers(before.value.current, at):
                raise NothingApplied("the newest snapshot covers more than this replica has applied")
            kept = before.value
            if error := await self._store.drop_stopped():
                self._log.error("snapshot.store_stopped", error=error, consequence="recreated, snapshots are lost")
                kept = SnapshotPointer()
            # Objects of failed attempts must not accumulate.
            await self._sweep(lock, kept)
            ref, blocks = await self._files.write(at)
            pointer = SnapshotPointer(current=ref, previous=kept.current)
            await lock.move(before, pointer)
            self._pointer_lost = False
            self.current, self._known = ref, ref.object_name
            self.taken += 1
            self._ages.note_taken(ref.object_name, time.monotonic())
            self._log.info("snapshot.taken", name=ref.object_name, stream_sequence=ref.stream_sequence, blocks=blocks)
            await self._clean(lock, pointer)
            return ref, blocks

    async def _clean(self, lock: AcquiredLock, pointer: SnapshotPointer) -> None:
        """Deletes objects without a name in the pointer, then purges messages covered by both snapshots.

        A process paused here does no harm when it resumes: later snapshots cover the purged messages.
        """
        await self._sweep(lock, pointer)
        applied = await live_replicas(lock.client, self.name, self.home.quarantine)
        limit = purge_up_to(pointer.previous, pointer.current, applied.values())
        await lock.check()
        if limit:
            await self._js.purge_stream(self.name.stream, seq=limit + 1)

    async def _sweep(self, lock: AcquiredLock, pointer: SnapshotPointer) -> None:
        """Deletes every object except those in the pointer.

        The last sequence is read before the lock is checked. Whatever the next owner of the lock writes has a later
        sequence and stays, however long this process is paused.
        """
        written = await self._store.last_sequence()
        await lock.check()
        names = {ref.object_name for ref in (pointer.current, pointer.previous) if ref.object_name}
        await self._store.sweep(names, written)

    async def reset(self, *, even_if_others_live: bool) -> tuple[int, int]:
        """Deletes the stream's messages and all snapshots. Returns the number of (messages, snapshots).

        Raises:
            OthersLive: other replicas are live and ``even_if_others_live`` is not set.
            LockLost: a snapshot is being taken.
            One of AWAY: etcd or NATS is unreachable.
        """
        async with self.home.locked(self.name) as lock:
            replicas = await live_replicas(lock.client, self.name, self.home.quarantine)
            others = sorted(replicas.keys() - {self.home.replica_id})
            if others and not even_if_others_live:
                raise OthersLive(others)
            await lock.move(await read_pointer(lock.client, self.name, self.home.quarantine), None)
            snapshots = await self._store.count()
            await self._sweep(lock, SnapshotPointer())
            self.current, self._pointer_lost = SnapshotRef(), False
            messages = 0
            try:
                messages = (await self._js.stream_info(self.name.stream)).state.messages
                await self._js.purge_stream(self.name.stream)
            except NotFoundError:
                pass  # Nothing was published yet.
            return messages, snapshots

    async def _due(self) -> bool:
        try:
            info = await self._js.stream_info(self.name.stream)
        except NotFoundError:
            return False
        former = self.current
        current = (await self._read_pointer()).current
        if self.current is not former:
            return False  # A snapshot was taken meanwhile, which the pointer may not have named yet.
        self.current = current
        if self.current.object_name:
            self._pointer_lost = False
        elif former.object_name:
            self._pointer_lost = True
            self._log.warning("snapshot.pointer_lost", name=former.object_name)
        if self._pointer_lost:
            # Without it a new replica cannot restore, and must fetch the purged events from the workers.
            return True
        created = info.created.timestamp() if info.created else 0.0
        same = self.current.stream.created_unix_ns == created_unix_ns(info)
        covered = self.current.stream_sequence if same else 0
        if covered > info.state.last_seq:
            covered = 0  # The stream was rolled back: a snapshot cannot cover messages that it does not have.
        # Messages after a snapshot are no older than it, so its age is an upper bound.
        since = self.current.taken_unix_ns / 1e9 if same else created
        return is_due(
            last=info.state.last_seq,
            covered=covered,
            threshold=self.home.options.threshold,
            oldest_age_seconds=self._ages.of(self.current.object_name, since, time.time(), time.monotonic()),
            retention_seconds=float(info.config.max_age or 0),
            bytes_after=_bytes_after(info, covered),
            retention_bytes=info.config.max_bytes or 0,
        )


def _covers(ref: SnapshotRef, at: Position) -> bool:
    """Returns whether a snapshot covers everything applied at a position."""
    return ref.stream == stream_message(at.identity) and ref.stream_sequence >= at.applied


def _bytes_after(info: StreamInfo, sequence: int) -> float:
    """Returns the estimated size of the messages after a sequence, in bytes, from the mean message size."""
    messages = info.state.last_seq - max(sequence, info.state.first_seq - 1)
    return info.state.bytes * messages / max(1, info.state.messages)
