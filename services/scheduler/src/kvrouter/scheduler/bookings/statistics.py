"""Metrics, logs and cache statistics of how bookings end."""

from __future__ import annotations

import structlog
from kvrouter.scheduler.bookings.booking import Booking
from kvrouter.scheduler.bookings.changes import BookingChange, Freed, SessionEnded
from kvrouter.scheduler.metrics import SchedulerMetrics

log = structlog.get_logger(component="scheduler")


class BookingStatistics:
    """A listener of the booking table that counts and logs. Changes nothing."""

    def __init__(self, metrics: SchedulerMetrics) -> None:
        self._metrics = metrics

    def receive(self, change: BookingChange) -> None:
        """Counts a change."""
        match change:
            case Freed(booking=Booking() as booking, is_expired=is_expired, cached_tokens=cached_tokens):
                if is_expired:
                    self._lease_expired(booking)
                if cached_tokens is not None:
                    self._compare_prediction(booking, cached_tokens)
            case SessionEnded(session_id, client_name, bookings):
                self._metrics.lost_bookings.inc(len(bookings))
                log.info("session.expired", session=session_id, client=client_name, bookings=len(bookings))
            case _:
                pass

    def _lease_expired(self, booking: Booking) -> None:
        self._metrics.expired_leases.inc()
        request_id, attempt, _ = booking.key
        log.warning(
            "booking.lease_expired", request_id=request_id, attempt=attempt, component_name=str(booking.component)
        )

    def _compare_prediction(self, booking: Booking, cached_tokens: int) -> None:
        """Compares the predicted overlap with what the worker found in its cache."""
        block_size, prompt_tokens = booking.pool.booked_load.block_size, booking.prompt.tokens
        # The block of the last token is computed even if it is cached: the model needs its output.
        reachable = (prompt_tokens - 1) // block_size
        predicted = min(booking.outcome.overlap_blocks, reachable)
        if booking.audited:
            self._metrics.audit(predicted, cached_tokens // block_size)
        booking.pool.cache_hits.add(
            booking.rank,
            prompt_tokens=prompt_tokens,
            cached_tokens=min(cached_tokens, prompt_tokens),
            predicted_tokens=predicted * block_size if booking.audited else None,
        )
