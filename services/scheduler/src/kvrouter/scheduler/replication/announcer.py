"""Announces this Scheduler's bookings to the other Schedulers of a component.

Whoever learns of progress or an end announces it, and the owners announce it again under their own sequence.
The bookings of a Scheduler thus follow from its own events alone, and digests can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvrouter.scheduler.bookings.booking import (
    Booking,
    BookingChange,
    Freed,
    OutputGenerated,
    OwnerAdded,
    OwnerRemoved,
    PrefillCompleted,
    SessionEnded,
)
from kvrouter.scheduler.bookings.conversions import add_request
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.identifiers import component_message, key_message
from kvrouter.scheduler.replication.announced_bookings import AnnouncedBookings
from kvrouter.scheduler.replication.metrics import SyncMetrics
from kvrouter.v1 import sync_pb2 as pb
from kvrouter.v1.names import ComponentName

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
            case OwnerAdded(booking, owner) if owner == self.booking_table.here:
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
