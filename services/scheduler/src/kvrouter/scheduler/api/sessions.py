"""Sessions: streams that own bookings, and carry calls beside each other.

Selections run beside each other; what concerns bookings that exist takes effect in the order in which it comes. Every
call is answered once, under its own number; a call that is cancelled is answered as cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import grpc
import structlog
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import (
    BadRequest,
    DeadlineExceeded,
    Internal,
    KvRouterError,
    SessionLost,
    to_parts,
)
from kvrouter.scheduler.api.selection import Selector
from kvrouter.scheduler.bookings.leases import BookingLeases
from kvrouter.scheduler.bookings.updates import BookingUpdates, checked_key
from kvrouter.v1.scheduler_pb2 import (
    CallFailed,
    OpenSession,
    SessionHeartbeat,
    SessionOpened,
    SessionRequest,
    SessionResponse,
)

log = structlog.get_logger(component="scheduler")

_OPENING_SECONDS = 10.0
"""Time that a client has to open its session: one that never does would hold a call of the server for ever."""
_TICK_SECONDS = 1.0
_SILENT_TICKS = 10
"""Ticks without a message after which a client that sends heartbeats counts as gone: it sends several in each."""
_MAX_UNANSWERED = 16_384
"""Calls of one session whose answer is not read yet; further ones are not read before that."""
_MAX_ID_BYTES = 256
"""Longest session id: room for the names of a client and a component, 64 bytes each, and what a client adds."""

_Item = SessionResponse | KvRouterError | None


class Sessions:
    """Every session of this Scheduler."""

    def __init__(
        self,
        booking_leases: BookingLeases,
        bookings: BookingUpdates,
        selector: Selector,
        *,
        scheduler_id: str,
        grace_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.booking_leases = booking_leases
        self.bookings = bookings
        self.selector = selector
        self.scheduler_id = scheduler_id
        self.grace_seconds = grace_seconds
        self._clock = clock
        self._streams: dict[str, _Stream] = {}

    async def serve(
        self, requests: AsyncIterator[SessionRequest], deadline: Deadline
    ) -> AsyncGenerator[SessionResponse, None]:
        """Answers the calls of one stream. Its first message opens the session.

        A stream that opens a session which another one holds takes it over; the other one ends with SessionLost. The
        session's bookings that the client no longer lists are freed in the same step.

        Raises:
            BadRequest: the first message opens no session.
            DeadlineExceeded: no message came in time.
            SessionLost: another stream took the session over, or had opened it later than this one.
        """
        try:
            async with asyncio.timeout(_OPENING_SECONDS):
                first = await anext(requests, None)
        except TimeoutError:
            raise DeadlineExceeded("the stream opened no session in time") from None
        if first is None:
            return
        opening = _checked_opening(first)
        session_id = opening.session_id
        live = {checked_key(booking) for booking in opening.live.bookings} if opening.HasField("live") else None
        token = self.booking_leases.open_session(session_id, opening.client_name, opening.opening_number)
        freed = 0 if live is None else self.booking_leases.free_all_but(session_id, live)
        stream = _Stream(self, session_id, token, deadline)
        replaced, self._streams[session_id] = self._streams.get(session_id), stream
        if replaced is not None:
            replaced.outbox.put_nowait(SessionLost(session_id))
        log.info(
            "session.opened",
            session=session_id,
            client=opening.client_name,
            opening_number=opening.opening_number,
            took_over=replaced is not None,
            freed_bookings=freed,
        )
        reading = asyncio.create_task(stream.read(requests), name=f"session {session_id}")
        reading.add_done_callback(stream.has_read)
        watching = asyncio.create_task(stream.end_when_silent(), name=f"silence of {session_id}")
        try:
            opened = SessionOpened(grace_ms=round(self.grace_seconds * 1000), scheduler_id=self.scheduler_id)
            yield SessionResponse(call_id=first.call_id, opened=opened)
            while (item := await stream.outbox.get()) is not None:
                if isinstance(item, KvRouterError):
                    raise item.untraced()
                yield item
                stream.permits.release()
            await reading
        finally:
            reading.cancel()
            watching.cancel()
            try:
                await asyncio.wait([reading, watching])
            finally:
                # Also where a cancel comes on top of a broken write: a session that is not closed is never released.
                self.close(session_id, token)
                if self._streams.get(session_id) is stream:
                    del self._streams[session_id]
                    log.info("session.closed", session=session_id, client=opening.client_name)
                del reading  # A task keeps its exception, whose traceback keeps this frame.

    def close(self, session_id: str, token: int) -> None:
        """Closes a session that the stream of ``token`` holds: its bookings go after the grace."""
        self.booking_leases.close_session(session_id, token, self._clock())


class _Stream:
    """The calls of one stream."""

    def __init__(self, sessions: Sessions, session_id: str, token: int, deadline: Deadline) -> None:
        self._sessions = sessions
        self._session_id = session_id
        self._token = token
        self._deadline = deadline
        self._selections: dict[int, asyncio.Task[None]] = {}
        self._heard = False
        self._sends_heartbeats = False
        self.outbox: asyncio.Queue[_Item] = asyncio.Queue()
        """Answers to send; bounded by the permits, since each call has one answer."""
        self.permits = asyncio.Semaphore(_MAX_UNANSWERED)

    async def read(self, requests: AsyncIterator[SessionRequest]) -> None:
        """Takes calls until the client has no more, then waits for the selections under way.

        Raises:
            KvRouterError: a message cannot be parsed.
        """
        failure: KvRouterError | None = None
        async with asyncio.TaskGroup() as group:
            try:
                async for request in requests:
                    await self.permits.acquire()
                    self._take(request, group)
                    # The group keeps this task, whose exception keeps this frame.
                    del request
            except KvRouterError as error:
                failure = error.untraced()
                self._cancel_selections()
        if failure is not None:
            raise failure.untraced()

    def _cancel_selections(self) -> None:
        for selection in self._selections.values():
            selection.cancel()

    async def end_when_silent(self) -> None:
        """Closes the session of a client that sent heartbeats and stopped; its bookings go after the grace.

        A client that goes on opens its session again. Ticks of this loop are counted, not seconds, so that a Scheduler
        that was frozen itself does not take its clients for gone.
        """
        silent = 0
        while silent < _SILENT_TICKS:
            await asyncio.sleep(_TICK_SECONDS)
            silent = silent + 1 if self._sends_heartbeats and not self._heard else 0
            self._heard = False
        log.warning("session.silent", session=self._session_id, seconds=_SILENT_TICKS * _TICK_SECONDS)
        self._sessions.close(self._session_id, self._token)
        self.outbox.put_nowait(SessionLost(self._session_id))

    def has_read(self, reading: asyncio.Task[None]) -> None:
        """No call comes any more: what ended ``read`` is raised by whoever awaits it, if anybody does."""
        if not reading.cancelled():
            reading.exception()
        self.outbox.put_nowait(None)

    def _take(self, request: SessionRequest, group: asyncio.TaskGroup) -> None:
        call_id = request.call_id
        self._heard = True
        try:
            if request.WhichOneof("call") != "select":
                response = self._answer(request)
                if response is None:
                    self.permits.release()
                else:
                    self.outbox.put_nowait(response)
                return
            self._check_select(request)
        except Exception as error:
            self.outbox.put_nowait(_failed(call_id, error))
            return
        selection = group.create_task(self._select(request), name=f"select {call_id}")
        self._selections[call_id] = selection
        # The answer comes from here, so that a selection cancelled before it began is answered as well.
        selection.add_done_callback(lambda task: self._selected(call_id, task))

    def _check_select(self, request: SessionRequest) -> None:
        if not request.call_id or request.call_id in self._selections:
            raise BadRequest(
                f"call_id is {request.call_id}, "
                + ("which is under way" if request.call_id else "which names no call"),
                field="call_id",
                advice="Number the calls of a session from 1 on.",
            )
        if request.select.session_id not in ("", self._session_id):
            raise BadRequest(
                "the call names another session than its stream's",
                field="select.session_id",
                advice="Leave it empty in a session.",
            )

    def _selected(self, call_id: int, task: asyncio.Task[None]) -> None:
        del self._selections[call_id]
        if task.cancelled():
            code: int = grpc.StatusCode.CANCELLED.value[0]
            self.outbox.put_nowait(
                SessionResponse(call_id=call_id, failed=CallFailed(code=code, message="the call was cancelled"))
            )

    async def _select(self, request: SessionRequest) -> None:
        try:
            selected = await self._sessions.selector.select(
                request.select, session_id=self._session_id, session_token=self._token, deadline=self._deadline
            )
        except Exception as error:
            self.outbox.put_nowait(_failed(request.call_id, error))
        else:
            self.outbox.put_nowait(SessionResponse(call_id=request.call_id, select=selected))

    def _answer(self, request: SessionRequest) -> SessionResponse | None:
        """The answer to a call that needs no waiting; None for one that has no answer of its own.

        Raises:
            KvRouterError: the call is refused.
        """
        call_id = request.call_id
        bookings = self._sessions.bookings
        match request.WhichOneof("call"):
            case "mark_prefill_complete":
                marked = bookings.mark_prefill_complete(request.mark_prefill_complete)
                return SessionResponse(call_id=call_id, mark_prefill_complete=marked)
            case "report_output":
                reported = bookings.report_output(request.report_output)
                return SessionResponse(call_id=call_id, report_output=reported)
            case "free":
                return SessionResponse(call_id=call_id, free=bookings.free(request.free))
            case "reassert":
                taken = bookings.reassert(request.reassert, self._session_id, self._token)
                return SessionResponse(call_id=call_id, reasserted=taken)
            case "heartbeat":
                self._sends_heartbeats = True
                return SessionResponse(call_id=call_id, heartbeat=SessionHeartbeat())
            case "cancel":
                selection = self._selections.get(request.cancel.call_id)
                if selection is not None:
                    selection.cancel()
                return None
            case "open":
                raise BadRequest("the session is open already", field="open", advice="Open it once, first.")
            case _:
                raise BadRequest("the message holds no call", field="call", advice="Set one of the calls.")


def _checked_opening(first: SessionRequest) -> OpenSession:
    if first.WhichOneof("call") != "open":
        raise BadRequest("the first message opens no session", field="open", advice="Send open first.")
    size = len(first.open.session_id.encode())
    if not 1 <= size <= _MAX_ID_BYTES:
        raise BadRequest(
            f"the session id has {size} bytes",
            field="open.session_id",
            advice=f"Send 1 to {_MAX_ID_BYTES} bytes, unique among clients.",
        )
    return first.open


def _failed(call_id: int, error: Exception) -> SessionResponse:
    if not isinstance(error, KvRouterError):
        log.error("call.failed", call=call_id, exc_info=error)
        error = Internal("internal error", advice="The Scheduler's log has the cause.")
    code, message, info = to_parts(error)
    return SessionResponse(call_id=call_id, failed=CallFailed(code=code, message=message, info=info))
