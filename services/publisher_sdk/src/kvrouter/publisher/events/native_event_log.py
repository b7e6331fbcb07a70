"""The event log and the batches of the Rust core, which the C library uses too, with the interface of the reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvrouter.core import ENCODE_EVENT_BATCH, EVENT_LOG
from kvrouter.publisher.errors import EventsGone
from kvrouter.publisher.events import batches
from kvrouter.publisher.events.blocks import NumberedEvent
from kvrouter.publisher.events.event_log import EventLog
from kvrouter.v1.events_pb2 import KvEventBatch


class NativeEventLog(EventLog):
    """Converts between the SDK's types and those of the core. Not thread-safe."""

    def __init__(self, max_events: int, max_bytes: int) -> None:
        """Makes an empty log; only where ``kvrouter.core.EVENT_LOG`` is set."""
        self._core = EVENT_LOG(max_events, max_bytes)

    @property
    def unsent(self) -> int:
        """Number of unsent events."""
        return int(self._core.counts()[1])

    @property
    def unsent_bytes(self) -> int:
        """Encoded size of the unsent events."""
        return int(self._core.counts()[2])

    @property
    def dropped(self) -> int:
        """Number of unsent events that were discarded."""
        return int(self._core.counts()[0])

    def waiting(self) -> list[NumberedEvent]:
        """Returns the unsent events."""
        return _numbered(self._core.waiting())

    def extend(self, events: Iterable[NumberedEvent]) -> None:
        """Appends events in order of their ids."""
        self._core.extend(list(events))

    def take(self, max_bytes: int) -> list[NumberedEvent]:
        """Returns the next events to send, at most ``max_bytes`` but at least one; none if all were sent."""
        return _numbered(self._core.take(max_bytes))

    def since(self, event_id: int, until: int, max_bytes: int) -> Iterator[list[NumberedEvent]]:
        """Returns the events from ``event_id`` to below ``until`` (0 for all), in groups of at most ``max_bytes``.

        Raises:
            EventsGone: the first event is not in the log.
        """
        try:
            runs = self._core.since(event_id, until, max_bytes)
        except KeyError as error:
            raise EventsGone(error.args[0]) from None
        return map(_numbered, runs)


def make_event_log(max_events: int, max_bytes: int) -> EventLog:
    """Returns an empty event log of the Rust core, or the reference where that is not built."""
    return (EventLog if EVENT_LOG is None else NativeEventLog)(max_events, max_bytes)


def encode_batch(head: KvEventBatch, events: Sequence[NumberedEvent]) -> bytes:
    """Returns the encoding of ``head`` with ``events``; see ``batches.encode_batch``."""
    if ENCODE_EVENT_BATCH is None:
        return batches.encode_batch(head, events)
    fields = head.worker_id, head.dp_rank, head.incarnation, head.block_size, head.copy_counting
    encoded: bytes = ENCODE_EVENT_BATCH(fields, list(events), head.next_event_id, head.digest, head.published_unix_ns)
    return encoded


def _numbered(events: Iterable[tuple[int, bytes, int]]) -> list[NumberedEvent]:
    return [NumberedEvent(*event) for event in events]
