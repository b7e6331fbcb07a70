"""The gateway's line to the Scheduler of one component.

A link keeps one session open: selections and what becomes of bookings travel on it. When the Scheduler goes away, or
another one becomes the component's, the link opens a session there and tells it of the bookings that are live, so that
no load is lost and none is counted twice. Selections wait for that up to their deadline, and keep the time of their
arrival. What the new Scheduler cannot take yet, because it has not discovered the workers, it is told again until it
does; a selection that it cannot answer yet is asked again as well, while the component is young.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import grpc
import structlog
from kvrouter.frontend.bookings import Key, LiveBooking, key_of
from kvrouter.frontend.scheduler_source import SchedulerSource
from kvrouter.runtime.backoff import Backoff
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import (
    DeadlineExceeded,
    DependencyAway,
    KvRouterError,
    NotFound,
    NoWorkers,
    UnknownModel,
    from_parts,
)
from kvrouter.v1.common_pb2 import BookingKey
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import (
    CallFailed,
    CancelCall,
    FreeRequest,
    MarkPrefillCompleteRequest,
    OpenSession,
    ReportOutputRequest,
    SelectWorkerRequest,
    SelectWorkerResponse,
    SessionRequest,
    SessionResponse,
)
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

log = structlog.get_logger(component="frontend")

_QUEUE_LIMIT = 65_536
"""Messages that wait for the session's stream; with one more the session ends, and the next is told all that counts."""
_OPENING_SECONDS = 5.0
"""Time that a Scheduler has to open a session before another is tried: far above a round trip, far below a lease."""
_AVOIDED_SECONDS = 15.0
"""Time for which a Scheduler that opened no session is left alone: a dead one's lease has ended by then."""
_REASSERT_SECONDS = 0.1
"""Pause before what was refused is told or asked again: about what a Scheduler takes to discover a component."""
_LONGEST_REASSERT_SECONDS = 5.0
_REFUSALS_LOGGED = 5
"""Refusals in a row that are news: a Scheduler that has just started has not seen all workers yet."""
_YOUNG_SECONDS = 2.0
"""Age of a link up to which its Scheduler may not have discovered the component: many times what that takes."""


class _SessionEnded(Exception):
    """The session is over; the link opens another."""


class _NotOpened(Exception):
    """No session could be opened; worth another try after a pause."""


