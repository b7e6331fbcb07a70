"""Merges the events of a component's Schedulers into the bookings counted here.

Each Scheduler announces the bookings of its sessions and leases (``announcer``). A booking lives while at least
one Scheduler owns it and none has freed it.

    booked or moved here         AddRequest             the sender owns it
    prompt computed              MarkPrefillCompleted   merged by maximum
    tokens generated             OutputProgress         merged by maximum
    freed                        FreeBooking            nobody owns it, and nobody books it again
    grace of a session over      SessionEnded           the sender no longer owns that session's bookings
    the sender is gone           (nothing)              its bookings are orphans: dropped after the grace, except those
                                                        of another Scheduler by then
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import KW_ONLY, dataclass, field

import structlog
from kvrouter.runtime.booking_updates import Key
from kvrouter.scheduler.bookings.booking import (
    Booked,
    Freed,
    OutputGenerated,
    OwnerAdded,
    OwnerRemoved,
    PrefillCompleted,
    SchedulerIncarnation,
    SessionEnded,
    placement_of,
    replicated_booking,
)
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.identifiers import checked_key
from kvrouter.scheduler.load.pools import Pools
from kvrouter.scheduler.metrics import SyncMetrics
from kvrouter.scheduler.replication.announcer import Announcer
from kvrouter.scheduler.replication.event_log import EventLog, Incarnations, Verdict
from kvrouter.v1.errors import BadRequest, KvRouterError, RequestIdReused
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import ReplicaStatus
from kvrouter.v1.sync_pb2 import AddRequest, ReplicaSyncEvent

log = structlog.get_logger(component="scheduler")

MAX_INCARNATIONS = 64
"""Most followed incarnations of other Schedulers: far more than a component has."""


@dataclass(eq=False)
class Replicas:
    """The Schedulers of one component. Does no I/O: messages are arguments, and ``send`` takes its events in order.

    Orphans are kept for ``grace_seconds``.
    """

    component: ComponentName
    booking_table: BookingTable
    pools: Pools
    metrics: SyncMetrics
    send: Callable[[ReplicaSyncEvent], None]
    _: KW_ONLY
    grace_seconds: float
    clock: Callable[[], float]
    """Seconds of a monotonic clock."""
    _logs: dict[SchedulerIncarnation, EventLog] = field(default_factory=dict, init=False)
    incarnations: Incarnations = field(default_factory=Incarnations, init=False)

    def __post_init__(self) -> None:
        self.announcer = Announcer(self.component, self.booking_table, self.metrics, self.send, self.clock)

    @property
    def logs(self) -> Collection[EventLog]:
        """Followed incarnations, including those of gone Schedulers until their grace is over."""
        return self._logs.values()

    def receive(self, event: ReplicaSyncEvent) -> None:
        """Applies an event, and the events waiting for it. Counts unusable events."""
        now = self.clock()
        event_log = self._log_of(event, now)
        if event_log is None:
            return
        if "heartbeat" not in event:
            self.metrics.received.inc()
        if event_log.is_known(event):
            self._quarantine("duplicate")
            return
        state_requested = event_log.state_requested
        for each in event_log.receive(event, now):
            self.apply(event_log, each)
        if event_log.state_requested and not state_requested:
            counter = self.metrics.digest_mismatches if event_log.state_requested == "digest" else self.metrics.gaps
            counter.inc()
            log.info(
                "replica.state_requested",
                origin=event_log.scheduler[1],
                component_name=str(self.component),
                reason=event_log.state_requested,
            )

    def apply(self, event_log: EventLog, event: ReplicaSyncEvent) -> None:
        """Applies the next event of an incarnation. Counts an invalid one, which changes nothing."""
        try:
            match event.WhichOneof("event"):
                case "add_request":
                    self._receive_owned(event_log, event.add_request)
                case "mark_prefill_completed":
                    key = checked_key(event.mark_prefill_completed.booking)
                    event_log.announced.prefilled(key)
                    booking = self.booking_table.find(key, self.clock())
                    if booking is not None and not booking.prefilled:
                        self.booking_table.prefill_complete(booking, is_remote=True)
                case "output_progress":
                    output_tokens = event.output_progress.output_tokens
                    booking = self.booking_table.find(checked_key(event.output_progress.booking), self.clock())
                    if booking is not None and output_tokens > booking.output_tokens:
                        self.booking_table.generated(booking, output_tokens, is_remote=True)
                case "free":
                    key = checked_key(event.free.booking)
                    event_log.announced.drop(key)
                    self.booking_table.free(key, is_remote=True)
                case "session_ended":
                    for key in event_log.announced.of_session(event.session_ended.session_id):
                        self.remove_owner(event_log, key)
                case _:
                    self._quarantine("unknown_event")
        except KvRouterError as error:
            self._quarantine(error.code.name.lower())
            log.debug(
                "replica.event_quarantined",
                origin=event_log.scheduler[1],
                component_name=str(self.component),
                cause=error.message,
            )

    def _receive_owned(self, event_log: EventLog, announced: AddRequest) -> None:
        """Records an incarnation as owner of a booking, even if the booking cannot be counted here.

        Raises:
            KvRouterError: the booking cannot be counted here.
        """
        key = checked_key(announced.booking)
        event_log.announced.put(key, announced.session_id)
        if self.booking_table.was_freed(key):
            return
        pool = self.pools.get(self.component)
        if pool is None:
            raise BadRequest(f"{self.component} is not registered here", field="component", advice="Register it.")
        booking = self.booking_table.get(key)
        if booking is None:
            self.booking_table.book(replicated_booking(pool, key, announced), event_log.scheduler)
            return
        is_same_prompt = booking.prompt.sequence_hashes == announced.sequence_hashes
        if booking.component != self.component or not is_same_prompt:
            raise RequestIdReused(key[0])
        self.booking_table.add_owner(booking, event_log.scheduler, placement_of(announced))

    def remove_owner(self, event_log: EventLog, key: Key) -> None:
        """Removes an incarnation from the owners of a booking."""
        event_log.announced.drop(key)
        self.booking_table.remove_owner(key, event_log.scheduler)

    def expire(self, registered: Collection[str]) -> None:
        """Drops the bookings of Schedulers gone for the grace period.

        Args:
            registered: Ids of the registered Schedulers. They are not gone even if they are silent, except for their
                earlier incarnations.
        """
        now = self.clock()
        for scheduler, event_log in list(self._logs.items()):
            incarnation, scheduler_id = scheduler
            is_gone = scheduler_id not in registered or incarnation != self.incarnations.current(scheduler_id)
            if is_gone and now - event_log.received_at >= self.grace_seconds:
                self._forget(event_log)
        self.incarnations.forget_quiet(now)

    def status(self) -> Iterator[ReplicaStatus]:
        """Yields the state of each Scheduler as seen here, this one first."""
        incarnation, scheduler_id = self.booking_table.here
        yield ReplicaStatus(
            scheduler_id=scheduler_id,
            incarnation=incarnation,
            next_sequence=self.announcer.next_sequence,
            bookings=len(self.announcer.announced),
            digest=self.announcer.announced.digest,
            complete=True,
        )
        now = self.clock()
        for (incarnation, scheduler_id), event_log in sorted(self._logs.items()):
            yield ReplicaStatus(
                scheduler_id=scheduler_id,
                incarnation=incarnation,
                next_sequence=event_log.next_sequence,
                bookings=len(event_log.announced),
                digest=event_log.announced.digest,
                heard_age_ms=max(0, int((now - event_log.received_at) * 1000)),
                complete=not event_log.state_requested,
            )

    def _log_of(self, event: ReplicaSyncEvent, now: float) -> EventLog | None:
        scheduler = (event.incarnation, event.scheduler_id)
        known = self._logs.get(scheduler)
        if known is None and len(self._logs) >= MAX_INCARNATIONS:
            self._quarantine("too_many_replicas")
            return None
        verdict = self.incarnations.judge(event.scheduler_id, event.incarnation, now)
        if verdict is not Verdict.APPLY:
            self._quarantine("old_incarnation" if verdict is Verdict.OLD else "unconfirmed_incarnation")
            return None
        return known or self._follow(scheduler)

    def _follow(self, scheduler: SchedulerIncarnation) -> EventLog:
        followed = self._logs[scheduler] = EventLog(scheduler, self.clock())
        log.info("replica.joined", origin=scheduler[1], component_name=str(self.component))
        return followed

    def settle(self, scheduler_id: str, incarnation: int) -> None:
        """Applies a Scheduler's own answer about its incarnation. Requests its state if another one counted before."""
        before = self.incarnations.current(scheduler_id)
        if not self.incarnations.settle(scheduler_id, incarnation, self.clock()):
            return
        scheduler = (incarnation, scheduler_id)
        (self._logs.get(scheduler) or self._follow(scheduler)).join()
        for other, event_log in list(self._logs.items()):
            if other[1] == scheduler_id and other[0] > incarnation:
                self._forget(event_log)
        log.warning(
            "replica.incarnation_corrected",
            origin=scheduler_id,
            component_name=str(self.component),
            incarnation=incarnation,
            refuted_incarnation=before,
        )

    def due(self) -> tuple[list[EventLog], list[str]]:
        """Returns the logs whose state is to be fetched now, and the Schedulers to ask for their incarnation."""
        now = self.clock()
        return [
            event_log for event_log in self._logs.values() if event_log.state_requested and event_log.due <= now
        ], self.incarnations.due(now)

    def pause(self) -> float | None:
        """Returns the seconds until something is due; None if nothing is needed."""
        times = [event_log.due for event_log in self._logs.values() if event_log.state_requested]
        if (disputed := self.incarnations.next_due()) is not None:
            times.append(disputed)
        return max(0.0, min(times) - self.clock()) if times else None

    def _forget(self, event_log: EventLog) -> None:
        dropped = 0
        for key in event_log.announced:
            booking = self.booking_table.remove_owner(key, event_log.scheduler)
            dropped += booking is not None and not booking.owners
        del self._logs[event_log.scheduler]
        # Earlier incarnations stay fenced while any incarnation of their Scheduler is followed.
        if not any(scheduler_id == event_log.scheduler[1] for _, scheduler_id in self._logs):
            self.incarnations.forget(event_log.scheduler[1])
        self.metrics.orphans.inc(dropped)
        log.info("replica.left", origin=event_log.scheduler[1], component_name=str(self.component), bookings=dropped)

    def _quarantine(self, reason: str) -> None:
        self.metrics.quarantined.labels(reason=reason).inc()


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
        subscribe(Booked, self._changed)
        subscribe(OwnerAdded, self._changed)
        subscribe(OwnerRemoved, self._changed)
        subscribe(PrefillCompleted, self._changed)
        subscribe(OutputGenerated, self._changed)
        subscribe(Freed, self._freed)
        subscribe(SessionEnded, self._session_ended)

    def _changed(self, change: Booked | OwnerAdded | OwnerRemoved | PrefillCompleted | OutputGenerated) -> None:
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
