"""Takes a component's snapshots, and restores from them.

1. content: the state of every rank with its cursor, the stream's identity, and the sequence S that is applied. Ranks
   are read one after the other, so that queries go on; they may be ahead of S, since events that come twice do no harm;
2. taken when ``snapshot_rules.is_due``;
3. by one replica at a time; the pointer moves in a transaction that is fenced by the lock;
4. the object is read back before the pointer moves; then other objects go; then the stream is purged, one snapshot
   behind;
5. restored is the newest snapshot that can be read, else the one before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import structlog
from kvrouter.core import InvalidDump
from kvrouter.indexer.index.rank_dump import StaleDump
from kvrouter.indexer.index.state import IndexState
from kvrouter.indexer.ingest.jetstream import AWAY as NATS_AWAY
from kvrouter.indexer.ingest.jetstream import created_unix_ns, heed_cancellation
from kvrouter.indexer.ingest.read_position import Position, StreamIdentity, StreamView
from kvrouter.indexer.snapshots.failpoints import reach
from kvrouter.indexer.snapshots.format import InvalidSnapshot, Snapshot, SnapshotWriter, check, decode
from kvrouter.indexer.snapshots.lock import AcquiredLock, LockLost, acquired, live_replicas, read_pointer
from kvrouter.indexer.snapshots.rules import SnapshotAges, is_due, purge_up_to
from kvrouter.indexer.snapshots.store import SnapshotStore
from kvrouter.net.decoding import Quarantine
from kvrouter.net.etcd import AWAY as ETCD_AWAY
from kvrouter.net.etcd import connect
from kvrouter.runtime.backoff import Backoff
from kvrouter.runtime.process.lifecycle import StartRefused
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor
from kvrouter.v1.snapshot_pb2 import SnapshotHeader, SnapshotPointer, SnapshotRef
from kvrouter.v1.snapshot_pb2 import StreamIdentity as StreamMessage
from nats.aio.client import Client
from nats.js.api import StreamInfo
from nats.js.errors import NotFoundError

log = structlog.get_logger(component="indexer")

AWAY = (*NATS_AWAY, *ETCD_AWAY)
_CHUNK_BLOCKS = 1024  # read on the loop, chunk by chunk: some 0.2 ms each
_RETRY_SECONDS = (0.3, 5.0)  # first and longest pause
PositionSource: TypeAlias = Callable[[], Position | None]
"""How far the stream is applied, at the moment of the call."""


class NothingApplied(Exception):
    """There is no position in a stream yet that a snapshot could cover."""


class OthersLive(Exception):
    """Other replicas are live, and would keep or write what is being dropped."""

    def __init__(self, replicas: list[str]) -> None:
        super().__init__(f"other replicas are live: {', '.join(replicas)}")


@dataclass(frozen=True, slots=True)
class SnapshotOptions:
    """When snapshots are taken."""

    threshold: int = 1_000_000
    """Messages after the newest snapshot that make one due."""
    check_seconds: float = 5.0
    """Time between looks at whether one is due."""
    lock_seconds: int = 10
    """Life of the lock of a replica that died while it took one, whole seconds."""
    reset: bool = False
    """Whether the stream's messages and all snapshots are dropped at the start."""
    reset_even_if_others_live: bool = False
    """Whether that is done although other replicas are live."""


@dataclass(frozen=True, slots=True)
class SnapshotHome:
    """Where snapshots are told of, by whom, and when."""

    etcd: str
    """Endpoints, host:port separated by commas."""
    replica_id: str
    options: SnapshotOptions = SnapshotOptions()
    quarantine: Quarantine = field(default_factory=Quarantine)


