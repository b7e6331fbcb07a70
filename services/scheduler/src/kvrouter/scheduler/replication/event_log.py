"""The events of other Schedulers: in order, each once, and of the incarnation that counts. Does no I/O.

A log has the events of one incarnation of one Scheduler for one component. It begins empty at sequence 0. An event or
heartbeat ahead of the expected sequence shows a gap; a heartbeat at the same sequence with another digest shows drift.
Both need the state of the sender. Until it arrives, up to ``MAX_WAITING`` events wait here.

The incarnation is the start time of a Scheduler process by its own clock. It fences events of an earlier process. The
first incarnation may come from an event alone. If events contradict each other, because a clock went back or an event
is forged, the Scheduler itself is asked: its own answer counts, higher or lower, and from then on no event alone begins
an incarnation of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from kvrouter.net.backoff import Backoff
from kvrouter.scheduler.bookings.booking import SchedulerIncarnation
from kvrouter.scheduler.replication.announcer import AnnouncedBookings
from kvrouter.v1.sync_pb2 import ReplicaSyncEvent, SyncHeartbeat

_BEHIND_SECONDS = 5.0
"""Seconds for which heartbeats may be behind the received events before the state is fetched."""
RETRY_SECONDS = (0.25, 30.0)
"""First and longest pause before a Scheduler is asked again, seconds."""
_QUIET_SECONDS = 60.0
"""Seconds without a question to a Scheduler after which its back-off starts again."""
MAX_WAITING = 65_536
"""Most events waiting for a state: those of a busy Scheduler in a few seconds, and a state takes less.
If there are more, all are dropped, and the next heartbeat shows the gap."""


class EventLog:
    """Orders the events of one incarnation. Pure; times are seconds of one clock."""

    def __init__(self, scheduler: SchedulerIncarnation, now: float) -> None:
        self.scheduler = scheduler
        self.announced = AnnouncedBookings()
        """Its announced bookings."""
        self.next_sequence = 0
        self.received_at = now
        """Time of its last message."""
        self.state_requested = ""
        """Why its state is needed: ``join``, ``gap``, ``behind`` or ``digest``; empty if nothing is missing."""
        self.due = now
        """Earliest time of the next fetch, if its state is needed."""
        self._behind_since: float | None = None
        self._backoff = Backoff(*RETRY_SECONDS)
        self._fetching = False
        self._waiting: dict[int, ReplicaSyncEvent] = {}
        self._compared_at = -1
        """Sequence of the last differing digest: fetching again at this sequence would bring the same."""

    def receive(self, event: ReplicaSyncEvent, now: float) -> Iterator[ReplicaSyncEvent]:
        """Yields the applicable events in order, after a new one has arrived. Apply each at once."""
        self.received_at = max(self.received_at, now)
        if "heartbeat" in event:
            self._compare(event.sequence, event.heartbeat, now)
        elif event.sequence >= self.next_sequence:
            self._keep(event)
            yield from self._in_order()
            if self._waiting and not self._fetching:
                self._request_state("gap")

    def is_known(self, event: ReplicaSyncEvent) -> bool:
        """Returns whether an event has arrived before. Heartbeats are never known."""
        return "heartbeat" not in event and (event.sequence < self.next_sequence or event.sequence in self._waiting)

    def fetch(self) -> None:
        """Begins a fetch of the state: from now on events wait for it."""
        self._fetching = True

    def fetched(self, next_sequence: int) -> Iterator[ReplicaSyncEvent]:
        """Ends a fetch whose state was applied. Yields the later events in order.

        The sender's own sequence counts: events ahead of it were never sent.
        """
        self._fetching, self.state_requested = False, ""
        self.next_sequence = next_sequence
        self._waiting = {number: event for number, event in self._waiting.items() if number >= self.next_sequence}
        yield from self._in_order()
        # Forged events ahead would request the state without end; real ones show in the next heartbeat.
        self._waiting.clear()

    def note_fetched(self, now: float, *, founded: bool) -> None:
        """Records whether the state changed anything. If not, the next fetch waits for a doubled pause."""
        if founded or now - self.due >= _QUIET_SECONDS:
            self._backoff.succeeded()
        self.due = now if founded else now + self._backoff.failed()

    def give_up(self, now: float) -> None:
        """Ends a failed fetch; the next one waits for a doubled pause."""
        self._fetching = False
        self.due = now + self._backoff.failed()

    def join(self) -> None:
        """Requests the state, whatever has been received."""
        self._request_state("gap")

    def _compare(self, sequence: int, heartbeat: SyncHeartbeat, now: float) -> None:
        if sequence >= self.next_sequence:
            self._behind_since = None
        if sequence > self.next_sequence:
            self._request_state("gap")
        elif sequence < self.next_sequence:
            # Heartbeats do not overtake events, so some applied events were never sent. If they are few, the digest
            # shows it once the sequence is reached.
            self._behind_since = now if self._behind_since is None else self._behind_since
            if now - self._behind_since >= _BEHIND_SECONDS and not self._fetching:
                self._behind_since = None
                self._request_state("behind")
        elif sequence == self.next_sequence and not self._fetching and not self.state_requested:
            agrees = (heartbeat.digest, heartbeat.bookings) == (self.announced.digest, len(self.announced))
            if not agrees and self._compared_at != sequence:
                self._compared_at = sequence
                self._request_state("digest")

    def _keep(self, event: ReplicaSyncEvent) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.clear()
        self._waiting[event.sequence] = event

    def _in_order(self) -> Iterator[ReplicaSyncEvent]:
        while not self._fetching and (event := self._waiting.pop(self.next_sequence, None)) is not None:
            self.next_sequence += 1
            yield event

    def _request_state(self, reason: str) -> None:
        if not self.state_requested:
            self.state_requested = "join" if reason == "gap" and self.next_sequence == 0 else reason


_MAX_DISPUTES = 64


class Verdict(Enum):
    """Treatment of an event, by its incarnation."""

    APPLY = auto()
    OLD = auto()
    """It belongs to an earlier incarnation, or its later one was refuted."""
    UNCONFIRMED = auto()
    """It claims a later incarnation, unconfirmed by the Scheduler."""


@dataclass(slots=True)
class _Dispute:
    due: float
    is_open: bool = True
    backoff: Backoff = field(default_factory=lambda: Backoff(*RETRY_SECONDS))


class Incarnations:
    """The incarnations of the Schedulers of one component. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._current: dict[str, int] = {}
        self._confirmed: set[str] = set()
        self._disputes: dict[str, _Dispute] = {}

    def current(self, scheduler_id: str) -> int | None:
        """Returns the current incarnation; None if the Scheduler is unknown."""
        return self._current.get(scheduler_id)

    def judge(self, scheduler_id: str, incarnation: int, now: float) -> Verdict:
        """Judges an event. A contradiction to the current incarnation opens a dispute."""
        current = self._current.setdefault(scheduler_id, incarnation)
        if incarnation == current:
            return Verdict.APPLY
        if incarnation > current and scheduler_id not in self._confirmed:
            self._current[scheduler_id] = incarnation
            return Verdict.APPLY
        self.dispute(scheduler_id, now)
        return Verdict.OLD if incarnation < current else Verdict.UNCONFIRMED

    def dispute(self, scheduler_id: str, now: float) -> None:
        """Asks for a Scheduler's own answer about its incarnation: at once, or after its back-off."""
        known = self._disputes.get(scheduler_id)
        if known is None:
            if len(self._disputes) < _MAX_DISPUTES:
                self._disputes[scheduler_id] = _Dispute(now)
            return
        if now - known.due >= _QUIET_SECONDS:
            known.backoff.succeeded()
        known.is_open = True
        known.due = max(known.due, now)

    def due(self, now: float) -> list[str]:
        """Returns the Schedulers to ask now."""
        return [scheduler_id for scheduler_id, each in self._disputes.items() if each.is_open and each.due <= now]

    def next_due(self) -> float | None:
        """Returns when the next Scheduler is to be asked; None if none is."""
        return min((each.due for each in self._disputes.values() if each.is_open), default=None)

    def settle(self, scheduler_id: str, incarnation: int, now: float) -> bool:
        """Applies a Scheduler's own answer. Returns whether another incarnation counts from now on."""
        changed = self._current.get(scheduler_id) != incarnation
        self._current[scheduler_id] = incarnation
        self._confirmed.add(scheduler_id)
        dispute = self._disputes.get(scheduler_id)
        if dispute is not None:
            dispute.is_open = False
            if changed:
                dispute.backoff.succeeded()
            else:
                dispute.due = now + dispute.backoff.failed()
        return changed

    def unanswered(self, scheduler_id: str, now: float) -> None:
        """Records a missing answer of a Scheduler. It is asked again after a pause."""
        dispute = self._disputes.get(scheduler_id)
        if dispute is not None:
            dispute.due = now + dispute.backoff.failed()

    def forget(self, scheduler_id: str) -> None:
        """Drops the state of a gone Scheduler."""
        self._current.pop(scheduler_id, None)
        self._confirmed.discard(scheduler_id)
        self._disputes.pop(scheduler_id, None)

    def forget_quiet(self, now: float) -> None:
        """Drops disputes without news for a minute, and those about otherwise unknown Schedulers."""
        self._disputes = {
            scheduler_id: each
            for scheduler_id, each in self._disputes.items()
            if now - each.due < _QUIET_SECONDS
            and (scheduler_id in self._current or each.due - now < RETRY_SECONDS[1] / 2)
        }
