"""All that an Indexer does for one component: its index, the stream that feeds it, and the workers that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass

from kvrouter.core import PrefixIndex, Rank, RankInfo
from kvrouter.indexer.consumer import DurableConsumer
from kvrouter.indexer.ingest import Ingest
from kvrouter.indexer.light import LightEvents
from kvrouter.indexer.membership import Departures, new_lives
from kvrouter.indexer.resync import Resync
from kvrouter.indexer.state import IndexState
from kvrouter.v1.common_pb2 import Component, Cursor, Transport
from kvrouter.v1.common_pb2 import Rank as RankMessage
from kvrouter.v1.indexer_pb2 import ComponentStats, RankStats
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import AppliedRecord, ComponentDescriptor, WorkerRegistration

_TICK_SECONDS = 1.0
_SETTLE_SECONDS = 0.02
_FETCHES = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one component's index."""

    max_blocks: int = 0
    """Blocks over all ranks; 0 is no bound."""
    max_bytes: int = 0
    """Memory, bytes; 0 is no bound."""
    grace_seconds: float = 60.0
    """How long the blocks of a worker without registration are kept."""
    compare_seconds: float = 10.0
    """How long readiness waits for workers to be compared with, once the transport is read."""


class ComponentIndex:
    """The index of one component. ``run`` keeps it up to date; ``state`` answers."""

    def __init__(
        self,
        name: ComponentName,
        descriptor: ComponentDescriptor,
        consumer: DurableConsumer,
        limits: Limits,
        slots: asyncio.Semaphore | None = None,
    ) -> None:
        """``slots`` bounds the fetches from workers at one time, over all components of the replica."""
        self.name = name
        self.descriptor = descriptor
        self.block_size = descriptor.block_size
        self.state = IndexState(str(name), descriptor.block_size, PrefixIndex(limits.max_blocks, limits.max_bytes))
        self.ingest = Ingest(str(name), self.state, consumer)
        self.light = LightEvents(consumer.connection, name, self.state)
        self.resync = Resync(str(name), self.state, slots or asyncio.Semaphore(_FETCHES))
        self.ranks: list[RankInfo] = []
        """Ranks of the index, about a second old at most."""
        self.ready = False
        """Whether its state is restored, and compared with the workers that answer."""
        self._compare_seconds = limits.compare_seconds
        self._departures = Departures(limits.grace_seconds)
        self._workers: Mapping[int, WorkerRegistration] = {}
        self._changed = asyncio.Event()
        self._transport_read = asyncio.Event()
        # Where all workers are light, JetStream need not even be there.
        self._stream_wanted = asyncio.Event()
        if descriptor.default_transport != Transport.TRANSPORT_LIGHT:
            self._stream_wanted.set()

    @property
    def applied_record(self) -> AppliedRecord | None:
        """How far the stream is applied; None before the stream was seen."""
        position = self.ingest.progress.position
        if position is None:
            return None
        return AppliedRecord(
            stream=position.identity.name,
            stream_created_unix_ns=position.identity.created_unix_ns,
            stream_sequence=position.applied,
        )

    def update_workers(self, workers: Mapping[int, WorkerRegistration], unfit: frozenset[int] = frozenset()) -> None:
        """Tells which workers are registered, and which are registered but differ from the component."""
        self._workers = workers
        self.state.unfit_workers = unfit
        self.resync.update_workers(workers)
        if any(worker.publishes_events and self._is_durable(worker) for worker in workers.values()):
            self._stream_wanted.set()
        self._changed.set()

    async def stats(self) -> ComponentStats:
        """Figures of the component, as of this moment."""
        figures = await self.state.figures()
        progress = self.ingest.progress
        return ComponentStats(
            component=Component(namespace=self.name.namespace, name=self.name.name),
            ready=self.ready,
            transport=self.descriptor.default_transport or Transport.TRANSPORT_DURABLE,
            blocks=figures.blocks,
            memory_bytes=figures.memory_bytes,
            applied_stream_sequence=progress.applied,
            last_stream_sequence=progress.last_sequence,
            lag_seconds=self.state.lag_seconds,
            events=self.state.tally.event_counts(),
            ranks=[self._rank_stats(info) for info in figures.ranks],
        )

    async def run(self) -> None:
        """Keeps the index up to date until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_stream(), name=f"ingest {self.name}")
            group.create_task(self.light.run(), name=f"live events {self.name}")
            group.create_task(self.resync.run(self._transport_read), name=f"resync {self.name}")
            group.create_task(self._follow_workers(), name=f"workers of {self.name}")
            group.create_task(self._become_ready(), name=f"readiness {self.name}")

    async def _read_stream(self) -> None:
        await self._stream_wanted.wait()
        await self.ingest.run()

    async def _become_ready(self) -> None:
        await self.light.subscribed.wait()
        if self._stream_wanted.is_set():
            await self.ingest.wait_caught_up()
        self._transport_read.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._compare_seconds):
                while self.resync.waits_for_workers:  # noqa: ASYNC110 - many things change it, and none waits for this
                    await asyncio.sleep(_SETTLE_SECONDS)
        self.ready = True

    async def _follow_workers(self) -> None:
        while True:
            self._changed.clear()
            self.ranks = await self.state.ranks()
            indexed = {(info.worker_id, info.dp_rank): info.incarnation for info in self.ranks}
            registered = self._registered()
            await self.state.begin_lives(new_lives(registered, indexed))
            await self.state.forget(self._departures.expired(indexed, registered, time.monotonic()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_SECONDS):
                    await self._changed.wait()

    def _rank_stats(self, info: RankInfo) -> RankStats:
        worker = self._workers.get(info.worker_id)
        tally = self.state.rank_tally((info.worker_id, info.dp_rank))
        return RankStats(
            rank=RankMessage(worker_id=info.worker_id, dp_rank=info.dp_rank),
            cursor=Cursor(incarnation=info.incarnation, next_event_id=info.next_event_id),
            blocks=info.blocks,
            memory_bytes=info.memory_bytes,
            partial=info.partial,
            verified=tally.verified,
            drifts=tally.drifts,
            resynced_unix_ns=tally.resynced_unix_ns,
            resync_reason=tally.resync_reason,
            registered=worker is not None and any(rank.dp_rank == info.dp_rank for rank in worker.ranks),
            lag_seconds=tally.lag_seconds,
        )

    def _registered(self) -> dict[Rank, int]:
        """Incarnation by rank, of the workers that report their cache."""
        return {
            (worker_id, rank.dp_rank): rank.incarnation
            for worker_id, worker in self._workers.items()
            if worker.publishes_events
            for rank in worker.ranks
        }

    def _is_durable(self, worker: WorkerRegistration) -> bool:
        transport = worker.transport or self.descriptor.default_transport
        return transport != Transport.TRANSPORT_LIGHT
