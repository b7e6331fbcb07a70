"""What becomes of bookings after the selection: progress, release, a change of owner, expiry."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from kvrouter.runtime.errors import BadRequest
from kvrouter.scheduler.bookings.conversions import book_replicated
from kvrouter.scheduler.bookings.leases import Booking, BookingLeases
from kvrouter.scheduler.bookings.table import Placement
from kvrouter.scheduler.identifiers import Key, key_of, rank_of
from kvrouter.scheduler.load.pools import Pools
from kvrouter.scheduler.metrics import SchedulerMetrics
from kvrouter.v1.common_pb2 import BookingKey, Stage
from kvrouter.v1.scheduler_pb2 import (
    BookingReasserted,
    FreeRequest,
    FreeResponse,
    MarkPrefillCompleteRequest,
    MarkPrefillCompleteResponse,
    ReassertBooking,
    ReportOutputRequest,
    ReportOutputResponse,
)

log = structlog.get_logger(component="scheduler")

MAX_REQUEST_ID_BYTES = 128
_STAGES = frozenset(Stage.values())


def checked_key(booking: BookingKey) -> Key:
    """The key of a booking.

    Raises:
        BadRequest: the request id is empty or too long, or there is no such stage.
    """
    size = len(booking.request_id.encode())
    if not 1 <= size <= MAX_REQUEST_ID_BYTES:
        raise BadRequest(
            f"the request id has {size} bytes",
            field="booking.request_id",
            advice=f"Send 1 to {MAX_REQUEST_ID_BYTES} bytes.",
        )
    if booking.stage not in _STAGES:
        raise BadRequest(
            f"there is no stage {booking.stage}", field="booking.stage", advice="Send one of those in the contract."
        )
    return key_of(booking)


class BookingUpdates:
    """Changes live bookings. Nothing here waits, so that calls take effect in the order in which they come."""

    def __init__(
        self, booking_leases: BookingLeases, pools: Pools, metrics: SchedulerMetrics, clock: Callable[[], float]
    ) -> None:
        self._booking_leases = booking_leases
        self._pools = pools
        self._metrics = metrics
        self._clock = clock

    def mark_prefill_complete(self, request: MarkPrefillCompleteRequest) -> MarkPrefillCompleteResponse:
        """The prompt is computed."""
        booking = self._find(request.booking)
        if booking is not None:
            self._booking_leases.prefill_complete(booking)
        return MarkPrefillCompleteResponse(known=booking is not None)

    def report_output(self, request: ReportOutputRequest) -> ReportOutputResponse:
        """So many tokens are generated."""
        booking = self._find(request.booking)
        if booking is not None:
            self._booking_leases.generated(booking, request.output_tokens)
        return ReportOutputResponse(known=booking is not None)

    def free(self, request: FreeRequest) -> FreeResponse:
        """Releases a booking, and holds its prediction against what the worker says."""
        key = checked_key(request.booking)
        booking = self._booking_leases.find(key, self._clock())
        if booking is None:
            self._metrics.unknown_frees.inc()
        elif request.HasField("cached_tokens"):
            self._audit(booking, request.cached_tokens)
        return FreeResponse(known=self._booking_leases.free(key) is not None)

    def reassert(self, request: ReassertBooking, session_id: str, token: int | None = None) -> BookingReasserted:
        """Takes a live booking over into an open session, whoever made it. A freed one stays freed.

        Raises:
            SessionLost: there is no such open session, or another stream than that of ``token`` holds it.
            UnknownComponent: its component is not registered.
            BadRequest: it makes no sense.
            TooLarge: there are as many bookings as may be.
        """
        key = checked_key(request.booking)
        self._booking_leases.check_open(session_id, token)
        now = self._clock()
        booking = self._booking_leases.find(key, now)
        known = booking is not None or self._booking_leases.was_freed(key)
        if booking is not None:
            place = Placement(rank_of(request), min(request.prefill_tokens, request.prompt_tokens))
            self._booking_leases.adopt(booking, session_id, place)
        elif not known:
            booking = self._book_again(key, request, session_id, now)
        if booking is not None:
            if request.prefill_complete:
                self._booking_leases.prefill_complete(booking)
            if request.output_tokens:
                self._booking_leases.generated(booking, request.output_tokens)
        return BookingReasserted(known=known)

    def expire(self) -> None:
        """Releases what leases and graces no longer hold."""
        expired = self._booking_leases.expire(self._clock())
        for booking in expired.leases:
            self._metrics.expired_leases.inc()
            log.warning(
                "booking.lease_expired",
                request_id=booking.key[0],
                attempt=booking.key[1],
                component_name=str(booking.component),
            )
        for session in expired.sessions:
            self._metrics.lost_bookings.inc(session.bookings)
            log.info(
                "session.expired", session=session.session_id, client=session.client_name, bookings=session.bookings
            )

    def _find(self, key: BookingKey) -> Booking | None:
        return self._booking_leases.find(checked_key(key), self._clock())

    def _audit(self, booking: Booking, cached_tokens: int) -> None:
        counted = booking.booked_load.booking(booking.key)
        if counted is None:
            return
        block_size = booking.booked_load.block_size
        # The block of the last token is computed even where it is cached: the model needs its output.
        reachable = (counted.prompt_tokens - 1) // block_size
        predicted = min(booking.outcome.overlap_blocks, reachable)
        if booking.audited:
            self._metrics.audit(predicted, cached_tokens // block_size)
        pool = self._pools.get(booking.component)
        if pool is not None:
            pool.cache_hits.add(
                counted.rank,
                prompt_tokens=counted.prompt_tokens,
                cached_tokens=min(cached_tokens, counted.prompt_tokens),
                predicted_tokens=predicted * block_size if booking.audited else None,
            )

    def _book_again(self, key: Key, request: ReassertBooking, session_id: str, now: float) -> Booking | None:
        pool = self._pools.named(request.component.namespace, request.component.name)
        booking = book_replicated(pool, key, request)
        if booking is None:
            return None
        self._metrics.reasserted.inc()
        booking.session_id = session_id
        self._booking_leases.add(booking, now)
        return booking
