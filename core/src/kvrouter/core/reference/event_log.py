"""A bounded log of one rank's events: unsent ones, and sent ones for resyncs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from kvrouter.core.interface import EventsGone
from kvrouter.core.reference.rank_state import NumberedEvent


class EventLog:
    """Events with consecutive ids. Not thread-safe.

    Beyond ``max_events`` or ``max_bytes`` (encoded) the oldest events are discarded: sent ones first, then unsent ones,
    which are counted in ``dropped``. Consumers notice dropped events as a gap in the ids.
    """

    def __init__(self, max_events: int, max_bytes: int) -> None:
        self._dropped = 0
        self._unsent_bytes = 0
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._bytes = 0
        self._sent: deque[NumberedEvent] = deque()
        self._unsent: deque[NumberedEvent] = deque()

    @property
    def unsent(self) -> int:
        """Number of unsent events."""
        return len(self._unsent)

    @property
    def unsent_bytes(self) -> int:
        """Encoded size of the unsent events."""
        return self._unsent_bytes

    @property
    def dropped(self) -> int:
        """Number of discarded unsent events."""
        return self._dropped

    def extend(self, events: Iterable[NumberedEvent]) -> None:
        """Appends events in order of their ids."""
        for event in events:
            self._unsent.append(event)
            self._bytes += len(event.encoded)
            self._unsent_bytes += len(event.encoded)
        while len(self._sent) + len(self._unsent) > self._max_events or self._bytes > self._max_bytes:
            if self._sent:
                oldest = self._sent.popleft()
            else:
                oldest = self._unsent.popleft()
                self._unsent_bytes -= len(oldest.encoded)
                self._dropped += 1
            self._bytes -= len(oldest.encoded)

    def take(self, max_bytes: int) -> list[NumberedEvent]:
        """Returns the next events to send, at most ``max_bytes`` but at least one; none if all were sent."""
        taken: list[NumberedEvent] = []
        size = 0
        while self._unsent and (not taken or size + len(self._unsent[0].encoded) <= max_bytes):
            event = self._unsent.popleft()
            size += len(event.encoded)
            taken.append(event)
        self._unsent_bytes -= size
        self._sent.extend(taken)
        return taken

    def since(self, event_id: int, until: int, max_bytes: int) -> Iterator[list[NumberedEvent]]:
        """Returns the events from ``event_id`` to below ``until`` (0 for all), in groups of at most ``max_bytes``.

        The events are copied when this is called, so that the log may change while the groups are consumed.

        Raises:
            EventsGone: the first event is not in the log.
        """
        held = [*self._sent, *self._unsent]
        if not held or not held[0].event_id <= event_id <= held[-1].event_id:
            raise EventsGone(f"event {event_id} is not in the log")
        first = held[0].event_id
        desired = held[event_id - first : max(0, until - first) if until else None]
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