class SchedulerLink:
    """Books load at the Scheduler of one component. ``run`` must be running; the other methods are for its clients."""

    def __init__(
        self,
        component: ComponentName,
        source: SchedulerSource,
        *,
        session_id: str,
        client_name: str,
        shard: int = 0,
        on_spread_advised: Callable[[], None] = lambda: None,
    ) -> None:
        """``shard`` is the part of the component's requests; ``on_spread_advised`` hears that they are too many."""
        self._component = component
        self._shard = shard
        self._on_spread_advised = on_spread_advised
        self._young_until = time.monotonic() + _YOUNG_SECONDS
        self._source = source
        self._session_id = session_id
        self._client_name = client_name
        self._live: dict[Key, LiveBooking] = {}
        self._call_ids = itertools.count(1)
        self._outgoing: asyncio.Queue[SessionRequest] = asyncio.Queue(_QUEUE_LIMIT)
        self._overflowed = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[SessionResponse]] = {}
        self._frees: dict[int, FreeRequest] = {}
        self._open = asyncio.Event()
        self._asserting: dict[int, Key] = {}
        self._refused: set[Key] = set()
        self._unreachable: dict[str, float] = {}

    @property
    def ready(self) -> bool:
        """Whether a session is open."""
        return self._open.is_set()

    @property
    def live_bookings(self) -> int:
        """Bookings that are not freed."""
        return len(self._live)

    async def wait_ready(self) -> None:
        """Returns when a session is open."""
        await self._open.wait()

    async def select(self, request: SelectWorkerRequest, *, deadline: Deadline) -> SelectWorkerResponse:
        """Chooses a rank. A session that ends meanwhile does not fail the call: it is made again in the next one.

        Raises:
            KvRouterError: what the Scheduler answered.
            DependencyAway: no Scheduler was to be had before the deadline.
        """
        sent = False
        try:
            async with asyncio.timeout(deadline.remaining()):
                while True:
                    await self._open.wait()
                    sent = True
                    try:
                        selected = (await self._call(self._selecting(request, deadline))).select
                    except _SessionEnded:
                        continue
                    except (NotFound, UnknownModel, NoWorkers):
                        if time.monotonic() >= self._young_until:
                            raise
                        await asyncio.sleep(_REASSERT_SECONDS)
                        continue
                    if selected.spread_advised:
                        self._on_spread_advised()
                    return selected
        except asyncio.CancelledError:
            if sent:
                self._release(request.booking)
            raise
        except TimeoutError:
            if sent:
                self._release(request.booking)
            if self.ready:
                raise DeadlineExceeded("the Scheduler did not answer before the deadline") from None
            raise DependencyAway(f"no Scheduler of {self._component} is live") from None

    def _selecting(self, request: SelectWorkerRequest, deadline: Deadline) -> SessionRequest:
        remaining = deadline.remaining()
        select = SelectWorkerRequest(
            request=request.request,
            booking=request.booking,
            session_id=self._session_id,
            arrived_unix_ns=request.arrived_unix_ns,
            time_left_ms=0 if remaining is None else max(1, int(remaining * 1e3)),
        )
        return SessionRequest(select=select)

    def keep(self, booking: LiveBooking) -> None:
        """Remembers a booking until it is freed, to re-assert it at another Scheduler."""
        self._live[key_of(booking.key)] = booking

    def prefill_complete(self, booking: LiveBooking) -> None:
        """Tells that the prompt is computed. Returns at once."""
        booking.prefill_complete = True
        self._tell(SessionRequest(mark_prefill_complete=MarkPrefillCompleteRequest(booking=booking.key)))

    def report_output(self, booking: LiveBooking, output_tokens: int) -> None:
        """Tells how many tokens were generated, where that fills another block. Returns at once."""
        fills = booking.fills_block(output_tokens)
        booking.output_tokens = output_tokens
        if fills:
            self._tell(
                SessionRequest(report_output=ReportOutputRequest(booking=booking.key, output_tokens=output_tokens))
            )

    def free(self, booking: LiveBooking, cached_tokens: int | None) -> None:
        """Releases a booking. Returns at once, and works in a handler that is being cancelled."""
        self._live.pop(key_of(booking.key), None)
        self._release(booking.key, cached_tokens)

    def _release(self, key: BookingKey, cached_tokens: int | None = None) -> None:
        call_id = next(self._call_ids)
        self._frees[call_id] = FreeRequest(booking=key, cached_tokens=cached_tokens)
        if self._open.is_set():
            self._put(SessionRequest(call_id=call_id, free=self._frees[call_id]))

    async def run(self) -> None:
        """Keeps a session open, until cancelled."""
        while True:
            async for attempt in AsyncRetrying(
                wait=wait_random_exponential(multiplier=0.05, max=2), retry=retry_if_exception_type(_NotOpened)
            ):
                with attempt:
                    await self._next_session()

    async def _next_session(self) -> None:
        while (picked := self._pick()) is None:
            await self._other_pick()
        if not await self._hold_session(*picked):
            # A registration outlives its Scheduler by a lease; requests should not wait for that where another is live.
            self._unreachable[picked[0]] = time.monotonic() + _AVOIDED_SECONDS
            raise _NotOpened

    def _pick(self) -> tuple[str, Scheduler] | None:
        now, live = time.monotonic(), self._source.is_live
        self._unreachable = {each: until for each, until in self._unreachable.items() if now < until and live(each)}
        return self._source.pick(self._component, self._unreachable, self._shard)

    async def _other_pick(self) -> None:
        """Returns when ``_pick`` may give another answer."""
        try:
            async with asyncio.timeout(_AVOIDED_SECONDS if self._unreachable else None):
                await self._source.changed()
        except TimeoutError:
            return

    async def _hold_session(self, scheduler_id: str, scheduler: Scheduler) -> bool:
        """Opens a session and stays in it until it ends, or another Scheduler is the component's.

        Returns whether it was open.
        """
        opened = False
        self._outgoing, self._overflowed = asyncio.Queue(_QUEUE_LIMIT), asyncio.Event()
        self._outgoing.put_nowait(
            SessionRequest(
                call_id=next(self._call_ids),
                open=OpenSession(session_id=self._session_id, client_name=self._client_name),
            )
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._end_when_moved(scheduler_id))
                group.create_task(self._end_unless_opened())
                group.create_task(self._end_when_overflowed())
                group.create_task(self._assert_refused())
                async with aclosing(scheduler.session(self._requests(), deadline=Deadline.never())) as responses:
                    async for response in responses:
                        if response.HasField("opened"):
                            opened = True
                            self._assert_all()
                            self._open.set()
                            log.info("session opened", scheduler=scheduler_id, routed=str(self._component))
                        self._resolve(response)
                raise _SessionEnded
        except* (_SessionEnded, KvRouterError) as group_error:
            causes = "; ".join(str(error) for error in group_error.exceptions if str(error))
            log.warning("session ended", scheduler=scheduler_id, routed=str(self._component), cause=causes)
        finally:
            self._open.clear()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(_SessionEnded())
            self._waiting.clear()
            self._asserting.clear()
            self._refused.clear()
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # A cancel that comes while the group ends by an error of its own is lost in the group.
            raise asyncio.CancelledError
        return opened

    def _assert_all(self) -> None:
        """Tells of every booking, and of every free that no Scheduler has confirmed.

        In the step that opens the session: what changes before is told here, what changes later by a call of its own.
        """
        for key in self._live:
            self._assert(key)
        for call_id, free in self._frees.items():
            self._put(SessionRequest(call_id=call_id, free=free))

    def _assert(self, key: Key) -> None:
        call_id = next(self._call_ids)
        self._asserting[call_id] = key
        self._put(SessionRequest(call_id=call_id, reassert=self._live[key].to_reassert()))

    async def _assert_refused(self) -> None:
        backoff = Backoff(_REASSERT_SECONDS, _LONGEST_REASSERT_SECONDS)
        pause = _REASSERT_SECONDS
        while True:
            await asyncio.sleep(pause)
            refused, self._refused = self._refused, set()
            pause = _REASSERT_SECONDS
            if live := refused & self._live.keys():
                pause = backoff.failed()
                if backoff.failures == _REFUSALS_LOGGED:
                    log.warning("bookings refused by the Scheduler", routed=str(self._component), bookings=len(live))
            elif not self._asserting and (failures := backoff.succeeded()) >= _REFUSALS_LOGGED:
                log.info("bookings accepted again", routed=str(self._component), refusals=failures)
            for key in live:
                self._assert(key)

    async def _end_unless_opened(self) -> None:
        try:
            async with asyncio.timeout(_OPENING_SECONDS):
                await self._open.wait()
        except TimeoutError:
            raise _SessionEnded("no session was opened in time") from None

    async def _end_when_overflowed(self) -> None:
        await self._overflowed.wait()
        raise _SessionEnded(f"the Scheduler has left {_QUEUE_LIMIT} messages unread")

    async def _end_when_moved(self, scheduler_id: str) -> None:
        while True:
            await self._other_pick()
            picked = self._pick()
            if picked is not None and picked[0] != scheduler_id:
                raise _SessionEnded(f"{picked[0]} is the component's Scheduler")

    async def _requests(self) -> AsyncGenerator[SessionRequest, None]:
        queue = self._outgoing
        while True:
            yield await queue.get()

    async def _call(self, request: SessionRequest) -> SessionResponse:
        request.call_id = next(self._call_ids)
        future: asyncio.Future[SessionResponse] = asyncio.get_running_loop().create_future()
        self._waiting[request.call_id] = future
        try:
            self._put(request)
            response = await future
        except asyncio.CancelledError:
            self._tell(SessionRequest(cancel=CancelCall(call_id=request.call_id)))
            raise
        finally:
            self._waiting.pop(request.call_id, None)
            del future  # It keeps its exception, whose traceback keeps this frame and the request.
        if response.HasField("failed"):
            raise from_parts(response.failed.code, response.failed.message, response.failed.info)
        return response

    def _tell(self, request: SessionRequest) -> None:
        if self._open.is_set():
            request.call_id = next(self._call_ids)
            self._put(request)

    def _put(self, request: SessionRequest) -> None:
        try:
            self._outgoing.put_nowait(request)
        except asyncio.QueueFull:
            # Nothing is lost: what waits for an answer is asked again, what is live or freed is told again.
            self._overflowed.set()

    def _resolve(self, response: SessionResponse) -> None:
        self._frees.pop(response.call_id, None)
        asserted = self._asserting.pop(response.call_id, None)
        if asserted is not None and response.HasField("failed"):
            self._note_refusal(asserted, response.failed)
        future = self._waiting.get(response.call_id)
        if future is not None and not future.done():
            future.set_result(response)

    def _note_refusal(self, key: Key, failed: CallFailed) -> None:
        if failed.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]:
            # It would be refused for ever. Its load is unseen until it ends.
            log.error("booking refused", request_id=key[0], routed=str(self._component), cause=failed.message)
            return
        self._refused.add(key)
