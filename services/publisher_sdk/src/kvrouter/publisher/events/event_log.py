"""The events of one rank that are waiting to be sent, or were sent not long ago, within bounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from kvrouter.publisher.errors import EventsGone
from kvrouter.publisher.events.rank_state import NumberedEvent


class EventLog:
    """Events with consecutive ids. Not safe for use by two threads at once.

    Beyond ``max_events`` or ``max_bytes`` (of encoded events) the oldest go: first those that were sent, then those
    that were not, which are counted in ``dropped``. What is left out shows as a gap in the ids.
    """

    def __init__(self, max_events: int, max_bytes: int) -> None:
        self.dropped = 0
        """Events that went without being sent."""
        self.unsent_bytes = 0
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._bytes = 0
        self._sent: deque[NumberedEvent] = deque()
        self._unsent: deque[NumberedEvent] = deque()

    @property
    def unsent(self) -> int:
        """Events that wait to be sent."""
        return len(self._unsent)

    def waiting(self) -> list[NumberedEvent]:
        """The events that wait to be sent."""
        return list(self._unsent)

    def extend(self, events: Iterable[NumberedEvent]) -> None:
        """Appends events, in order of their ids."""
        for event in events:
            self._unsent.append(event)
            self._bytes += len(event.encoded)
            self.unsent_bytes += len(event.encoded)
        while len(self._sent) + len(self._unsent) > self._max_events or self._bytes > self._max_bytes:
            if self._sent:
                oldest = self._sent.popleft()
            else:
                oldest = self._unsent.popleft()
                self.unsent_bytes -= len(oldest.encoded)
                self.dropped += 1
            self._bytes -= len(oldest.encoded)

    def take(self, max_bytes: int) -> list[NumberedEvent]:
        """The next events to send: as many as fit in ``max_bytes``, one at least; none if none wait."""
        taken: list[NumberedEvent] = []
        size = 0
        while self._unsent and (not taken or size + len(self._unsent[0].encoded) <= max_bytes):
            event = self._unsent.popleft()
            size += len(event.encoded)
            taken.append(event)
        self.unsent_bytes -= size
        self._sent.extend(taken)
        return taken

    def since(self, event_id: int, until: int, max_bytes: int) -> Iterator[list[NumberedEvent]]:
        """Events from ``event_id`` up to below ``until`` (0: all), in runs of at most ``max_bytes``.

        The log is read at once, so that it may change while the runs are used.

        Raises:
            EventsGone: the first of them is not in the log.
        """
        held = [*self._sent, *self._unsent]
        if not held or not held[0].event_id <= event_id <= held[-1].event_id:
            raise EventsGone(f"event {event_id} is not held")
        first = held[0].event_id
        desired = held[event_id - first : until - first if until else None]
        return _runs(desired, max_bytes)


def _runs(events: list[NumberedEvent], max_bytes: int) -> Iterator[list[NumberedEvent]]:
    run: list[NumberedEvent] = []
    size = 0
    for event in events:
        if run and size + len(event.encoded) > max_bytes:
            yield run
            run, size = [], 0
        run.append(event)
        size += len(event.encoded)
    if run:
        yield run
