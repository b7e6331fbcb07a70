"""Reports the state of the Scheduler: load and cache hits of each rank, the queue, and the last decisions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby
from operator import itemgetter

from kvrouter.core import Rank
from kvrouter.scheduler.bookings.ownership import BookingOwnership
from kvrouter.scheduler.identifiers import component_message, rank_message
from kvrouter.scheduler.load.pools import Pool, Pools
from kvrouter.scheduler.load.thresholds import ThresholdBoard
from kvrouter.scheduler.policies.loads import RankLoad
from kvrouter.scheduler.queue.queued_requests import QueuedRequests
from kvrouter.scheduler.replication.replicas import ReplicaSync
from kvrouter.scheduler.routing.decide import Decisions
from kvrouter.v1 import scheduler_pb2 as pb
from kvrouter.v1.names import ComponentName
from kvrouter.v1.pages import page_of

MAX_LISTED = 100
"""Maximum number of decisions, of ignored entries, and of queued requests of a component, in one response."""
_KEY_CHARACTERS = 200
_MAX_SUM = (1 << 64) - 1


@dataclass(eq=False)
class Status:
    """Reads the state of the Scheduler's parts. Changes nothing.

    ``mode`` is the default policy; ``clock`` returns the seconds by which load reports are stamped.

    ``directory_age`` returns the seconds since etcd last confirmed the registrations, ``ignored``
    the reasons by key why entries in etcd are not followed.
    """

    pools: Pools
    booking_ownership: BookingOwnership
    decisions: Decisions
    thresholds: ThresholdBoard
    queued: QueuedRequests
    _: KW_ONLY
    scheduler_id: str
    mode: str
    clock: Callable[[], float]
    sync: ReplicaSync | None = None
    directory_age: Callable[[], float | None] = lambda: None
    ignored: Callable[[], Mapping[str, str]] = dict
    _started_unix_ns: int = field(default_factory=time.time_ns, init=False)

    def answer(self, request: pb.GetStatusRequest, *, ready: bool) -> pb.GetStatusResponse:
        """Returns a page of the state of the component in the request, or of all components.

        Raises:
            UnknownComponent: no component has the name.
        """
        pools = list(self.pools)
        only: ComponentName | None = None
        if "component" in request:
            pool = self.pools.named(request.component.namespace, request.component.name)
            pools, only = [pool], pool.name
        entries = ((pool, None) for pool in pools) if request.sums else _entries(pools)
        page, token = page_of(entries, request, _key)
        components = [
            self._component(pool, [rank for _, rank in group if rank is not None], request)
            for pool, group in groupby(page, itemgetter(0))
        ]
        is_first = not request.page_token
        newest = self.decisions.newest(min(request.decisions, MAX_LISTED), only) if is_first else ()
        ignored = sorted(self.ignored().items())[:MAX_LISTED] if is_first else ()
        return pb.GetStatusResponse(
            scheduler_id=self.scheduler_id,
            ready=ready,
            started_unix_ns=self._started_unix_ns,
            sessions=self.booking_ownership.sessions,
            bookings=len(self.booking_ownership.booking_table),
            components=components,
            decisions=[decided.to_short_message() for decided in newest],
            directory_age_ms=_milliseconds(self.directory_age()),
            ignored_entries=[pb.IgnoredEntry(key=key[:_KEY_CHARACTERS], reason=reason) for key, reason in ignored],
            next_page_token=token,
        )

    def _component(self, pool: Pool, page: Sequence[Rank], request: pb.GetStatusRequest) -> pb.ComponentStatus:
        loads, now = pool.booked_load.load_by_rank() if page else {}, self.clock()
        queued = self.queued.waiting_for(pool.name)
        thresholds, judged = self.thresholds.of(pool.model), pool.judged_load(now)
        ranks = []
        for rank in page:
            load = loads.get(rank, RankLoad())
            status = pb.RankStatus(
                rank=rank_message(rank),
                active_blocks=load.active_blocks,
                prefill_tokens=load.prefill_tokens,
                active_requests=load.requests,
                reported=pool.reports.of(rank, now),
                report_age_ms=_milliseconds(pool.reports.age_seconds(rank, now)),
                cache_hits=pool.cache_hits.of(rank),
                queued_requests=queued[rank],
            )
            if (place := pool.worker_set.place(rank)) is not None:
                candidate = pool.worker_set.candidates[place]
                status.registered = True
                status.draining = candidate.draining
                status.endpoint = candidate.endpoint
                if candidate.total_blocks:
                    status.total_blocks = candidate.total_blocks
                status.relative_latency = pool.booked_load.latency_calibration.speed(rank, now)[0]
                status.busy = judged.why(thresholds, place)
            ranks.append(status)
        return pb.ComponentStatus(
            component=component_message(pool.name),
            model=pool.model,
            role=pool.role,
            reuse_ratio=pool.prediction_check.reuse_ratio,
            block_size=pool.booked_load.block_size,
            mode=self.mode,
            thresholds=thresholds.to_message(),
            ranks=ranks,
            queued=self.queued.status(pool.name, listed=min(request.queued_requests, MAX_LISTED)),
            replicas=() if self.sync is None else self.sync.of(pool.name).status(),
            sums=_sums(pool) if request.sums else None,
        )


def _sums(pool: Pool) -> pb.ComponentSums:
    active_blocks, active_requests = pool.booked_load.total()
    return pb.ComponentSums(
        total_blocks=min(sum(pool.worker_set.total_blocks.tolist()), _MAX_SUM),
        active_blocks=min(active_blocks, _MAX_SUM),
        active_requests=min(active_requests, _MAX_SUM),
        cache_hits=pool.cache_hits.total(),
    )


def _entries(pools: Iterable[Pool]) -> Iterator[tuple[Pool, Rank | None]]:
    """Yields every component and each of its ranks."""
    for pool in pools:
        yield pool, None
        yield from ((pool, rank) for rank in pool.booked_load.load_by_rank().keys() | pool.worker_set.ranks)


def _key(entry: tuple[Pool, Rank | None]) -> str:
    pool, rank = entry
    # A space precedes all characters of names, so a component precedes its ranks, and they those of "NAME-2".
    return str(pool.name) if rank is None else f"{pool.name} {rank[0]:020} {rank[1]:010}"


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)
