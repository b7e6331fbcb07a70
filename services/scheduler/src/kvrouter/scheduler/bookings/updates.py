"""The calls about live bookings, and the periodic expiry: each is one call on the booking table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrouter.runtime.booking_updates import Free, Key, OutputReport, PrefillComplete
from kvrouter.scheduler.bookings.booking import Booking, placement_of, replicated_booking
from kvrouter.scheduler.bookings.ownership import BookingOwnership
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.identifiers import check_key, checked_key
from kvrouter.scheduler.load.pools import Pools
from kvrouter.scheduler.metrics import SchedulerMetrics
from kvrouter.v1 import scheduler_pb2 as pb


@dataclass(eq=False)
class BookingUpdates:
    """Changes live bookings. No call waits, so calls take effect in the order of their arrival.

    ``clock`` returns the seconds of a monotonic clock.
    """

    booking_table: BookingTable
    booking_ownership: BookingOwnership
    pools: Pools
    metrics: SchedulerMetrics
    clock: Callable[[], float]

    def mark_prefill_complete(self, update: PrefillComplete) -> bool:
        """Records the end of a booking's prefill. Returns whether the booking is known."""
        booking = self._find(update.key)
        if booking is not None:
            if update.handover_us is not None and not booking.prefilled:
                _note_handover(booking, update.handover_us)
            self.booking_table.prefill_complete(booking)
        return booking is not None

    def report_output(self, update: OutputReport) -> bool:
        """Records how many tokens a booking has generated. Returns whether the booking is known."""
        booking = self._find(update.key)
        if booking is not None:
            self.booking_table.generated(booking, update.output_tokens)
        return booking is not None

    def free(self, update: Free) -> bool:
        """Releases a booking. Returns whether it was known."""
        if self.booking_table.get(update.key) is None:
            check_key(update.key)
        booking = self.booking_table.free(
            update.key,
            cached_tokens=update.cached_tokens,
            lower_cached_tokens=update.lower_cached_tokens,
            output_tokens=update.output_tokens,
            prefilled=update.prefill_complete,
        )
        if booking is None:
            self.metrics.unknown_frees.inc()
        return booking is not None

    def reassert(self, request: pb.ReassertBooking, session_id: str) -> None:
        """Takes a live booking over into an open session, whoever made it. A freed one stays freed.

        Raises:
            UnknownComponent: its component is not registered.
            BadRequest: its hashes do not fit its prompt.
            TooLarge: the component has as many bookings as it may have.
        """
        key = checked_key(request.booking)
        booking = self.booking_table.get(key)
        if booking is not None:
            self.booking_ownership.adopt(booking, session_id, placement_of(request))
        elif not self.booking_table.was_freed(key):
            booking = self._book_again(key, request, session_id)
        if booking is not None:
            if request.prefill_complete:
                self.booking_table.prefill_complete(booking)
            if request.output_tokens:
                self.booking_table.generated(booking, request.output_tokens)

    def expire(self) -> None:
        """Ends expired leases and sessions after their grace."""
        self.booking_ownership.expire(self.clock())

    def _find(self, key: Key) -> Booking | None:
        booking = self.booking_table.find(key, self.clock())
        if booking is None:
            check_key(key)
        return booking

    def _book_again(self, key: Key, request: pb.ReassertBooking, session_id: str) -> Booking | None:
        pool = self.pools.named(request.component.namespace, request.component.name)
        booking = replicated_booking(pool, key, request)
        booking.session_id = session_id
        if not self.booking_ownership.book(booking, self.clock()):
            return None
        self.metrics.reasserted.inc()
        return booking


def _note_handover(booking: Booking, measured_us: int) -> None:
    """Compares the time of a hand-over with the forecast of its decision."""
    expected = booking.outcome.prefill
    if expected.remote and expected.transfer_factor > 0:
        modelled = expected.transfer_ms / expected.transfer_factor
        booking.pool.booked_load.handed_over(measured_us / 1e3, modelled)
