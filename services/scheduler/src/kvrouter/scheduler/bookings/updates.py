"""What becomes of bookings after the selection: progress, release, a change of owner, expiry."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from kvrouter.runtime.errors import BadRequest
from kvrouter.scheduler.bookings.conversions import book_replicated
from kvrouter.scheduler.bookings.leases import Ledger, Record
from kvrouter.scheduler.bookings.table import Place
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


class Bookings:
    """Changes live bookings. Nothing here waits, so that calls take effect in the order in which they come."""

    def __init__(self, ledger: Ledger, pools: Pools, metrics: SchedulerMetrics, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._pools = pools
        self._metrics = metrics
        self._clock = clock

    def mark_prefill_complete(self, request: MarkPrefillCompleteRequest) -> MarkPrefillCompleteResponse:
        """The prompt is computed."""
        record = self._find(request.booking)
        if record is not None:
            self._ledger.prefill_complete(record)
        return MarkPrefillCompleteResponse(known=record is not None)

    def report_output(self, request: ReportOutputRequest) -> ReportOutputResponse:
        """So many tokens are generated."""
        record = self._find(request.booking)
        if record is not None:
            self._ledger.generated(record, request.output_tokens)
        return ReportOutputResponse(known=record is not None)

    def free(self, request: FreeRequest) -> FreeResponse:
        """Releases a booking, and holds its prediction against what the worker says."""
        key = checked_key(request.booking)
        record = self._ledger.find(key, self._clock())
        if record is None:
            self._metrics.unknown_frees.inc()
        elif request.HasField("cached_tokens"):
            self._audit(record, request.cached_tokens)
        return FreeResponse(known=self._ledger.free(key) is not None)

    def reassert(self, request: ReassertBooking, session_id: str, token: int | None = None) -> BookingReasserted:
        """Takes a live booking over into an open session, whoever made it. A freed one stays freed.

        Raises:
            SessionLost: there is no such open session, or another stream than that of ``token`` holds it.
            UnknownComponent: its component is not registered.
            BadRequest: it makes no sense.
            TooLarge: there are as many bookings as may be.
        """
        key = checked_key(request.booking)
        self._ledger.check_open(session_id, token)
        now = self._clock()
        record = self._ledger.find(key, now)
        known = record is not None or self._ledger.was_freed(key)
        if record is not None:
            place = Place(rank_of(request), min(request.prefill_tokens, request.prompt_tokens))
            self._ledger.adopt(record, session_id, place)
        elif not known:
            record = self._book_again(key, request, session_id, now)
        if record is not None:
            if request.prefill_complete:
                self._ledger.prefill_complete(record)
            if request.output_tokens:
                self._ledger.generated(record, request.output_tokens)
        return BookingReasserted(known=known)

    def expire(self) -> None:
        """Releases what leases and graces no longer hold."""
        expired = self._ledger.expire(self._clock())
        for record in expired.leases:
            self._metrics.expired_leases.inc()
            log.warning("lease ran out", request_id=record.key[0], attempt=record.key[1], routed=str(record.component))
        for session in expired.sessions:
            self._metrics.lost_bookings.inc(session.bookings)
            log.info("session gone", session=session.session_id, client=session.client_name, bookings=session.bookings)

    def _find(self, booking: BookingKey) -> Record | None:
        return self._ledger.find(checked_key(booking), self._clock())

    def _audit(self, record: Record, cached_tokens: int) -> None:
        booking = record.slots.booking(record.key)
        if booking is None:
            return
        block_size = record.slots.block_size
        # The block of the last token is computed even where it is cached: the model needs its output.
        reachable = (booking.prompt_tokens - 1) // block_size
        predicted = min(record.outcome.overlap_blocks, reachable)
        if record.audited:
            self._metrics.audit(predicted, cached_tokens // block_size)
        pool = self._pools.get(record.component)
        if pool is not None:
            pool.hits.add(
                booking.rank,
                prompt_tokens=booking.prompt_tokens,
                cached_tokens=min(cached_tokens, booking.prompt_tokens),
                predicted_tokens=predicted * block_size if record.audited else None,
            )

    def _book_again(self, key: Key, request: ReassertBooking, session_id: str, now: float) -> Record | None:
        pool = self._pools.named(request.component.namespace, request.component.name)
        record = book_replicated(pool, key, request)
        if record is None:
            return None
        self._metrics.reasserted.inc()
        record.session_id = session_id
        self._ledger.add(record, now)
        return record
