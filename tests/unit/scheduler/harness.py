"""A Scheduler's parts over plain values: registrations as a mapping, a clock moved by hand, Indexers as objects."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Self

import numpy as np
from kvrouter.core import Rank, local_hashes, sequence_hashes
from kvrouter.runtime.booking_updates import Free, OutputReport, PrefillComplete
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.scheduler.api.drains import Drains
from kvrouter.scheduler.api.request_reader import RequestReader
from kvrouter.scheduler.api.selection import Selector
from kvrouter.scheduler.api.service import SchedulerService
from kvrouter.scheduler.api.sessions import Sessions
from kvrouter.scheduler.api.status import Status
from kvrouter.scheduler.bookings.booking import SchedulerIncarnation
from kvrouter.scheduler.bookings.conversations import Conversations
from kvrouter.scheduler.bookings.ownership import BookingOwnership
from kvrouter.scheduler.bookings.statistics import BookingStatistics
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.bookings.updates import BookingUpdates
from kvrouter.scheduler.load.booked_load import Accounting
from kvrouter.scheduler.load.pools import Pools
from kvrouter.scheduler.load.thresholds import ThresholdBoard
from kvrouter.scheduler.metrics import SchedulerMetrics, SyncMetrics
from kvrouter.scheduler.overlap.indexer_query import Overlaps
from kvrouter.scheduler.overlap.predictions import PredictionLimits, Predictions
from kvrouter.scheduler.queue.queued_requests import QueuedRequests
from kvrouter.scheduler.replication.replicas import ReplicaSync
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.scheduler.routing.decide import Decisions
from kvrouter.scheduler.routing.router import Router
from kvrouter.scheduler.workers.candidates import ListedRanks
from kvrouter.v1.common_pb2 import (
    BookingKey,
    Component,
    LocalHashes,
    Role,
    RoutingConstraints,
    RoutingOverrides,
    RoutingRequest,
    Stage,
    TokenIds,
)
from kvrouter.v1.errors import DeadlineExceeded
from kvrouter.v1.indexer_pb2 import FindMatchesResponse
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, RankRegistration, WorkerRegistration
from kvrouter.v1.scheduler_pb2 import (
    FreeRequest,
    MarkPrefillCompleteRequest,
    ReportOutputRequest,
    SelectWorkerRequest,
    SelectWorkerResponse,
)
from prometheus_client import CollectorRegistry

BLOCK = 16
MODEL = "m"
POOL = ComponentName("ns", "pool")


def worker(
    worker_id: int, *, ranks: int = 1, incarnation: int = 1, total_blocks: int | None = 100, **fields: Any
) -> WorkerRegistration:
    return WorkerRegistration(
        worker_id=worker_id,
        component=Component(namespace=POOL.namespace, name=POOL.name),
        model=MODEL,
        endpoint=f"host:{worker_id}",
        block_size=BLOCK,
        ranks=[
            RankRegistration(dp_rank=rank, incarnation=incarnation, total_blocks=total_blocks) for rank in range(ranks)
        ],
        **fields,
    )


def view(*workers: WorkerRegistration, name: ComponentName = POOL, **descriptor: Any) -> ComponentView:
    known: dict[str, Any] = {"model": MODEL, "block_size": BLOCK, "role": Role.ROLE_BOTH}
    component = Component(namespace=name.namespace, name=name.name)
    described = ComponentDescriptor(component=component, **(known | descriptor))
    return ComponentView(name, described, {each.worker_id: each for each in workers})


def prompt(blocks: int, *, seed: int = 0, tail: int = 0) -> Prompt:
    local = local_hashes(tokens(blocks, seed=seed, tail=tail), BLOCK)
    return Prompt(blocks * BLOCK + tail, local, sequence_hashes(local))


def overlaps_of(held: Mapping[Rank, tuple[int, int]]) -> Overlaps:
    """The overlaps of ranks, from (blocks, incarnation) by rank."""
    incarnations = np.array([incarnation for _, incarnation in held.values()], np.uint64)
    return Overlaps(ListedRanks(tuple(held), incarnations), np.array([blocks for blocks, _ in held.values()], np.int64))


def tokens(blocks: int, *, seed: int = 0, tail: int = 0) -> list[int]:
    return [seed * 100_000 + number for number in range(blocks * BLOCK + tail)]


def routing(blocks: int = 4, *, seed: int = 0, tail: int = 0, **fields: Any) -> RoutingRequest:
    """A request by token ids."""
    known: dict[str, Any] = {"model": MODEL, "token_ids": TokenIds(ids=tokens(blocks, seed=seed, tail=tail))}
    return RoutingRequest(**(known | fields))


def hashed(blocks: int = 4, *, seed: int = 0, tail: int = 0, **fields: Any) -> RoutingRequest:
    """The same request by local hashes."""
    packed = prompt(blocks, seed=seed, tail=tail).local_hashes
    known: dict[str, Any] = {
        "model": MODEL,
        "local_hashes": LocalHashes(hashes=struct.unpack(f"<{len(packed) // 8}Q", packed)),
        "prompt_tokens": blocks * BLOCK + tail,
        "block_size": BLOCK,
    }
    return RoutingRequest(**(known | fields))


def selecting(
    request_id: str | None = None,
    request: RoutingRequest | None = None,
    *,
    attempt: int = 0,
    stage: Stage = Stage.STAGE_WHOLE,
    **fields: Any,
) -> SelectWorkerRequest:
    booking = None if request_id is None else BookingKey(request_id=request_id, attempt=attempt, stage=stage)
    return SelectWorkerRequest(request=request or routing(), booking=booking, **fields)


def key(request_id: str, attempt: int = 0) -> BookingKey:
    return BookingKey(request_id=request_id, attempt=attempt)


def overrides(**fields: Any) -> RoutingOverrides:
    return RoutingOverrides(**fields)


def constraints(**fields: Any) -> RoutingConstraints:
    return RoutingConstraints(**fields)


@dataclass
class Registered:
    """What is registered."""

    components: Mapping[ComponentName, ComponentView] = field(default_factory=dict)

    def register(self, *views: ComponentView) -> None:
        self.components = {each.name: each for each in views}


@dataclass
class ResidentBlocks:
    """An Indexer that answers with what it is given, once it may."""

    queued: dict[Rank, int] = field(default_factory=dict)
    incarnation: int = 1
    failure: Exception | None = None
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    queries: list[bytes] = field(default_factory=list)
    """Local hashes of each query."""
    lower: dict[Rank, tuple[int, int, int]] = field(default_factory=dict)
    """Leading blocks down to host memory, disk and shared storage, where there are more than ``queued``."""
    pooled: int = 0

    def __post_init__(self) -> None:
        self.may_answer.set()

    @classmethod
    def held(cls) -> Self:
        """Returns one that does not answer until ``may_answer`` is set."""
        indexer = cls()
        indexer.may_answer.clear()
        return indexer

    async def queried(self) -> None:
        """Returns when there has been a query."""
        async with asyncio.timeout(30):
            while not self.queries:
                await asyncio.sleep(0)

    async def find_matches_of_hashes(
        self, component: ComponentName, local_hashes: bytes, *, block_size: int, deadline: Deadline
    ) -> bytes:
        self.queries.append(local_hashes)
        try:
            async with asyncio.timeout(deadline.remaining()):
                await self.may_answer.wait()
        except TimeoutError:
            raise DeadlineExceeded from None
        if self.failure is not None:
            raise self.failure
        answer = FindMatchesResponse(prompt_blocks=len(local_hashes) // 8, pooled_blocks=self.pooled)
        for (worker_id, dp_rank), blocks in self.queued.items():
            answer.worker_ids.append(worker_id)
            answer.dp_ranks.append(dp_rank)
            answer.device_blocks.append(blocks)
            host, disk, shared = self.lower.get((worker_id, dp_rank), (blocks, blocks, blocks))
            answer.host_blocks.append(host)
            answer.disk_blocks.append(disk)
            answer.shared_blocks.append(shared)
            answer.incarnations.append(self.incarnation)
            answer.next_event_ids.append(7)
        return answer.SerializeToString()


@dataclass
class ByMessage:
    """Updates of bookings by message."""

    updates: BookingUpdates

    def mark_prefill_complete(self, request: MarkPrefillCompleteRequest) -> bool:
        return self.updates.mark_prefill_complete(PrefillComplete.of(request))

    def report_output(self, request: ReportOutputRequest) -> bool:
        return self.updates.report_output(OutputReport.of(request))

    def free(self, request: FreeRequest) -> bool:
        return self.updates.free(Free.of(request))


class Parts:
    """A Scheduler's parts, put together."""

    def __init__(
        self,
        *views: ComponentView,
        options: RoutingOptions | None = None,
        accounting: Accounting | None = None,
        indexer: ResidentBlocks | None = None,
        grace: float = 10.0,
        indexer_timeout: float = 30.0,
        decisions: int = 100,
        predicts: PredictionLimits | None = None,
        predicts_everywhere: bool = True,
        conversations: int = 100,
        max_queued_requests: int = 100,
        scheduler: SchedulerIncarnation | None = None,
        log_formulas: bool = False,
    ) -> None:
        """``scheduler`` lets it announce its bookings as that Scheduler: see ``sync``."""
        self.now = 1000.0
        self.registered = Registered()
        self.registered.register(*views)
        self.registry = CollectorRegistry()
        self.indexer = indexer
        clock: Callable[[], float] = lambda: self.now  # noqa: E731
        self.metrics = SchedulerMetrics(self.registry)
        self.pools = Pools(self.registered, accounting or Accounting(), report_age_seconds=10)
        self.booking_table = BookingTable(scheduler or (0, ""))
        BookingStatistics(self.metrics).follow(self.booking_table)
        self.booking_ownership = BookingOwnership(self.booking_table, session_grace_seconds=grace)
        self.sync_metrics = SyncMetrics(self.registry)
        self.sync = ReplicaSync(self.booking_table, self.pools, self.sync_metrics, grace_seconds=grace, clock=clock)
        if scheduler is not None:
            self.sync.follow()
        self.decisions = Decisions(decisions, log_formulas=log_formulas)
        self.options = options or RoutingOptions("kv")
        self.board = ThresholdBoard(self.options.thresholds)
        predictions = None if predicts is None else Predictions(predicts, clock, predicts_everywhere)
        self.conversations = Conversations(conversations, self.metrics, clock)
        self.router = Router(
            self.pools,
            self.booking_ownership,
            self.decisions,
            lambda _: self.indexer,
            self.metrics,
            indexer_timeout_seconds=indexer_timeout,
            rng=Random(1),
            clock=clock,
            predictions=predictions,
            conversations=self.conversations,
        )
        self.queued = QueuedRequests(self.router, self.metrics, max_queued_requests=max_queued_requests, clock=clock)
        reader = RequestReader(self.pools, self.board, self.options)
        self.selector = Selector(reader, self.router, self.queued, self.metrics)
        self.conversations.follow(self.booking_table)
        if predictions is not None:
            predictions.follow(self.booking_table)
        self.queued.follow(self.booking_table)
        self.updates = BookingUpdates(self.booking_table, self.booking_ownership, self.pools, self.metrics, clock)
        self.bookings = ByMessage(self.updates)
        self.sessions = Sessions(
            self.booking_ownership, self.updates, scheduler_id="s", grace_seconds=grace, clock=clock
        )

    def service(self) -> SchedulerService:
        """The object behind the Scheduler's API."""
        status = Status(
            self.pools,
            self.booking_ownership,
            self.decisions,
            self.board,
            self.queued,
            scheduler_id="s",
            mode=self.options.mode,
            clock=lambda: self.now,
        )
        return SchedulerService(
            self.pools,
            self.selector,
            self.updates,
            self.sessions,
            self.decisions,
            self.board,
            status,
            Drains(self.registered, None),
            is_ready=lambda: True,
        )

    async def select(
        self, request: SelectWorkerRequest, session_id: str = "", opening_number: int = 0
    ) -> SelectWorkerResponse:
        request.session_id, request.opening_number = session_id, opening_number
        return await self.selector.select(request, deadline=Deadline.after(30))

    def load(self, worker_id: int, dp_rank: int = 0) -> tuple[int, int, int]:
        """(active blocks, prefill tokens, requests)"""
        pool = self.pools.get(POOL)
        assert pool is not None
        return pool.booked_load.load_by_rank()[worker_id, dp_rank][:3]

    def idle(self) -> bool:
        """Whether nothing is booked anywhere."""
        loads = [load for pool in self.pools for load in pool.booked_load.load_by_rank().values()]
        return len(self.booking_table) == 0 and all(load[:3] == (0, 0, 0) for load in loads)

    def figure(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0
