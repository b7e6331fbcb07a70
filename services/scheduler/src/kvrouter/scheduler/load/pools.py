"""The registered components with their candidates, load and load reports."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
from kvrouter.core import CachedRank, Rank
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.runtime.requests import serves
from kvrouter.scheduler.load.booked_load import Accounting, BookedLoad
from kvrouter.scheduler.load.cache_hits import CacheHits, PredictionCheck
from kvrouter.scheduler.load.headroom import Headroom
from kvrouter.scheduler.load.reported_load import LoadReports
from kvrouter.scheduler.load.slots import capacity, request_limits
from kvrouter.scheduler.load.thresholds import Load
from kvrouter.scheduler.metrics import ScrapedGauges
from kvrouter.scheduler.policies.interface import Amounts
from kvrouter.scheduler.workers.candidates import WorkerSet, candidates_of
from kvrouter.v1.common_pb2 import Role, RoutingRequest, Stage
from kvrouter.v1.errors import UnknownComponent, UnknownModel
from kvrouter.v1.names import ComponentName, InvalidName


class Components(Protocol):
    """Registered components, as ``kvrouter.runtime.discovery.directory.Directory`` provides them."""

    @property
    def components(self) -> Mapping[ComponentName, ComponentView]:
        """The components by name; a new mapping with new views after each change."""


class Pool:
    """One component: its ranks and their load."""

    def __init__(
        self,
        view: ComponentView,
        accounting: Accounting,
        report_age_seconds: float,
        *,
        headroom: Headroom | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = view.name
        self.booked_load = BookedLoad(view.block_size, accounting, clock=clock)
        self.reports = LoadReports(report_age_seconds, self.booked_load.most_booked)
        self.cache_hits = CacheHits()
        self.prediction_check = PredictionCheck(clock)
        self.headroom = Headroom() if headroom is None else headroom
        """What each tenant uses of the component. It outlives a change of the block size."""
        self.previous: dict[str, Rank] = {}
        """Last choice of each policy, by the policy's name."""
        self.follow(view)

    def follow(self, view: ComponentView) -> None:
        """Updates the ranks from a view of the registrations."""
        self.view = view
        self.model = view.model
        """Its model."""
        self.max_model_len = view.descriptor.max_model_len
        """Limit of prompt and output together, tokens; 0 for none."""
        self.role = view.descriptor.role
        """Role of its workers."""
        self.worker_set = WorkerSet(candidates_of(view.workers.values()))
        """Every registered rank."""
        self._capacity: Amounts = self.worker_set.slots
        """Capacity of each rank in requests."""
        self._capacity_at = math.inf
        """Mean time in flight for which the capacity was computed, seconds."""
        self.candidates = self.worker_set.candidates
        """The same, in order of rank."""
        self.booked_load.set_ranks(
            [CachedRank(each.rank, each.incarnation, each.total_blocks) for each in self.candidates]
        )
        self.cache_hits.set_ranks(self.worker_set.ranks)
        self.reports.set_ranks((candidate.rank, candidate.incarnation) for candidate in self.candidates)

    def request_limits(self, now: float) -> Amounts:
        """Returns how many bookings each rank may have, in order of rank; infinite without a known limit.

        ``now``: seconds, by the clock of load reports.
        """
        slots = self.worker_set.slots
        if not self.worker_set.knows_slots:
            return slots
        return request_limits(self._slots_and_ahead(), slots, self.reports.others(now))

    def judged_load(self, now: float) -> Load:
        """Returns the load of each rank to compare with thresholds. ``now``: seconds, by the clock of load reports."""
        loads, limits = self.booked_load.loads(), self.worker_set.block_limits
        return Load.of(loads.active_blocks, loads.prefill_tokens, limits, self.reports.columns(now))

    def ahead(self) -> Amounts:
        """Returns how many requests may wait in the engine of each rank for the next slot, in order of rank."""
        slots = self.worker_set.slots
        return np.where(np.isfinite(slots), self._slots_and_ahead(), 0.0) - np.where(np.isfinite(slots), slots, 0.0)

    def _slots_and_ahead(self) -> Amounts:
        seconds = self.booked_load.seconds_in_flight
        if self._capacity_at != seconds:
            self._capacity_at, self._capacity = seconds, capacity(self.worker_set.slots, seconds)
        return self._capacity

    def open_ranks(self, now: float) -> Collection[Rank] | None:
        """Returns the accepting ranks with a free slot; None if one has no known limit, or none accepts.

        ``now``: seconds, by the clock of load reports.
        """
        ranks, accepting = self.worker_set, self.worker_set.accepting
        if not ranks.limits_requests:
            return None
        free_slots = self.request_limits(now) - self.booked_load.loads().requests
        places = np.flatnonzero(accepting & (free_slots >= 1))
        return {ranks.ranks[place] for place in places.tolist()}


