"""Announces this Scheduler's bookings to the other Schedulers of a component.

Whoever learns of progress or an end announces it, and the owners announce it again under their own sequence.
The bookings of a Scheduler thus follow from its own events alone, and digests can be compared:

    digest = sum over the announced bookings of XXH3-64(request id, attempt, stage, state)  mod 2^64

``SyncHeartbeat`` in the contract defines the encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import xxhash
from kvrouter.runtime.booking_updates import Key, key_message
from kvrouter.scheduler.bookings.booking import (
    Booked,
    Booking,
    BookingChange,
    Freed,
    OutputGenerated,
    OwnerAdded,
    OwnerRemoved,
    PrefillCompleted,
    SessionEnded,
    add_request,
)
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.identifiers import component_message
from kvrouter.scheduler.metrics import SyncMetrics
from kvrouter.v1 import sync_pb2 as pb
from kvrouter.v1.names import ComponentName

_SEED = 1337
_AFTER_ID = struct.Struct("<IIB")
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class _AnnouncedBooking:
    session_id: str
    prefilled: bool


class AnnouncedBookings:
    """Announced keys, each with its session and whether its prompt is computed."""

    def __init__(self) -> None:
        self._bookings: dict[Key, _AnnouncedBooking] = {}
        self._of_sessions: dict[str, set[Key]] = {}
        self.digest = 0
        """Their digest."""

    def __len__(self) -> int:
        """Returns the number of bookings."""
        return len(self._bookings)

    def __contains__(self, key: Key) -> bool:
        """Returns whether a key is among them."""
        return key in self._bookings

    def __iter__(self) -> Iterator[Key]:
        """Iterates over the keys as they are at this moment."""
        return iter(list(self._bookings))

    def put(self, key: Key, session_id: str) -> None:
        """Adds a booking of a session, or of a lease if ``session_id`` is empty. A known booking moves to it."""
        announced = self._bookings.get(key)
        if announced is None:
            self._bookings[key] = _AnnouncedBooking(session_id, prefilled=False)
            self._count(key, 1, prefilled=False)
        else:
            self._leave_session(key, announced)
            announced.session_id = session_id
        if session_id:
            self._of_sessions.setdefault(session_id, set()).add(key)

    def prefilled(self, key: Key) -> bool:
        """Records the end of a prefill. Returns whether it changes anything."""
        announced = self._bookings.get(key)
        if announced is None or announced.prefilled:
            return False
        announced.prefilled = True
        self._count(key, -1, prefilled=False)
        self._count(key, 1, prefilled=True)
        return True

    def drop(self, key: Key) -> bool:
        """Removes a booking. Returns whether it was there."""
        announced = self._bookings.pop(key, None)
        if announced is None:
            return False
        self._leave_session(key, announced)
        self._count(key, -1, prefilled=announced.prefilled)
        return True

    def of_session(self, session_id: str) -> list[Key]:
        """Returns the keys of a session."""
        return list(self._of_sessions.get(session_id, ()))

    def _leave_session(self, key: Key, announced: _AnnouncedBooking) -> None:
        keys = self._of_sessions.get(announced.session_id)
        if keys is None:
            return
        keys.discard(key)
        if not keys:
            del self._of_sessions[announced.session_id]

    def _count(self, key: Key, sign: int, *, prefilled: bool) -> None:
        request_id, attempt, stage = key
        encoded = request_id.encode() + _AFTER_ID.pack(attempt, stage, prefilled)
        self.digest = (self.digest + sign * xxhash.xxh3_64_intdigest(encoded, seed=_SEED)) & _MASK


MAX_ANNOUNCED_BYTES = 768 << 10
"""Size above which a booking is not announced. With the other bookings of a chunk it must stay below the message limit
of NATS (1 MiB). It allows a prompt of 98,000 blocks, 49,000 with predicted blocks."""


@dataclass(eq=False)
class Announcer:
    """Converts changes of the booking table to the events of this Scheduler for one component.

    ``send`` takes the events in order; ``clock`` returns seconds.
    """

    component: ComponentName
    booking_table: BookingTable
    metrics: SyncMetrics
    send: Callable[[pb.ReplicaSyncEvent], None]
    clock: Callable[[], float]
    announced: AnnouncedBookings = field(default_factory=AnnouncedBookings, init=False)
    """This Scheduler's announced bookings."""
    next_sequence: int = field(default=0, init=False)
    """Sequence number of the next event."""

    def announcement(self, booking: Booking) -> pb.AddRequest:
        """Returns the announcement of a booking of this Scheduler."""
        return add_request(booking, booking.owners[self.booking_table.here], self.clock())

    def announce(self, change: BookingChange) -> None:
        """Announces a change of this component's bookings, if this Scheduler must announce it.

        An owner announces again the reports of others about its bookings. A Scheduler with reports about another
        owner's booking announces each of them, because the announcements renew the lease there.
        """
        match change:
            case Booked(booking, owner) | OwnerAdded(booking, owner) if owner == self.booking_table.here:
                self._announce_booking(booking)
            case OwnerRemoved(booking, owner) if owner == self.booking_table.here:
                self.announced.drop(booking.key)
            case PrefillCompleted(booking, is_remote):
                if self.announced.prefilled(booking.key) or (not is_remote and booking.key not in self.announced):
                    self._announce_prefilled(booking)
            case OutputGenerated(booking, is_remote):
                if not is_remote or booking.key in self.announced:
                    self._announce_output(booking)
            case Freed(key, is_remote=is_remote):
                if self.announced.drop(key) or not is_remote:
                    self._send_event(free=pb.FreeBooking(booking=key_message(key)))
            case SessionEnded(session_id):
                self._send_event(session_ended=pb.SessionEnded(session_id=session_id))
            case _:
                pass

    def _announce_booking(self, booking: Booking) -> None:
        announcement = self.announcement(booking)
        if announcement.ByteSize() > MAX_ANNOUNCED_BYTES:
            self.metrics.quarantined.labels(reason="too_large").inc()
            return
        self.announced.put(booking.key, booking.session_id)
        self._send_event(add_request=announcement)
        if booking.prefilled and self.announced.prefilled(booking.key):
            self._announce_prefilled(booking)
        if booking.output_tokens:
            self._announce_output(booking)

    def _announce_prefilled(self, booking: Booking) -> None:
        self._send_event(mark_prefill_completed=pb.MarkPrefillCompleted(booking=key_message(booking.key)))

    def _announce_output(self, booking: Booking) -> None:
        progress = pb.OutputProgress(booking=key_message(booking.key), output_tokens=booking.output_tokens)
        self._send_event(output_progress=progress)

    def heartbeat(self) -> pb.ReplicaSyncEvent:
        """Returns a heartbeat with the sequence and the digest of this Scheduler."""
        digest = pb.SyncHeartbeat(digest=self.announced.digest, bookings=len(self.announced))
        return self._event(heartbeat=digest)

    def _send_event(self, **event: object) -> None:
        self.send(self._event(**event))
        self.next_sequence += 1

    def _event(self, **event: object) -> pb.ReplicaSyncEvent:
        incarnation, scheduler_id = self.booking_table.here
        return pb.ReplicaSyncEvent(
            scheduler_id=scheduler_id,
            incarnation=incarnation,
            sequence=self.next_sequence,
            component=component_message(self.component),
            **event,  # type: ignore[arg-type]  # one of the events
        )
