"""Replica sync over all components: passes local changes to each component's replicas, and expires their bookings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import KW_ONLY, dataclass, field

from kvrouter.scheduler.bookings.booking import (
    Freed,
    OutputGenerated,
    OwnerAdded,
    OwnerRemoved,
    PrefillCompleted,
    SessionEnded,
)
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.load.pools import Pools
from kvrouter.scheduler.replication.metrics import SyncMetrics
from kvrouter.scheduler.replication.replicas import Replicas
from kvrouter.v1.names import ComponentName
from kvrouter.v1.sync_pb2 import ReplicaSyncEvent

Outgoing = Callable[[ComponentName, ReplicaSyncEvent], None]


def _drop(component: ComponentName, event: ReplicaSyncEvent) -> None:
    """Drops an event; the others find it missing once something is sent."""


@dataclass(eq=False)
class ReplicaSync:
    """The replicas of every component, and a listener of the booking table.

    Starts without replicas. Bookings outlive their Scheduler by ``grace_seconds``.
    """

    booking_table: BookingTable
    pools: Pools
    metrics: SyncMetrics
    _: KW_ONLY
    grace_seconds: float
    clock: Callable[[], float]
    send: Outgoing = field(default=_drop, init=False)
    """Takes this Scheduler's events, in order for each component."""
    _components: dict[ComponentName, Replicas] = field(default_factory=dict, init=False)

    def __iter__(self) -> Iterator[Replicas]:
        """Iterates over the replicas of every used component."""
        return iter(list(self._components.values()))

    def of(self, component: ComponentName) -> Replicas:
        """Returns the replicas of one component."""
        replicas = self._components.get(component)
        if replicas is None:
            replicas = self._components[component] = Replicas(
                component,
                self.booking_table,
                self.pools,
                self.metrics,
                lambda event: self.send(component, event),
                grace_seconds=self.grace_seconds,
                clock=self.clock,
            )
        return replicas

    def follow(self) -> None:
        """Subscribes to changes of the booking table, to announce them to the replicas of their component."""
        subscribe = self.booking_table.subscribe
        subscribe(OwnerAdded, self._changed)
        subscribe(OwnerRemoved, self._changed)
        subscribe(PrefillCompleted, self._changed)
        subscribe(OutputGenerated, self._changed)
        subscribe(Freed, self._freed)
        subscribe(SessionEnded, self._session_ended)

    def _changed(self, change: OwnerAdded | OwnerRemoved | PrefillCompleted | OutputGenerated) -> None:
        self.of(change.booking.component).announcer.announce(change)

    def _freed(self, change: Freed) -> None:
        # The end of a booking that is unknown here is for all components: a Scheduler of any of them may own it.
        for replicas in self if change.booking is None else (self.of(change.booking.component),):
            replicas.announcer.announce(change)

    def _session_ended(self, change: SessionEnded) -> None:
        for component in {booking.component for booking in change.bookings}:
            self.of(component).announcer.announce(change)

    def expire(self, registered: Collection[str]) -> None:
        """Drops the bookings of Schedulers gone for the grace; ``registered`` ones are not gone."""
        for replicas in self:
            replicas.expire(registered)

    def remote_bookings(self) -> int:
        """Returns the number of bookings owned by other Schedulers only."""
        own = sum(len(replicas.announcer.announced) for replicas in self)
        return max(0, len(self.booking_table) - own)

    def replicas(self) -> int:
        """Returns the number of followed Schedulers, over all components."""
        return sum(len(replicas.logs) for replicas in self)

    def incomplete(self) -> int:
        """Returns how many of them have their state being fetched."""
        return sum(bool(log.state_requested) for replicas in self for log in replicas.logs)
