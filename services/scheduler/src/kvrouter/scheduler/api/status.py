"""Reports the state of the Scheduler: load and cache hits of each rank, the queue, and the last decisions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kvrouter.core import Rank
from kvrouter.scheduler.bookings.leases import BookingLeases
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.identifiers import component_message, rank_message
from kvrouter.scheduler.load.booked_load import RankLoad
from kvrouter.scheduler.load.pools import Pool, Pools
from kvrouter.scheduler.load.thresholds import ThresholdBoard, why_busy
from kvrouter.scheduler.queue.queued_requests import QueuedRequests
from kvrouter.scheduler.replication.sync import ReplicaSync
from kvrouter.scheduler.request.options import Thresholds
from kvrouter.scheduler.routing.decisions import Decisions
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import (
    ComponentStatus,
    GetStatusRequest,
    GetStatusResponse,
    IgnoredEntry,
    RankStatus,
)

MAX_LISTED = 100
"""Maximum number of decisions, of ignored entries, and of queued requests of a component, in one response."""
_KEY_CHARACTERS = 200


class Status:
    """Reads the state of the Scheduler's parts. Changes nothing."""

    def __init__(
        self,
        pools: Pools,
        booking_table: BookingTable,
        booking_leases: BookingLeases,
        decisions: Decisions,
        board: ThresholdBoard,
        queued: QueuedRequests,
        *,
        scheduler_id: str,
        mode: str,
        clock: Callable[[], float],
        sync: ReplicaSync | None = None,
        directory_age: Callable[[], float | None] = lambda: None,
        ignored: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """``mode`` is the default policy; ``clock`` returns the seconds by which load reports are stamped.

        ``directory_age`` returns the seconds since etcd last confirmed what is registered, ``ignored``
        the reasons by key why entries in etcd are not followed.
        """
        self._pools = pools
        self._booking_table = booking_table
        self._booking_leases = booking_leases
        self._decisions = decisions
        self._board = board
        self._scheduler_id = scheduler_id
        self._mode = mode
        self._clock = clock
        self._queued = queued
        self._sync = sync
        self._directory_age = directory_age
        self._ignored = ignored
        self._started_unix_ns = time.time_ns()

    def answer(self, request: GetStatusRequest, *, ready: bool) -> GetStatusResponse:
        """Returns the state of the component in the request, or of all components.

        Raises:
            UnknownComponent: no component has that name.
        """
        pools = sorted(self._pools, key=lambda pool: str(pool.name))
        only: ComponentName | None = None
        if request.HasField("component"):
            pool = self._pools.named(request.component.namespace, request.component.name)
            pools, only = [pool], pool.name
        newest = self._decisions.newest(min(request.decisions, MAX_LISTED), only)
        return GetStatusResponse(
            scheduler_id=self._scheduler_id,
            ready=ready,
            started_unix_ns=self._started_unix_ns,
            sessions=self._booking_leases.sessions,
            bookings=len(self._booking_table),
            components=[self._component(pool, min(request.queued_requests, MAX_LISTED)) for pool in pools],
            decisions=[decided.to_short_message() for decided in newest],
            directory_age_seconds=self._directory_age(),
            ignored_entries=[
                IgnoredEntry(key=key[:_KEY_CHARACTERS], reason=reason)
                for key, reason in sorted(self._ignored().items())[:MAX_LISTED]
            ],
        )

    def _component(self, pool: Pool, listed: int) -> ComponentStatus:
        waiting = self._queued.waiting_for(pool.name)
        thresholds = self._board.of(pool.model)
        loads = pool.booked_load.load_by_rank()
        now = self._clock()
        return ComponentStatus(
            component=component_message(pool.name),
            model=pool.model,
            role=pool.role,
            block_size=pool.booked_load.block_size,
            mode=self._mode,
            thresholds=thresholds.to_message(),
            ranks=[
                _rank_status(pool, rank, loads.get(rank, RankLoad()), thresholds, now, waiting[rank])
                for rank in sorted(loads.keys() | pool.worker_set.ranks)
            ],
            queued=self._queued.status(pool.name, listed=listed),
            replicas=() if self._sync is None else self._sync.of(pool.name).status(),
        )


def _rank_status(
    pool: Pool,
    rank: Rank,
    load: RankLoad,
    thresholds: Thresholds,
    now: float,
    waiting: int,
) -> RankStatus:
    candidate, report = pool.worker_set.candidate(rank), pool.reports.of(rank, now)
    status = RankStatus(
        rank=rank_message(rank),
        active_blocks=load.active_blocks,
        prefill_tokens=load.prefill_tokens,
        active_requests=load.requests,
        reported=report,
        report_age_seconds=pool.reports.age_seconds(rank, now),
        cache_hits=pool.cache_hits.of(rank),
        queued_requests=waiting,
    )
    if candidate is not None:
        status.registered = True
        status.draining = candidate.draining
        status.endpoint = candidate.endpoint
        status.total_blocks = candidate.total_blocks
        status.relative_latency = pool.booked_load.relative_latency_of(rank)
        status.busy = why_busy(
            candidate,
            thresholds,
            active_blocks=load.active_blocks,
            prefill_tokens=load.prefill_tokens,
            report=report,
        )
    return status
