"""Everything an Indexer runs for one component: index, ingest, resync, snapshots and stream repair.

Order at the start: restore a snapshot, read the stream to its end, compare ranks with their workers, become ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog
from kvrouter.core import MemoryBudget, PrefixIndex, Rank, RankInfo
from kvrouter.indexer.index.incarnations import Departures, ahead_of, new_incarnations
from kvrouter.indexer.index.known_ranks import SilenceWatch, age, exceeds, silence_limit
from kvrouter.indexer.index.state import IndexState, RankDump
from kvrouter.indexer.ingest.jetstream import DurableConsumer
from kvrouter.indexer.ingest.live_events import LiveEvents
from kvrouter.indexer.ingest.read_position import Position
from kvrouter.indexer.ingest.stream_reader import Ingest, Progress
from kvrouter.indexer.replica.stream_repair import StreamRepair
from kvrouter.indexer.resync.fetcher import Resync
from kvrouter.indexer.resync.resync_queue import ResyncRequests
from kvrouter.indexer.resync.worker_client import compare, unanswered
from kvrouter.indexer.snapshots.coordinator import SnapshotHome, Snapshots
from kvrouter.net.decoding import Quarantine
from kvrouter.net.local import LocalStates
from kvrouter.net.local.messages import LiveMessages
from kvrouter.net.ticks import seconds_to_rest, seconds_to_tick
from kvrouter.net.tls import Tls
from kvrouter.v1.common_pb2 import Component, Cursor, Rank as RankMessage, Transport
from kvrouter.v1.indexer_pb2 import ComponentStats, RankStats, VerifyResponse
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import AppliedRecord, ComponentDescriptor, WorkerRegistration
from kvrouter.v1.snapshot_pb2 import SnapshotRef

log = structlog.get_logger(component="indexer")

_TICK_SECONDS = 1.0
_SETTLE_SECONDS = 0.02
_FETCHES = 8
_VERIFY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one component's index."""

    max_blocks: int = 0
    """Maximum number of blocks, summed over ranks; 0 is no bound."""
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    """Memory bound, shared by the components of a process."""
    grace_seconds: float = 60.0
    """Time for which the blocks of a worker without a registration are kept."""
    compare_seconds: float = 10.0
    """Maximum wait of readiness for comparisons with workers after the transport is read."""


class RankStanding(NamedTuple):
    """What is known of a rank beside its blocks."""

    partial: bool
    """Whether blocks may be missing, in the index or already at its worker."""
    silent: bool
    """Whether it is registered and sent no event or heartbeat for several heartbeat intervals."""
    stale: bool
    """Whether its newest evidence is older than several heartbeat intervals."""
    verified: bool
    """Whether it was compared with its worker, has missed no event since, is not stale, and its worker lost none."""
    evidence_age: float | None
    """Seconds since its newest evidence; None if there is none."""


