"""The state of a system at one moment: the responses of its services."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from kvrouter.v1.common_pb2 import Component, Rank as RankMessage
from kvrouter.v1.frontend_pb2 import GetWorkerHealthResponse, WorkerHealth, WorkerHealthState
from kvrouter.v1.indexer_pb2 import GetStatsResponse, RankStats
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import ComponentStatus, Decision, GetStatusResponse

Rank = tuple[int, int]
"""(worker_id, dp_rank)."""


def rank_of(message: RankMessage) -> Rank:
    """Returns a rank as a hashable value."""
    return (message.worker_id, message.dp_rank)


def name_of(message: Component) -> ComponentName:
    """Returns a component as a hashable value."""
    return ComponentName(message.namespace, message.name)


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """A Scheduler."""

    address: str
    """host:port."""
    status: GetStatusResponse | None = None
    """Its response; None if it did not answer."""
    failure: str = ""
    """Why it did not answer."""


@dataclass(frozen=True, slots=True)
class IndexerView:
    """An Indexer."""

    address: str
    stats: GetStatsResponse | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class FrontendView:
    """A Frontend."""

    address: str
    health: GetWorkerHealthResponse | None = None
    """Its response; None if it did not answer."""
    failure: str = ""
    """Why it did not answer."""
    asks_for_key: bool = False
    """Whether it answered that this needs a credential with the role admin."""

    def in_state(self, *states: WorkerHealthState) -> int:
        """Returns how many workers are in one of the states."""
        return 0 if self.health is None else sum(each.state in states for each in self.health.workers)


@dataclass(frozen=True, slots=True)
class System:
    """A system at one moment."""

    at: datetime
    schedulers: Sequence[SchedulerView] = ()
    indexers: Sequence[IndexerView] = ()
    frontends: Sequence[FrontendView] = ()
    note: str = ""
    """Why services could not be discovered; empty if they were."""

    @property
    def statuses(self) -> list[GetStatusResponse]:
        """Responses of the Schedulers that answered."""
        return [view.status for view in self.schedulers if view.status is not None]

    def components(self) -> dict[ComponentName, tuple[GetStatusResponse, ComponentStatus]]:
        """Returns all components in order of name, each with the Scheduler whose view of it is shown.

        That is the one with the latest decision for the component, otherwise the first that knows it: all clients of a
        component use one Scheduler; the others replicate its bookings or have none.
        """
        found: dict[ComponentName, list[tuple[GetStatusResponse, ComponentStatus]]] = {}
        for status in self.statuses:
            for each in status.components:
                found.setdefault(name_of(each.component), []).append((status, each))
        return {name: max(found[name], key=_last_decided) for name in sorted(found, key=str)}

    def decisions(self) -> list[Decision]:
        """Returns the latest decisions of all Schedulers, latest first."""
        every = [each for status in self.statuses for each in status.decisions]
        return sorted(every, key=lambda each: each.decided_unix_ns, reverse=True)

    def worker_health(self, component: ComponentName) -> dict[int, list[WorkerHealth]]:
        """Returns the health of a component's workers from each Frontend that answered, by worker id."""
        found: dict[int, list[WorkerHealth]] = {}
        for view in self.frontends:
            for each in () if view.health is None else view.health.workers:
                if name_of(each.component) == component:
                    found.setdefault(each.worker_id, []).append(each)
        return found

    def indexed(self, component: ComponentName) -> dict[Rank, RankStats]:
        """Returns the statistics of a component's ranks: counts of the first ready Indexer, the worst ages of all."""
        found: dict[Rank, RankStats] = {}
        for stats in self._indexed(component):
            for rank in stats:
                known = found.get(rank_of(rank.rank))
                if known is None:
                    found[rank_of(rank.rank)] = kept = RankStats()
                    kept.CopyFrom(rank)
                else:
                    _take_worst(known, rank)
        return found

    def has_index(self, component: ComponentName) -> bool:
        """Returns whether an Indexer has read what it can of a component."""
        return any(
            each.ready and name_of(each.component) == component
            for view in self.indexers
            if view.stats is not None
            for each in view.stats.components
        )

    def _indexed(self, component: ComponentName) -> list[Iterable[RankStats]]:
        components = [
            each
            for view in self.indexers
            if view.stats is not None
            for each in view.stats.components
            if name_of(each.component) == component
        ]
        return [each.ranks for each in sorted(components, key=lambda each: not each.ready)]


def _take_worst(known: RankStats, other: RankStats) -> None:
    """Merges into ``known`` the longer lag and ages, and the problems of either Indexer."""
    known.lag_us = max(known.lag_us, other.lag_us)
    known.stale |= other.stale
    known.silent |= other.silent
    for field in ("evidence_age_ms", "heard_age_ms"):
        if field in other:
            setattr(known, field, max(getattr(known, field), getattr(other, field)))


def _last_decided(view: tuple[GetStatusResponse, ComponentStatus]) -> int:
    status, known = view
    return max((each.decided_unix_ns for each in status.decisions if each.component == known.component), default=0)
