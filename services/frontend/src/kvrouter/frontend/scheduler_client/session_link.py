"""The Frontend's connection to the Scheduler of one component.

A link keeps one session open, on which selections and the progress of bookings travel. When the Scheduler goes away or
stops answering heartbeats, or when another one becomes the component's, the link opens the session at another Scheduler
and re-asserts its bookings (``kvrouter.frontend.scheduler_client.session_bookings``). Selections wait for that up to
their deadline and keep their arrival time. A call to a Scheduler that has not discovered the workers yet is repeated
until it has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing

import structlog
from kvrouter.frontend.scheduler_client.live_bookings import LiveBooking
from kvrouter.frontend.scheduler_client.scheduler_choice import SchedulerChoice
from kvrouter.frontend.scheduler_client.session_bookings import SessionBookings
from kvrouter.frontend.scheduler_client.source import SchedulerSource
from kvrouter.net.calls.heartbeat_monitor import MISSES, HeartbeatMonitor
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
    CancelCall,
    SelectWorkerRequest,
    SelectWorkerResponse,
    SessionHeartbeat,
    SessionRequest,
    SessionResponse,
)
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

log = structlog.get_logger(component="frontend")

_QUEUE_LIMIT = 65_536
"""Messages that may wait for the session's stream. One more ends the session; the next one re-asserts all bookings."""
HEARTBEAT_TIMEOUT_SECONDS = 2.0
"""Silence after which a Scheduler is replaced by another: far above a round trip, far below a lease."""
_REASSERT_SECONDS = 0.1
"""Pause before a refused call is repeated: about as long as a Scheduler takes to discover a component."""
_LONGEST_REASSERT_SECONDS = 5.0
_REFUSALS_LOGGED = 5
"""Consecutive refusals before they are logged, since a Scheduler that has just started may lack some workers."""
_YOUNG_SECONDS = 2.0
"""Age of a link up to which its Scheduler may not have discovered the component: many times what discovery takes."""


class _SessionEnded(Exception):
    """The session has ended; the link opens another."""


class _NotOpened(Exception):
    """No session could be opened; the link tries again after a pause."""


