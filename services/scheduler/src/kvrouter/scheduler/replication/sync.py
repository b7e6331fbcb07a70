"""Replica sync over all components: passes local changes to each component's replicas, and expires what they own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from kvrouter.scheduler.bookings.table import Booking, BookingTable
from kvrouter.scheduler.identifiers import Key
from kvrouter.scheduler.load.pools import Pools
from kvrouter.scheduler.overlap.predictions import Predictions
from kvrouter.scheduler.replication.metrics import SyncMetrics
from kvrouter.scheduler.replication.replicas import Replicas
from kvrouter.scheduler.routing.affinity import Affinity
from kvrouter.v1.names import ComponentName
from kvrouter.v1.sync_pb2 import ReplicaSyncEvent

Outgoing = Callable[[ComponentName, ReplicaSyncEvent], None]


class ReplicaSync:
    """The replicas of every component.

    It implements the observer of the booking leases (``kvrouter.scheduler.bookings.leases.Witness``).
    """

    def __init__(
        self,
        booking_table: BookingTable,
        pools: Pools,
        metrics: SyncMetrics,
        *,
        grace_seconds: float,
        clock: Callable[[], float],
        predictions: Predictions | None = None,
        affinity: Affinity | None = None,
    ) -> None:
        """Starts without replicas. Bookings outlive their Scheduler by ``grace_seconds``."""
        self.booking_table = booking_table
        self.metrics = metrics
        self._clock = clock
        self.send: Outgoing = _drop
        """Takes this Scheduler's events, in order for each component."""
        self._pools = pools
        self._grace = grace_seconds
        self._predictions = predictions
        self._affinity = affinity
        self._components: dict[ComponentName, Replicas] = {}

    def __iter__(self) -> Iterator[Replicas]:
        """Iterates over the replicas of every component that was used."""
        return iter(list(self._components.values()))

    def of(self, component: ComponentName) -> Replicas:
        """Returns the replicas of one component."""
        replicas = self._components.get(component)
        if replicas is None:
            replicas = self._components[component] = Replicas(
                component,
                self.booking_table,
                self._pools,
                self.metrics,
                lambda event: self.send(component, event),
                grace_seconds=self._grace,
                clock=self._clock,
                predictions=self._predictions,
                affinity=self._affinity,
            )
        return replicas

    def owned(self, booking: Booking) -> None:
        """Announces a booking that is owned here, or has another owner here."""
        self.of(booking.component).owned(booking)

    def prefilled(self, booking: Booking) -> None:
        """Announces that a booking's prompt is computed."""
        self.of(booking.component).prefilled(booking)

    def generated(self, booking: Booking) -> None:
        """Announces the output of a booking."""
        self.of(booking.component).generated(booking)

    def freed(self, key: Key, component: ComponentName | None) -> None:
        """Announces the end of a booking; one that is unknown here in every component, since others may own it."""
        for replicas in self if component is None else [self.of(component)]:
            replicas.freed(key)

    def session_ended(self, session_id: str, components: Collection[ComponentName]) -> None:
        """Announces that a session's grace is over."""
        for component in components:
            self.of(component).session_ended(session_id)

    def expire(self, registered: Collection[str]) -> None:
        """Drops the bookings of Schedulers that have been gone for the grace; ``registered`` ones are not gone."""
        for replicas in self:
            replicas.expire(registered)

    def remote_bookings(self) -> int:
        """Returns the number of bookings that only other Schedulers own."""
        own = sum(len(replicas.own) for replicas in self)
        return max(0, len(self.booking_table) - own)

    def replicas(self) -> int:
        """Returns the number of other Schedulers that are followed, over all components."""
        return sum(len(replicas.logs) for replicas in self)

    def incomplete(self) -> int:
        """Returns how many of them have their state being fetched."""
        return sum(bool(log.state_requested) for replicas in self for log in replicas.logs)


def _drop(component: ComponentName, event: ReplicaSyncEvent) -> None:
    """Drops an event; the others find it missing once something is sent."""