class Snapshots:
    """Snapshots of one component, for one replica."""

    def __init__(
        self,
        connection: Client,
        home: SnapshotHome,
        name: ComponentName,
        descriptor: ComponentDescriptor,
        state: IndexState,
    ) -> None:
        self._js = connection.jetstream()
        self._store = SnapshotStore(self._js, name)
        self._etcd = home.etcd
        self._quarantine = home.quarantine
        self._name = name
        self._state = state
        self._replica_id = home.replica_id
        self._options = home.options
        self._header = SnapshotHeader(
            component=Component(namespace=name.namespace, name=name.name),
            block_size=descriptor.block_size,
            hash_scheme=descriptor.hash_scheme,
            replica_id=home.replica_id,
        )
        self._log = log.bind(component_name=str(name))
        self.current = SnapshotRef()
        """The newest snapshot, as last heard of; empty for none."""
        self.unusable = 0
        """Snapshots that could not be read, since start."""
        self.taken = 0
        self._ages = SnapshotAges()
        self._pointer_lost = False
        self._known = ""
        """Name of the newest snapshot that the index contains, or that cannot be used."""

    async def restore(self, *, may_reset: bool = True) -> Position | None:
        """Loads the newest snapshot that can be used; returns the position it covers, None if there is none.

        Waits for as long as etcd or NATS is away. Where the options ask for a reset and it ``may_reset``, that comes
        first.

        Raises:
            OthersLive: a reset is asked for while other replicas are live.
        """
        backoff = Backoff(*_RETRY_SECONDS)
        while True:
            heed_cancellation()
            try:
                if self._options.reset and may_reset:
                    await self._reset_first()
                    return None
                async with connect(self._etcd) as client:
                    pointer = (await read_pointer(client, self._name, self._quarantine)).value
                position = await self._restore(pointer)
                if failures := backoff.succeeded():
                    self._log.info("snapshot.store_reachable", failures=failures)
                return position
            except (LockLost, *AWAY) as error:
                if not backoff.failures:
                    self._log.warning("snapshot.store_unreachable", error=repr(error))
                await asyncio.sleep(backoff.failed())

    async def load_later(self, stream: StreamView | None = None) -> Position | None:
        """Loads the newest snapshot if it is not known yet; ranks that are further ahead stay as they are.

        Returns the position that it covers in ``stream``; None where there is no such snapshot, or it is of another
        stream. Where etcd or NATS is away there is none: the workers have it all.
        """
        try:
            async with connect(self._etcd) as client:
                pointer = (await read_pointer(client, self._name, self._quarantine)).value
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

    async def _reset_first(self) -> None:
        try:
            messages, snapshots = await self.reset(even_if_others_live=self._options.reset_even_if_others_live)
        except OthersLive as error:
            raise StartRefused(
                f"--reset-states of {self._name}: {error}. Stop them first, or add --reset-states-even-if-others-live"
            ) from error
        self._log.warning("snapshot.states_reset", messages=messages, snapshots=snapshots)

    async def _restore(self, pointer: SnapshotPointer) -> Position | None:
        for ref in (pointer.current, pointer.previous):
            if not ref.object_name:
                continue
            began = time.monotonic()
            try:
                snapshot = await self._read(ref.object_name)
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

    async def _read(self, name: str) -> Snapshot:
        data = await self._store.get(name)
        return await asyncio.to_thread(decode, data, self._header)

    async def _load(self, snapshot: Snapshot) -> int:
        blocks = 0
        for dump in snapshot.ranks:
            try:
                blocks += await self._state.load_rank(dump)
            except StaleDump:
                continue  # A later life, or later events, are known already.
            except InvalidDump as error:
                self._log.error("rank.restore_failed", worker_id=dump.rank[0], dp_rank=dump.rank[1], reason=str(error))
        return blocks

    async def keep_taking(self, position: PositionSource) -> None:
        """Takes snapshots as they fall due, until cancelled."""
        while True:
            await asyncio.sleep(self._options.check_seconds)
            heed_cancellation()
            try:
                if await self._due():
                    await self.take(position, only_if_due=True)
            except (LockLost, NothingApplied) as error:
                self._log.info("snapshot.skipped", reason=str(error))
            except (InvalidSnapshot, *AWAY) as error:
                self._log.warning("snapshot.skipped", reason=repr(error))

    async def take(self, position: PositionSource, *, only_if_due: bool = False) -> tuple[SnapshotRef, int]:
        """Takes a snapshot. Returns it, and the blocks that it contains.

        Raises:
            LockLost: another replica takes one, or this one was paused for too long.
            NothingApplied: no stream was seen yet.
            InvalidSnapshot: what was written cannot be read back.
            One of AWAY: etcd or NATS is away.
        """
        async with acquired(
            self._etcd, self._name, self._replica_id, self._options.lock_seconds, self._quarantine
        ) as lock:
            before = await read_pointer(lock.client, self._name, self._quarantine)
            if only_if_due and not await self._due():
                raise LockLost("another replica took one")
            at = position()
            if at is None:
                raise NothingApplied("no stream was seen yet")
            if only_if_due and _covers(before.value.current, at):
                raise NothingApplied("the newest snapshot is further than this replica")
            kept = before.value
            if error := await self._store.drop_stopped():
                self._log.error("snapshot.store_stopped", error=error, consequence="made anew, snapshots are lost")
                kept = SnapshotPointer()
            # What an attempt that failed has left must not add up.
            await self._sweep(lock, kept)
            ref, blocks = await self._write(at)
            reach("snapshot.uploaded")
            pointer = SnapshotPointer(current=ref, previous=kept.current)
            await lock.move(before, pointer)
            self._pointer_lost = False
            self.current, self._known = ref, ref.object_name
            self.taken += 1
            self._ages.note_taken(ref.object_name, time.monotonic())
            self._log.info("snapshot.taken", name=ref.object_name, stream_sequence=ref.stream_sequence, blocks=blocks)
            reach("snapshot.pointed")
            await self._clean(lock, pointer)
            return ref, blocks

    async def _write(self, at: Position) -> tuple[SnapshotRef, int]:
        taken = time.time_ns()
        header = SnapshotHeader()
        header.CopyFrom(self._header)
        header.stream.CopyFrom(_stream(at.identity))
        header.stream_sequence = at.applied
        header.taken_unix_ns = taken
        writer = SnapshotWriter(header)
        for info in await self._state.ranks():
            async for chunk in self._state.dump_rank((info.worker_id, info.dp_rank), _CHUNK_BLOCKS):
                writer.add(chunk)
        reach("snapshot.read")
        parts = writer.parts()
        name = f"{taken:020d}-{self._replica_id}"
        await self._store.put(name, parts)
        reach("snapshot.put")
        await asyncio.to_thread(check, await self._store.get(name), self._header)
        ref = SnapshotRef(
            object_name=name,
            stream_sequence=at.applied,
            stream=header.stream,
            taken_unix_ns=taken,
            bytes=sum(map(len, parts)),
        )
        return ref, writer.blocks

    async def _clean(self, lock: AcquiredLock, pointer: SnapshotPointer) -> None:
        """Removes objects that nothing points to, then purges the stream, one snapshot behind.

        A holder that is paused here does no harm later: what the previous snapshot covers is covered by every later
        one.
        """
        await self._sweep(lock, pointer)
        reach("snapshot.cleaned")
        applied = await live_replicas(lock.client, self._name, self._quarantine)
        limit = purge_up_to(pointer.previous, pointer.current, applied.values())
        await lock.check()
        if limit:
            await self._js.purge_stream(self._name.stream, seq=limit + 1)
        reach("snapshot.purged")

    async def _sweep(self, lock: AcquiredLock, pointer: SnapshotPointer) -> None:
        """Removes every object but those of the pointer.

        The bound is read before the lock is checked: whatever a later holder writes comes after it and stays, however
        long this one is paused.
        """
        written = await self._store.last_sequence()
        await lock.check()
        names = {ref.object_name for ref in (pointer.current, pointer.previous) if ref.object_name}
        await self._store.sweep(names, written)

    async def reset(self, *, even_if_others_live: bool) -> tuple[int, int]:
        """Drops the stream's messages and all snapshots. Returns how many of each.

        Raises:
            OthersLive: other replicas are live.
            LockLost: a snapshot is being taken.
            One of AWAY: etcd or NATS is away.
        """
        async with acquired(
            self._etcd, self._name, self._replica_id, self._options.lock_seconds, self._quarantine
        ) as lock:
            replicas = await live_replicas(lock.client, self._name, self._quarantine)
            others = sorted(replicas.keys() - {self._replica_id})
            if others and not even_if_others_live:
                raise OthersLive(others)
            await lock.move(await read_pointer(lock.client, self._name, self._quarantine), None)
            snapshots = await self._store.count()
            await self._sweep(lock, SnapshotPointer())
            self.current, self._pointer_lost = SnapshotRef(), False
            messages = 0
            try:
                messages = (await self._js.stream_info(self._name.stream)).state.messages
                await self._js.purge_stream(self._name.stream)
            except NotFoundError:
                pass  # Nothing was ever published.
            return messages, snapshots

    async def _due(self) -> bool:
        try:
            info = await self._js.stream_info(self._name.stream)
        except NotFoundError:
            return False
        former = self.current
        async with connect(self._etcd) as client:
            self.current = (await read_pointer(client, self._name, self._quarantine)).value.current
        if self.current.object_name:
            self._pointer_lost = False
        elif former.object_name:
            self._pointer_lost = True
            self._log.warning("snapshot.pointer_lost", name=former.object_name)
        if self._pointer_lost:
            # Without it a new replica restores nothing, and what the stream has purged is to be had from workers only.
            return True
        created = info.created.timestamp() if info.created else 0.0
        same = self.current.stream.created_unix_ns == created_unix_ns(info)
        covered = self.current.stream_sequence if same else 0
        if covered > info.state.last_seq:
            covered = 0  # No snapshot of this stream can cover what was never in it.
        # What comes after a snapshot is no older than the snapshot: sooner is safe.
        since = self.current.taken_unix_ns / 1e9 if same else created
        return is_due(
            last=info.state.last_seq,
            covered=covered,
            threshold=self._options.threshold,
            oldest_age_seconds=self._ages.of(self.current.object_name, since, time.time(), time.monotonic()),
            retention_seconds=float(info.config.max_age or 0),
            bytes_after=_bytes_after(info, covered),
            retention_bytes=info.config.max_bytes or 0,
        )


def _covers(ref: SnapshotRef, at: Position) -> bool:
    """Whether a snapshot has all that is applied at a position."""
    return ref.stream == _stream(at.identity) and ref.stream_sequence >= at.applied


def _bytes_after(info: StreamInfo, sequence: int) -> float:
    """Size of the messages after a sequence, were all of one size."""
    messages = info.state.last_seq - max(sequence, info.state.first_seq - 1)
    return info.state.bytes * messages / max(1, info.state.messages)


def _stream(identity: StreamIdentity) -> StreamMessage:
    return StreamMessage(name=identity.name, created_unix_ns=identity.created_unix_ns)
