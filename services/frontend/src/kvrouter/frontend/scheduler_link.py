"""The gateway's line to the Scheduler of one component.

A link keeps one session open: selections and what becomes of bookings travel on it. When the Scheduler goes away, or
another one becomes the component's, the link opens a session there and tells it of the bookings that are live, so that
no load is lost and none is counted twice. Selections wait for that up to their deadline.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import structlog
from kvrouter.frontend.bookings import Key, LiveBooking, key_of
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import DeadlineExceeded, DependencyAway, KvRouterError, from_parts
from kvrouter.v1.common_pb2 import BookingKey
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import (
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
"""Messages that wait for the session's stream; a Scheduler that leaves so many unread counts as gone."""


class SchedulerSource(Protocol):
    """Where the Scheduler of a component is to be had."""

    def pick(self, component: ComponentName) -> tuple[str, Scheduler] | None:
        """The id of the component's Scheduler, and the object or stub; None where none is live."""
        ...

    async def changed(self) -> None:
        """Returns when ``pick`` may give another answer."""
        ...


class _SessionEnded(Exception):
    """The session is over; the link opens another."""


class _NotOpened(Exception):
    """No session could be opened; worth another try after a pause."""


class SchedulerLink:
    """Books load at the Scheduler of one component. ``run`` must be running; the other methods are for its clients."""

    def __init__(self, component: ComponentName, source: SchedulerSource, *, session_id: str, client_name: str) -> None:
        self._component = component
        self._source = source
        self._session_id = session_id
        self._client_name = client_name
        self._live: dict[Key, LiveBooking] = {}
        self._call_ids = itertools.count(1)
        self._outgoing: asyncio.Queue[SessionRequest] = asyncio.Queue(_QUEUE_LIMIT)
        self._waiting: dict[int, asyncio.Future[SessionResponse]] = {}
        self._frees: dict[int, FreeRequest] = {}
        self._open = asyncio.Event()

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
        request = SelectWorkerRequest(request=request.request, booking=request.booking, session_id=self._session_id)
        try:
            async with asyncio.timeout(deadline.remaining()):
                while True:
                    await self._open.wait()
                    try:
                        return (await self._call(SessionRequest(select=request))).select
                    except _SessionEnded:
                        continue
        except asyncio.CancelledError:
            self._release(request.booking)
            raise
        except TimeoutError:
            self._release(request.booking)
            if self.ready:
                raise DeadlineExceeded("the Scheduler did not answer before the deadline") from None
            raise DependencyAway(f"no Scheduler of {self._component} is live") from None

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
        while (picked := self._source.pick(self._component)) is None:
            await self._source.changed()
        if not await self._hold_session(*picked):
            raise _NotOpened

    async def _hold_session(self, scheduler_id: str, scheduler: Scheduler) -> bool:
        """Opens a session and stays in it until it ends, or another Scheduler is the component's.

        Returns whether it was open.
        """
        opened = False
        self._outgoing = asyncio.Queue(_QUEUE_LIMIT)
        self._outgoing.put_nowait(
            SessionRequest(
                call_id=next(self._call_ids),
                open=OpenSession(session_id=self._session_id, client_name=self._client_name),
            )
        )
        for booking in self._live.values():
            self._outgoing.put_nowait(SessionRequest(call_id=next(self._call_ids), reassert=booking.to_reassert()))
        for call_id, free in self._frees.items():
            self._outgoing.put_nowait(SessionRequest(call_id=call_id, free=free))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._end_when_moved(scheduler_id))
                async with aclosing(scheduler.session(self._requests(), deadline=Deadline.never())) as responses:
                    async for response in responses:
                        if response.HasField("opened"):
                            opened = True
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
        return opened

    async def _end_when_moved(self, scheduler_id: str) -> None:
        while True:
            await self._source.changed()
            picked = self._source.pick(self._component)
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
            raise DependencyAway(f"the Scheduler of {self._component} reads too slowly") from None

    def _resolve(self, response: SessionResponse) -> None:
        self._frees.pop(response.call_id, None)
        future = self._waiting.get(response.call_id)
        if future is not None and not future.done():
            future.set_result(response)