class ComponentIndex:
    """The index of one component. ``run`` keeps it up to date; ``state`` answers queries."""

    def __init__(
        self,
        name: ComponentName,
        descriptor: ComponentDescriptor,
        messages: LiveMessages,
        consumer: DurableConsumer | None,
        limits: Limits,
        slots: asyncio.Semaphore | None = None,
        home: SnapshotHome | None = None,
        quarantine: Quarantine | None = None,
        tls: Tls | None = None,
        states: LocalStates | None = None,
    ) -> None:
        """Builds the parts of a component's index.

        Args:
            name: Name of the component.
            descriptor: Shared properties of all its workers.
            messages: Where its events arrive that no stream retains.
            consumer: Consumer on its stream; None without JetStream.
            limits: Bounds of the index.
            slots: Bounds concurrent fetches from workers, over all components of the replica.
            home: Settings for snapshots; None for no snapshots.
            quarantine: Counts and logs undecodable input.
            tls: Encrypts connections to workers; None for plain text.
            states: What workers of this process resumed with.
        """
        self.name = name
        self.descriptor = descriptor
        self.block_size = descriptor.block_size
        self.requests = ResyncRequests()
        index = PrefixIndex(limits.max_blocks, limits.budget)
        self.state = IndexState(str(name), descriptor.block_size, index, self.requests, quarantine)
        self.snapshots: Snapshots | None = None
        self.stream_repair: StreamRepair | None = None
        if home and consumer:
            self.snapshots = Snapshots(consumer.connection, home, name, descriptor, self.state)
            self.stream_repair = StreamRepair(consumer.connection.jetstream(), name, home)
        later = self.snapshots.load_later if self.snapshots else None
        self.ingest = Ingest(str(name), self.state.events, consumer, later) if consumer else None
        self.live = LiveEvents(messages, name, self.state.events)
        self.resync = Resync(
            str(name), self.state, self.requests, slots or asyncio.Semaphore(_FETCHES), tls, self._take_resumed
        )
        self.ranks: list[RankInfo] = []
        """Ranks of the index, at most about one second old."""
        self.ready = False
        """Whether its state is restored and was compared with the reachable workers."""
        self._states = LocalStates() if states is None else states
        self._compare_seconds = limits.compare_seconds
        self._departures = Departures(limits.grace_seconds)
        self._silence = SilenceWatch()
        self._silence_limits: dict[Rank, float] = {}
        self._silence_logged = False
        self._log = log.bind(component_name=str(name))
        self._workers: Mapping[int, WorkerRegistration] = {}
        self._registered: dict[Rank, int] = {}
        """Incarnation by rank of the publishing workers."""
        self._lost_events: set[Rank] = set()
        """Ranks whose workers lost events of their engines."""
        self._changed = asyncio.Event()
        self._transport_read = asyncio.Event()
        # If all workers use Core NATS, JetStream is not needed.
        self._stream_requested = asyncio.Event()
        if descriptor.default_transport != Transport.TRANSPORT_CORE_NATS:
            self._request_stream()

    @property
    def applied_record(self) -> AppliedRecord | None:
        """Returns how far the stream is applied, as a message; None before the stream was first viewed."""
        position = self.position()
        if position is None:
            return None
        return AppliedRecord(
            stream=position.identity.name,
            stream_created_unix_ns=position.identity.created_unix_ns,
            stream_sequence=position.applied,
        )

    def position(self) -> Position | None:
        """Returns how far the stream is applied; None before the stream was first viewed."""
        return self.progress.position

    @property
    def progress(self) -> Progress:
        """Returns how far the stream is read; nowhere without JetStream."""
        return self.ingest.progress if self.ingest else Progress()

    async def verify(self, rank: Rank) -> VerifyResponse:
        """Compares a rank with its worker's own state.

        The worker's state is read first. The comparison then waits up to 5 s until the index reaches the worker's
        cursor, so that events in flight do not count as differences.
        """
        worker = await self.resync.worker_dump(rank)
        if worker is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_VERIFY_SECONDS):
                    while (await self.state.shared.cursor(rank) or worker.cursor) < worker.cursor:  # noqa: ASYNC110 - polled
                        await asyncio.sleep(_SETTLE_SECONDS)
        index = await self.state.repair.whole_rank(rank)
        return await asyncio.to_thread(compare, index, worker) if worker else unanswered(rank, index)

    async def reset(self, *, even_if_others_live: bool) -> tuple[int, int]:
        """Deletes stream messages and snapshots, empties the index, and requests a resync of every rank.

        Returns:
            How many messages and snapshots were deleted.

        Raises:
            OthersLive: other replicas are live.
            LockLost: a snapshot is being taken.
            One of ``kvrouter.indexer.snapshots.coordinator.AWAY``: etcd or NATS is unreachable.
        """
        dropped = await self.snapshots.reset(even_if_others_live=even_if_others_live) if self.snapshots else (0, 0)
        await self.state.repair.forget([(info.worker_id, info.dp_rank) for info in await self.state.shared.ranks()])
        for rank in self.requests.ranks():
            self.requests.add(rank, "reset")
        return dropped

    def update_workers(self, workers: Mapping[int, WorkerRegistration], unfit: frozenset[int] = frozenset()) -> None:
        """Replaces the registered workers by id, and the ids of those in conflict with the component's descriptor."""
        self._workers = workers
        self._registered = {
            (worker_id, rank.dp_rank): rank.incarnation
            for worker_id, worker in workers.items()
            if worker.publishes_events
            for rank in worker.ranks
        }
        self._lost_events = {
            (worker_id, rank.dp_rank)
            for worker_id, worker in workers.items()
            for rank in worker.ranks
            if rank.events_lost
        }
        self.state.events.register(self._registered, unfit)
        self.requests.update_workers(workers)
        self._silence_limits = {rank: _silence_limit(workers[rank[0]]) for rank in self.requests.ranks()}
        if any(worker.publishes_events and self._is_durable(worker) for worker in workers.values()):
            self._request_stream()
        self._changed.set()

    def has_compared(self, workers: Mapping[int, WorkerRegistration]) -> bool:
        """Returns whether these workers are the registered ones, and all that they published is applied."""
        is_known = self.ready and self._workers is workers
        return is_known and not self.live.queued and not self.resync.waits_for_workers

    async def stats(self) -> ComponentStats:
        """Returns the present statistics of the component."""
        size = await self.state.shared.size()
        progress = self.progress
        snapshot = self.snapshots.current if self.snapshots else SnapshotRef()
        return ComponentStats(
            component=Component(namespace=self.name.namespace, name=self.name.name),
            ready=self.ready,
            transport=self.descriptor.default_transport or Transport.TRANSPORT_DURABLE,
            blocks=size.blocks,
            memory_bytes=size.memory_bytes,
            applied_stream_sequence=progress.applied,
            last_stream_sequence=progress.last_sequence,
            lag_us=round(self.state.events.lag_seconds * 1e6),
            snapshot_sequence=snapshot.stream_sequence if snapshot.object_name else None,
            snapshot_age_ms=_age_ms(snapshot.taken_unix_ns / 1e9 if snapshot.object_name else None, time.time()),
            events=self.state.events.tally.event_counts(),
            ranks=[self._rank_stats(info) for info in size.ranks],
            stream_checked_age_ms=_age_ms(progress.checked_at, time.monotonic()),
            stream_error=self.stream_repair.error if self.stream_repair else "",
        )

    async def run(self) -> None:
        """Keeps the index up to date until cancelled."""
        async with asyncio.TaskGroup() as group:
            if self.ingest is not None:
                group.create_task(self._read_stream(self.ingest), name=f"ingest {self.name}")
            group.create_task(self.live.run(), name=f"live events {self.name}")
            group.create_task(self.resync.run(self._transport_read), name=f"resync {self.name}")
            group.create_task(self._follow_workers(), name=f"workers of {self.name}")
            group.create_task(self._take_snapshots(), name=f"snapshots of {self.name}")
            group.create_task(self._become_ready(), name=f"readiness {self.name}")
            group.create_task(self._keep_stream_working(), name=f"stream of {self.name}")

    def _take_resumed(self, rank: Rank) -> RankDump | None:
        state = self._states.take(self.name, *rank)
        return None if state is None else RankDump(rank, state.cursor, state.partial, list(state.chunks))

    def _request_stream(self) -> None:
        if self.ingest is not None:
            self._stream_requested.set()

    async def _read_stream(self, ingest: Ingest) -> None:
        # A reset at start applies to a stream in use at start, not to one that is first needed later.
        at_start = self._stream_requested.is_set()
        await self._stream_requested.wait()
        position = await self.snapshots.restore(may_reset=at_start) if self.snapshots else None
        if position is not None:
            ingest.start_from(position)
        await ingest.run()

    async def _take_snapshots(self) -> None:
        if self.snapshots is not None:
            await self._stream_requested.wait()
            await self._transport_read.wait()
            await self.snapshots.keep_taking(self.position)

    async def _keep_stream_working(self) -> None:
        if self.stream_repair is not None:
            await self._stream_requested.wait()
            await self._transport_read.wait()
            await self.stream_repair.run(self._durable_rank_is_silent)

    def _durable_rank_is_silent(self) -> bool:
        workers = (self._workers.get(worker_id) for worker_id, _ in self._silence.silent)
        return any(worker is not None and self._is_durable(worker) for worker in workers)

    async def _become_ready(self) -> None:
        await self.live.subscribed.wait()
        if self.ingest is not None and self._stream_requested.is_set():
            await self.ingest.wait_caught_up()
            if self.snapshots and any(
                info.partial or not info.next_event_id for info in await self.state.shared.ranks()
            ):
                # A newer snapshot by another replica may complete these ranks without a call to their workers.
                await self.snapshots.load_later()
        self._transport_read.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._compare_seconds):
                while self.resync.waits_for_workers:  # noqa: ASYNC110 - changed in many places
                    await asyncio.sleep(_SETTLE_SECONDS)
        self.ready = True

    async def _follow_workers(self) -> None:
        settled: object = None
        while True:
            self._changed.clear()
            began = time.thread_time()
            self.ranks = await self.state.shared.ranks()
            indexed = {(info.worker_id, info.dp_rank): info.incarnation for info in self.ranks}
            registered = self.state.events.incarnations.expected()
            ranks = self._workers, registered, indexed
            if ranks != settled:
                ahead = ahead_of(registered, indexed)
                await self.state.repair.begin_incarnations(new_incarnations(registered, indexed))
                await self._ask_about(ahead)
                await self.state.repair.forget(self._departures.expired(indexed, self._registered, time.monotonic()))
                # The same ranks call for nothing else, unless one is contradicted or its grace period ends.
                settled = None if ahead or self._departures.awaited else ranks
            self._compare_silent_ranks()
            self.resync.expire_false_alarms()
            rest = seconds_to_rest(began)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds_to_tick(_TICK_SECONDS)):
                    await self._changed.wait()
                    await asyncio.sleep(rest)

    async def _ask_about(self, ranks: list[Rank]) -> None:
        """Requests a resync of ranks whose registration contradicts the index."""
        await self.state.repair.mark_unverified(ranks)
        for rank in ranks:
            self.requests.add(rank, "incarnation")

    def _compare_silent_ranks(self) -> None:
        """Requests a comparison of silent ranks, once the retained messages of the transport are read."""
        if not self._transport_read.is_set():
            return
        for rank in self._silence.due(
            self._silence_limits, lambda rank: self.state.known.view(rank).evidence, time.monotonic()
        ):
            self.requests.add(rank, "silent")
        silent = self._silence.silent
        if silent and not self._silence_logged:
            self._log.warning(
                "rank.silent",
                ranks=len(silent),
                first_rank=min(silent),
                consequence="their state is read from their workers",
            )
        elif self._silence_logged and not silent:
            self._log.info("rank.heard")
        self._silence_logged = bool(silent)

    def standing(self, info: RankInfo, now: float) -> RankStanding:
        """Returns what is known of a rank, ``now`` by the monotonic clock."""
        rank = (info.worker_id, info.dp_rank)
        tally = self.state.known.view(rank)
        limit = self._silence_limits.get(rank) or _silence_limit(self._workers.get(rank[0]))
        evidence_at = tally.evidence.at
        stale = exceeds(evidence_at, now, limit)
        lost_events = rank in self._lost_events
        return RankStanding(
            info.partial or lost_events,
            rank in self._silence.silent,
            stale,
            tally.verified and not stale and not lost_events,
            age(evidence_at, now),
        )

    def _rank_stats(self, info: RankInfo) -> RankStats:
        worker = self._workers.get(info.worker_id)
        rank: Rank = (info.worker_id, info.dp_rank)
        tally, now = self.state.known.view(rank), time.monotonic()
        standing = self.standing(info, now)
        return RankStats(
            rank=RankMessage(worker_id=info.worker_id, dp_rank=info.dp_rank),
            cursor=Cursor(incarnation=info.incarnation, next_event_id=info.next_event_id),
            blocks=info.blocks,
            memory_bytes=info.memory_bytes,
            partial=standing.partial,
            evicted=info.evicted,
            verified=standing.verified,
            drifts=tally.drifts,
            resynced_unix_ns=tally.resynced_unix_ns or None,
            resync_reason=tally.resync_reason,
            registered=worker is not None and any(rank.dp_rank == info.dp_rank for rank in worker.ranks),
            lag_us=round(tally.lag_seconds * 1e6),
            transport=self._transport(worker) if worker else Transport.TRANSPORT_UNSPECIFIED,
            evidence_age_ms=_age_ms(tally.evidence.at, now),
            heard_age_ms=_age_ms(tally.evidence.heard_at, now),
            stale=standing.stale,
            silent=standing.silent,
            repair=self.resync.repair_of(rank),
        )

    def _is_durable(self, worker: WorkerRegistration) -> bool:
        return self._transport(worker) != Transport.TRANSPORT_CORE_NATS

    def _transport(self, worker: WorkerRegistration) -> Transport:
        return worker.transport or self.descriptor.default_transport or Transport.TRANSPORT_DURABLE


def _silence_limit(worker: WorkerRegistration | None) -> float:
    return silence_limit(worker.heartbeat_ms if worker and "heartbeat_ms" in worker else None)


def _age_ms(at: float | None, now: float) -> int | None:
    seconds = age(at, now)
    return None if seconds is None else round(seconds * 1000)