class Pools:
    """Every component of the namespace, as registered at the time of the call."""

    def __init__(self, directory: Components, accounting: Accounting, *, report_age_seconds: float) -> None:
        self._directory = directory
        self._accounting = accounting
        self._report_age = report_age_seconds
        self._pools: dict[ComponentName, Pool] = {}

    def __iter__(self) -> Iterator[Pool]:
        """Iterates over the registered components."""
        return iter([self._current(view) for view in self._views()])

    def reports_of(self, name: ComponentName) -> LoadReports | None:
        """Returns the load reports of a component; None if it is not registered."""
        pool = self.get(name)
        return None if pool is None else pool.reports

    def models(self) -> Collection[str]:
        """Returns the served models."""
        return {view.model for view in self._views()}

    def get(self, name: ComponentName) -> Pool | None:
        """Returns a component by name; None if it is not registered."""
        view, pool = self._directory.components.get(name), self._pools.get(name)
        if pool is not None and view is pool.view:
            return pool
        return self._current(view) if view is not None and view.block_size else None

    def named(self, namespace: str, name: str) -> Pool:
        """Returns a component by name.

        Raises:
            UnknownComponent: no component has the name.
        """
        try:
            pool = self.get(_component_name(namespace, name))
        except InvalidName:
            pool = None
        if pool is None:
            raise UnknownComponent(f"{namespace}/{name}", [view.name for view in self._views()])
        return pool

    def find(self, request: RoutingRequest, stage: Stage) -> Pool:
        """Returns the component of a request, by its name or by its model and stage.

        Of several components, the one with the most live workers is returned.

        Raises:
            UnknownComponent: the named component is not registered.
            UnknownModel: no component serves the model in the stage.
        """
        if "component" in request:
            component = request.component
            return self.named(component.namespace, component.name)
        serving = [
            view for view in self._views() if view.model == request.model and serves(view.descriptor.role, stage)
        ]
        if not serving:
            raise UnknownModel(request.model, self.models())
        return self._current(max(serving, key=lambda view: (len(view.workers), str(view.name))))

    def prefill_pools_of(self, decode: Pool) -> tuple[Pool, ...]:
        """Returns the components whose workers can compute prompts for a decode pool."""
        return tuple(
            self._current(view)
            for view in self._views()
            if view.descriptor.role == Role.ROLE_PREFILL
            and view.model == decode.model
            and view.block_size == decode.booked_load.block_size
            and view.name.namespace == decode.name.namespace
        )

    def _views(self) -> list[ComponentView]:
        # Nothing can be booked in a component without a block size.
        return [view for view in self._directory.components.values() if view.block_size]

    def _current(self, view: ComponentView) -> Pool:
        pool = self._pools.get(view.name)
        if pool is not None and view is pool.view:
            return pool
        # Another block size makes another component; the owners of bookings in the old one free them.
        if pool is None or pool.booked_load.block_size != view.block_size:
            headroom = None if pool is None else pool.headroom
            pool = self._pools[view.name] = Pool(view, self._accounting, self._report_age, headroom=headroom)
        else:
            pool.follow(view)
        return pool


@lru_cache(maxsize=256)
def _component_name(namespace: str, name: str) -> ComponentName:
    """Returns a checked name. Requests repeat the names of few components."""
    return ComponentName(namespace, name)


def reuse_ratio_gauge(pools: Pools) -> ScrapedGauges:
    """Returns the share of predicted blocks that decisions count, by component."""
    documentation = {
        "kvrouter_scheduler_reuse_ratio": "Share of predicted blocks that decisions count; 1 unless workers reuse less."
    }
    return ScrapedGauges(
        documentation,
        ["component", "model"],
        lambda: [((str(pool.name), pool.model), (pool.prediction_check.reuse_ratio,)) for pool in pools],
    )


def rank_load_gauges(pools: Pools) -> ScrapedGauges:
    """Returns the load of every rank with a registration or bookings, and the relative latency of registered ones."""

    def samples() -> Iterator[tuple[Sequence[str], Sequence[float]]]:
        for pool in pools:
            latencies = dict(zip(pool.worker_set.ranks, pool.booked_load.relative_latency().tolist(), strict=True))
            for rank, load in pool.booked_load.load_by_rank().items():
                labels = (str(pool.name), str(rank[0]), str(rank[1]))
                numbers = load.active_blocks, load.prefill_tokens, load.requests
                yield labels, (*numbers, latencies[rank]) if rank in latencies else numbers

    documentation = {
        "kvrouter_scheduler_active_blocks": "Distinct blocks of booked requests.",
        "kvrouter_scheduler_prefill_tokens": "Prompt tokens booked and not yet computed.",
        "kvrouter_scheduler_active_requests": "Booked requests.",
        "kvrouter_scheduler_relative_latency": (
            "Measured prefill time over that of the component, as mode forecast learned it; 1 while unknown."
        ),
    }
    return ScrapedGauges(documentation, ("component", "worker_id", "dp_rank"), samples)
