"""Metrics, logs and cache statistics of how bookings end."""

from __future__ import annotations

import structlog
from kvrouter.scheduler.bookings.booking import Booking, Freed, SessionEnded
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.load.cache_hits import Difference, tier_tokens
from kvrouter.scheduler.metrics import SchedulerMetrics

log = structlog.get_logger(component="scheduler")


class BookingStatistics:
    """A listener of the booking table for metrics and logs."""

    def __init__(self, metrics: SchedulerMetrics) -> None:
        self._metrics = metrics

    def follow(self, booking_table: BookingTable) -> None:
        """Subscribes to frees and ends of sessions."""
        booking_table.subscribe(Freed, self._freed)
        booking_table.subscribe(SessionEnded, self._session_ended)

    def _freed(self, change: Freed) -> None:
        """Logs an expired lease, and compares the cached tokens of a worker with those predicted."""
        booking = change.booking
        if booking is None:
            return
        if change.is_expired:
            self._metrics.expired_leases.inc()
            request_id, attempt, _ = booking.key
            log.warning(
                "booking.lease_expired", request_id=request_id, attempt=attempt, component_name=str(booking.component)
            )
        cached_tokens, lower = change.cached_tokens, change.lower_cached_tokens
        if cached_tokens is None:
            return
        lower_tokens = None if lower is None else tier_tokens(lower)
        pool, outcome = booking.pool, booking.outcome
        block_size, prompt_tokens = pool.booked_load.block_size, booking.prompt.tokens
        # The block of the last token is computed even if it is cached: the model needs its output.
        reachable = (prompt_tokens - 1) // block_size
        predicted, found = min(outcome.overlap_blocks, reachable), min(cached_tokens, prompt_tokens)
        if booking.audited:
            self._metrics.audit(pool.model, predicted, cached_tokens // block_size)
            difference = pool.prediction_check.add(
                prompt_tokens=prompt_tokens, predicted_tokens=predicted * block_size, reported_tokens=found
            )
            if difference is not None:
                _warn_of(difference, booking)
        predicted_lower = None
        if "lower_blocks" in outcome:
            predicted_lower = tier_tokens(outcome.lower_blocks, block_size)
        if booking.audited and (predicted_lower is not None or lower_tokens is not None):
            self._metrics.audit_tiers(pool.model, predicted_lower, lower_tokens)
        pool.cache_hits.add(
            booking.placement.rank,
            prompt_tokens=prompt_tokens,
            cached_tokens=found,
            predicted_tokens=predicted * block_size if booking.audited else None,
            # What was found was there, whatever the index knew of it.
            reachable_tokens=max(found, min(booking.most_overlap_blocks, reachable) * block_size),
            lower_tokens=lower_tokens,
            predicted_lower_tokens=predicted_lower,
        )

    def _session_ended(self, change: SessionEnded) -> None:
        bookings = len(change.bookings)
        self._metrics.lost_bookings.inc(bookings)
        log.info("session.expired", session=change.session_id, client=change.client_name, bookings=bookings)


def _warn_of(difference: Difference, booking: Booking) -> None:
    """Logs a persistent difference between predictions and reports."""
    log.warning(
        "cache.predictions_differ",
        component_name=str(booking.component),
        model=booking.pool.model,
        requests=difference.requests,
        predicted_share=round(difference.predicted, 3),
        reported_share=round(difference.reported, 3),
        advice=difference.advice,
    )
