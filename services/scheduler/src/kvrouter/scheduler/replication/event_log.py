"""What one life of another Scheduler has told of one component: its events in their order, each once.

Its log begins empty at sequence 0. An event that is ahead of the next one, or a heartbeat that is, shows a gap; a
heartbeat at the same sequence with another digest shows drift. Either wants the state of that Scheduler; until it has
come, events wait here, ``MAX_WAITING`` of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvrouter.runtime.backoff import Backoff
from kvrouter.scheduler.bookings.table import SchedulerIncarnation
from kvrouter.scheduler.replication.incarnations import RETRY_SECONDS
from kvrouter.scheduler.replication.owned_bookings import OwnedBookings
from kvrouter.v1.sync_pb2 import ReplicaSyncEvent, SyncHeartbeat

_BEHIND_SECONDS = 5.0
"""How long heartbeats may be behind what was heard until the state is fetched."""
_QUIET_SECONDS = 60.0
"""After a pause has ended, how long without a fetch until the next one counts as the first."""
MAX_WAITING = 65_536
"""Events that wait for a state: seconds of a busy Scheduler, where a state takes less. With more, all are dropped, and
the next heartbeat shows it."""


class Log:
    """A life's events as they were heard. Pure; time is seconds of any one clock."""

    def __init__(self, scheduler: SchedulerIncarnation, now: float) -> None:
        self.scheduler = scheduler
        self.owned = OwnedBookings()
        """What it holds, by its own account."""
        self.next_sequence = 0
        self.heard_at = now
        """When it was last heard."""
        self.state_requested = ""
        """Why its state is needed: ``join``, ``gap``, ``behind`` or ``digest``; empty while nothing is missing."""
        self.due = now
        """When its state may be asked for, if it is wanted."""
        self._behind_since: float | None = None
        self._backoff = Backoff(*RETRY_SECONDS)
        self._fetching = False
        self._waiting: dict[int, ReplicaSyncEvent] = {}
        self._compared_at = -1
        """Sequence at which a digest differed last: asking again would bring the same."""

    def hear(self, event: ReplicaSyncEvent, now: float) -> Iterator[ReplicaSyncEvent]:
        """The events that can be applied, in their order, given one that has come. Each is to be applied at once."""
        self.heard_at = max(self.heard_at, now)
        if event.HasField("heartbeat"):
            self._compare(event.sequence, event.heartbeat, now)
        elif event.sequence >= self.next_sequence:
            self._keep(event)
            yield from self._in_order()
            if self._waiting and not self._fetching:
                self._request_state("gap")

    def is_known(self, event: ReplicaSyncEvent) -> bool:
        """Whether an event has come already. A heartbeat is none."""
        return not event.HasField("heartbeat") and (
            event.sequence < self.next_sequence or event.sequence in self._waiting
        )

    def fetch(self) -> None:
        """Its state is asked for: from here on, events wait for that."""
        self._fetching = True

    def fetched(self, next_sequence: int) -> Iterator[ReplicaSyncEvent]:
        """Ends a fetch: its state has come, and is applied. Yields the events that have come after it, in their order.

        Its own word for its sequence counts: what is ahead of it was never sent.
        """
        self._fetching, self.state_requested = False, ""
        self.next_sequence = next_sequence
        self._waiting = {number: event for number, event in self._waiting.items() if number >= self.next_sequence}
        yield from self._in_order()
        # What is further ahead would ask for the state for ever if it was made up; if not, the next heartbeat asks.
        self._waiting.clear()

    def note_fetched(self, now: float, *, founded: bool) -> None:
        """Notes whether the state brought news. Where it did not, the next is asked for after a pause that doubles."""
        if founded or now - self.due >= _QUIET_SECONDS:
            self._backoff.succeeded()
        self.due = now if founded else now + self._backoff.failed()

    def give_up(self, now: float) -> None:
        """Ends a fetch: its state has not come; it is wanted still, after a pause that doubles."""
        self._fetching = False
        self.due = now + self._backoff.failed()

    def join(self) -> None:
        """Has its state fetched, whatever was heard."""
        self._request_state("gap")

    def _compare(self, sequence: int, heartbeat: SyncHeartbeat, now: float) -> None:
        if sequence >= self.next_sequence:
            self._behind_since = None
        if sequence > self.next_sequence:
            self._request_state("gap")
        elif sequence < self.next_sequence:
            # Heartbeats do not overtake events: some that were applied were never sent. Where they are few, the digest
            # shows it as soon as the sequence is reached.
            self._behind_since = now if self._behind_since is None else self._behind_since
            if now - self._behind_since >= _BEHIND_SECONDS and not self._fetching:
                self._behind_since = None
                self._request_state("behind")
        elif sequence == self.next_sequence and not self._fetching and not self.state_requested:
            agrees = (heartbeat.digest, heartbeat.bookings) == (self.owned.digest, len(self.owned))
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
