"""Sessions own the bookings of a client, and receive numbered updates of them.

Updates take effect in the order of their numbers, each once. The acknowledgement is cumulative: an update that arrives
ahead of an earlier one is not applied, and the client sends it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

import structlog
from kvrouter.runtime.booking_updates import Free, OutputReport, PrefillComplete, Update, UpdateAnswer, UpdateCall
from kvrouter.runtime.contracts import Connection
from kvrouter.scheduler.bookings.ownership import SILENT_TICKS, BookingOwnership
from kvrouter.scheduler.bookings.updates import BookingUpdates
from kvrouter.scheduler.identifiers import checked_key
from kvrouter.v1 import scheduler_pb2 as pb
from kvrouter.v1.error_encoding import to_parts
from kvrouter.v1.errors import BadRequest, Internal, KvRouterError

log = structlog.get_logger(component="scheduler")

TICK_SECONDS = 1.0
"""Interval at which ``close_silent`` must be called, seconds."""
_MAX_ID_BYTES = 256
"""Longest session id: room for the names of a client and a component, 64 bytes each, and a suffix of the client."""
_MAX_NUMBER = 1 << 63
"""Upper bound of update numbers, exclusive."""


@dataclass(eq=False)
class Sessions:
    """Every session of this Scheduler. No call waits.

    ``clock`` returns the seconds of a monotonic clock.
    """

    booking_ownership: BookingOwnership
    bookings: BookingUpdates
    _: KW_ONLY
    scheduler_id: str
    grace_seconds: float
    clock: Callable[[], float]
    _connections: dict[str, Connection] = field(default_factory=dict, init=False)
    """Connections on which sessions were opened last."""
    _opened_on: dict[Connection, set[str]] = field(default_factory=dict, init=False)
    """The same by connection."""

    def open(self, request: pb.OpenSessionRequest, connection: Connection | None = None) -> pb.OpenSessionResponse:
        """Opens a session. In the same step it frees the session's bookings missing in the client's list.

        Args:
            request: The request.
            connection: Connection with whose loss the session is closed; None to close it for silence only.

        Raises:
            BadRequest: the id of the session, or of a booking, is empty or too long; or the first update has no number.
            SessionLost: a later opening came before.
        """
        session_id = _checked_id(request.session_id)
        first = request.first_update if "first_update" in request else 1
        _check_number("first_update", first)
        live = {checked_key(booking) for booking in request.live.bookings} if "live" in request else None
        session = self.booking_ownership.open_session(session_id, request.client_name, request.opening_number)
        session.acknowledged = max(session.acknowledged, first - 1)
        freed = 0 if live is None else self.booking_ownership.free_all_but(session_id, live)
        self._connect(session_id, connection)
        log.info(
            "session.opened",
            session=session_id,
            client=request.client_name,
            opening_number=request.opening_number,
            freed_bookings=freed,
        )
        return pb.OpenSessionResponse(
            grace_ms=round(self.grace_seconds * 1000), scheduler_id=self.scheduler_id, acknowledged=session.acknowledged
        )

    def update(self, call: UpdateCall) -> UpdateAnswer:
        """Applies the updates not applied before. A refused one leaves the others intact.

        Raises:
            BadRequest: the updates have no numbers.
            SessionLost: the session is not open, or was opened again since.
        """
        session_id = call.session_id
        session = self.booking_ownership.check_open(session_id, call.opening_number)
        refused: list[pb.RefusedUpdate] = []
        if call.updates:
            first, applied = call.first_number, session.acknowledged
            _check_number("first_number", first)
            if first <= applied + 1:
                for number, update in enumerate(call.updates, first):
                    if number > applied:
                        session.acknowledged = number
                        self._apply(number, update, session_id, refused)
        return UpdateAnswer(session.acknowledged, refused)

    def close(self, request: pb.CloseSessionRequest) -> pb.CloseSessionResponse:
        """Closes a session, unless it was opened again since."""
        was_open = self._close(request.session_id, "closed by its client", request.opening_number)
        return pb.CloseSessionResponse(was_open=was_open)

    def close_silent(self) -> None:
        """Closes sessions after some time without a call. A client still alive opens its session again."""
        for session_id in self.booking_ownership.tick():
            log.warning("session.silent", session=session_id, seconds=SILENT_TICKS * TICK_SECONDS)
            self._close(session_id, "silent")

    def _apply(self, number: int, update: Update | None, session_id: str, refused: list[pb.RefusedUpdate]) -> None:
        bookings = self.bookings
        try:
            if isinstance(update, OutputReport):
                bookings.report_output(update)
            elif isinstance(update, Free):
                bookings.free(update)
            elif isinstance(update, PrefillComplete):
                bookings.mark_prefill_complete(update)
            elif update is not None:
                bookings.reassert(update.message, session_id)
            else:
                raise BadRequest("the update is empty", field="updates", advice="Set one of its fields.")
        except KvRouterError as error:
            refused.append(_refused(number, error))
        except Exception:
            log.exception("booking.update_failed", session=session_id, number=number)
            refused.append(_refused(number, Internal("internal error", advice="See the Scheduler's log.")))

    def _connect(self, session_id: str, connection: Connection | None) -> None:
        """Records the connection on which a session was opened last."""
        self._disconnect(session_id)
        if connection is None:
            return
        self._connections[session_id] = connection
        opened = self._opened_on.get(connection)
        if opened is None:
            opened = self._opened_on[connection] = set()
            connection.on_lost(lambda: self._lost(connection))
        opened.add(session_id)

    def _disconnect(self, session_id: str) -> None:
        connection = self._connections.pop(session_id, None)
        if connection is not None:
            self._opened_on[connection].discard(session_id)

    def _lost(self, connection: Connection) -> None:
        for session_id in list(self._opened_on[connection]):
            self._close(session_id, "its connection was lost")
        del self._opened_on[connection]

    def _close(self, session_id: str, cause: str, opening_number: int = 0) -> bool:
        was_open = self.booking_ownership.close_session(session_id, self.clock(), opening_number)
        if was_open:
            self._disconnect(session_id)
            log.info("session.closed", session=session_id, cause=cause)
        return was_open


def _checked_id(session_id: str) -> str:
    size = len(session_id.encode())
    if not 1 <= size <= _MAX_ID_BYTES:
        raise BadRequest(
            f"the session id has {size} bytes",
            field="session_id",
            advice=f"Send 1 to {_MAX_ID_BYTES} bytes, unique among clients.",
        )
    return session_id


def _check_number(field: str, number: int) -> None:
    if not 1 <= number < _MAX_NUMBER:
        raise BadRequest(f"{field} is {number}", field=field, advice="Number the updates from 1 on.")


def _refused(number: int, error: KvRouterError) -> pb.RefusedUpdate:
    code, message, info = to_parts(error)
    return pb.RefusedUpdate(number=number, code=code, message=message, info=info)