class SchedulerLink:
    """Books load at the Scheduler of one component. ``run`` must be running."""

    def __init__(
        self,
        component: ComponentName,
        source: SchedulerSource,
        *,
        session_id: str,
        client_name: str,
        shard: int = 0,
        heartbeat_timeout_seconds: float = HEARTBEAT_TIMEOUT_SECONDS,
        on_sharding_advised: Callable[[], None] = lambda: None,
    ) -> None:
        """Connects nothing yet.

        Args:
            component: The component.
            source: Finds the component's Schedulers.
            session_id: Id of the session, unique to this link over all restarts of its process.
            client_name: Name of the Frontend, for logs.
            shard: Shard of the component; 0 if it is not sharded.
            heartbeat_timeout_seconds: Silence after which a Scheduler is replaced by another, in seconds.
            on_sharding_advised: Called when a Scheduler reports overload.
        """
        self._component = component
        self._on_sharding_advised = on_sharding_advised
        self._young_until = time.monotonic() + _YOUNG_SECONDS
        self._choice = SchedulerChoice(component, source, shard)
        self._session_id = session_id
        self._heartbeat_timeout = heartbeat_timeout_seconds
        self._bookings = SessionBookings(session_id, client_name)
        self._monitor = HeartbeatMonitor()
        self._outgoing: asyncio.Queue[SessionRequest] = asyncio.Queue(_QUEUE_LIMIT)
        self._overflowed = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[SessionResponse]] = {}
        self._open = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether a session is open."""
        return self._open.is_set()

    @property
    def live_bookings(self) -> int:
        """Number of bookings not yet freed."""
        return len(self._bookings)

    @property
    def avoided(self) -> Collection[str]:
        """Ids of the Schedulers that recently did not answer."""
        return self._choice.avoided

    async def wait_ready(self) -> None:
        """Returns when a session is open."""
        await self._open.wait()

    async def select(self, request: SelectWorkerRequest, *, deadline: Deadline) -> SelectWorkerResponse:
        """Chooses a rank. If the session ends meanwhile, the call is repeated in the next session.

        Raises:
            KvRouterError: the error that the Scheduler returned.
            DependencyAway: no Scheduler was available before the deadline, or the only one answers no heartbeat.
            DeadlineExceeded: the Scheduler answers heartbeats, but did not decide before the deadline.
        """
        sent = False
        self._bookings.select(request.booking)
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
                    if selected.sharding_advised:
                        self._on_sharding_advised()
                    return selected
        except asyncio.CancelledError:
            if sent:
                self._release(request.booking)
            raise
        except TimeoutError:
            if sent:
                self._release(request.booking)
            raise self._unanswered() from None
        finally:
            self._bookings.selected(request.booking)

    def _unanswered(self) -> KvRouterError:
        if self._monitor.silent:
            return DependencyAway(
                f"the only Scheduler of {self._component} has answered nothing for {self._heartbeat_timeout:g} s"
            )
        if not self.ready:
            return DependencyAway(f"no session with a Scheduler of {self._component} is open: check that one is ready")
        return DeadlineExceeded("the Scheduler chose no worker before the deadline")

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
        """Stores a booking until it is freed, to re-assert it at another Scheduler."""
        self._bookings.keep(booking)

    def prefill_complete(self, booking: LiveBooking) -> None:
        """Reports that the prompt is computed. Does not wait."""
        self._put_if_open(self._bookings.prefill_complete(booking))

    def report_output(self, booking: LiveBooking, output_tokens: int) -> None:
        """Reports the number of output tokens if the request needs a further block. Does not wait."""
        report = self._bookings.report_output(booking, output_tokens)
        if report is not None:
            self._put_if_open(report)

    def free(self, booking: LiveBooking, cached_tokens: int | None) -> None:
        """Frees a booking. Does not wait, so that a handler that is being cancelled can call it."""
        self._release(booking.key, cached_tokens)

    def _release(self, key: BookingKey, cached_tokens: int | None = None) -> None:
        self._put_if_open(self._bookings.free(key, cached_tokens))

    async def run(self) -> None:
        """Keeps a session open until cancelled."""
        while True:
            async for attempt in AsyncRetrying(
                wait=wait_random_exponential(multiplier=0.05, max=2), retry=retry_if_exception_type(_NotOpened)
            ):
                with attempt:
                    await self._next_session()

    async def _next_session(self) -> None:
        while (picked := self._choice.pick()) is None:
            await self._choice.changed()
        if not await self._keep_session(*picked):
            # A dead Scheduler stays registered until its lease expires; requests must not wait for that.
            self._choice.avoid(picked[0])
            raise _NotOpened

    async def _keep_session(self, scheduler_id: str, scheduler: Scheduler) -> bool:
        """Opens a session and keeps it until it ends or another Scheduler becomes the component's.

        Returns whether it was opened.
        """
        opened = False
        self._outgoing, self._overflowed = asyncio.Queue(_QUEUE_LIMIT), asyncio.Event()
        self._outgoing.put_nowait(self._bookings.opening())
        self._monitor = HeartbeatMonitor()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._end_when_moved(scheduler_id))
                group.create_task(self._end_when_silent(scheduler_id))
                group.create_task(self._end_when_overflowed())
                group.create_task(self._assert_refused())
                async with aclosing(scheduler.session(self._requests(), deadline=Deadline.never())) as responses:
                    async for response in responses:
                        self._monitor.heard()
                        if response.HasField("opened"):
                            opened = True
                            # Without an await: earlier changes are in these messages, later ones are sent as they come.
                            for request in self._bookings.opened():
                                self._put(request)
                            self._open.set()
                            log.info("session.opened", scheduler=scheduler_id, component_name=str(self._component))
                        self._resolve(response)
                raise _SessionEnded
        except* (_SessionEnded, KvRouterError) as group_error:
            causes = "; ".join(str(error) for error in group_error.exceptions if str(error))
            log.warning("session.ended", scheduler=scheduler_id, component_name=str(self._component), cause=causes)
        finally:
            self._open.clear()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(_SessionEnded())
            self._waiting.clear()
            self._monitor = HeartbeatMonitor()
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # A cancellation that arrives while the group ends by its own error is lost in the group.
            raise asyncio.CancelledError
        return opened

    async def _assert_refused(self) -> None:
        backoff = Backoff(_REASSERT_SECONDS, _LONGEST_REASSERT_SECONDS)
        pause = _REASSERT_SECONDS
        while True:
            await asyncio.sleep(pause)
            refused = list(self._bookings.refused())
            pause = _REASSERT_SECONDS
            if refused:
                pause = backoff.failed()
                if backoff.failures == _REFUSALS_LOGGED:
                    log.warning("bookings.refused", component_name=str(self._component), bookings=len(refused))
            elif not self._bookings.asserting and (failures := backoff.succeeded()) >= _REFUSALS_LOGGED:
                log.info("bookings.accepted", component_name=str(self._component), refusals=failures)
            for request in refused:
                self._put(request)

    async def _end_when_silent(self, scheduler_id: str) -> None:
        """Sends heartbeats. Leaves a Scheduler that sends nothing, not even the opening, if there is another."""
        while True:
            await asyncio.sleep(self._heartbeat_timeout / MISSES)
            self._monitor.tick()
            if self._monitor.silent and self._choice.instead_of(scheduler_id) is not None:
                self._choice.avoid(scheduler_id)
                raise _SessionEnded(f"no answer for {self._heartbeat_timeout:g} s")
            self._put_if_open(self._bookings.numbered(SessionRequest(heartbeat=SessionHeartbeat())))

    async def _end_when_overflowed(self) -> None:
        await self._overflowed.wait()
        raise _SessionEnded(f"the Scheduler has not read {_QUEUE_LIMIT} messages")

    async def _end_when_moved(self, scheduler_id: str) -> None:
        """Ends the session when another Scheduler becomes the component's and answers."""
        while True:
            better = self._choice.better_than(scheduler_id)
            if better is None:
                await self._choice.changed()
            elif await self._choice.answers(*better, self._heartbeat_timeout):
                raise _SessionEnded(f"{better[0]} is now the component's Scheduler")

    async def _requests(self) -> AsyncGenerator[SessionRequest, None]:
        queue = self._outgoing
        while True:
            yield await queue.get()

    async def _call(self, request: SessionRequest) -> SessionResponse:
        self._bookings.numbered(request)
        future: asyncio.Future[SessionResponse] = asyncio.get_running_loop().create_future()
        self._waiting[request.call_id] = future
        try:
            self._put(request)
            response = await future
        except asyncio.CancelledError:
            cancel = SessionRequest(cancel=CancelCall(call_id=request.call_id))
            self._put_if_open(self._bookings.numbered(cancel))
            raise
        finally:
            self._waiting.pop(request.call_id, None)
            del future  # Its exception's traceback refers to this frame, and so to the request.
        if response.HasField("failed"):
            raise from_parts(response.failed.code, response.failed.message, response.failed.info)
        return response

    def _put_if_open(self, request: SessionRequest) -> None:
        if self._open.is_set():
            self._put(request)

    def _put(self, request: SessionRequest) -> None:
        try:
            self._outgoing.put_nowait(request)
        except asyncio.QueueFull:
            # Nothing is lost: the next session repeats open calls, re-asserts live bookings and repeats frees.
            self._overflowed.set()

    def _resolve(self, response: SessionResponse) -> None:
        self._bookings.answered(response)
        future = self._waiting.get(response.call_id)
        if future is not None and not future.done():
            future.set_result(response)
