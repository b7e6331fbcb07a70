"""Keeps a session with the Scheduler of one component, whichever Scheduler that is.

A link keeps one session open. Selections are calls naming it; the progress of bookings travels in numbered updates
(``kvrouter.frontend.schedulers.booking_updates``): those of one step of the event loop are sent together at its end,
further ones together when these are acknowledged, or ahead of the next selection, so that a selection never overtakes
an earlier free. Reports of output, the most frequent updates, change a load by one block, so they wait for the next
other update, selection or heartbeat. When the Scheduler goes away or stops answering heartbeats, or when another
one becomes the component's, the link opens the session at another Scheduler. Selections wait for that up to their
deadline and keep their arrival time. A call to a Scheduler that has not discovered the workers yet is repeated until it
has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from typing import Any

import structlog
from kvrouter.frontend.schedulers.booking_updates import MAX_UPDATES, BookingUpdates, LiveBooking
from kvrouter.frontend.schedulers.scheduler_choice import SchedulerChoice, SchedulerSource
from kvrouter.frontend.schedulers.scheduler_connection import SchedulerConnection
from kvrouter.frontend.schedulers.session import SelectionUnanswered, Session
from kvrouter.net import trace_context
from kvrouter.net.backoff import Backoff
from kvrouter.net.calls.limits import MISSES, HeartbeatMonitor
from kvrouter.runtime.booking_updates import Free, UpdateAnswer, UpdateCall, key_of
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.tracing import client_call
from kvrouter.v1 import scheduler_pb2 as pb
from kvrouter.v1.common_pb2 import BookingKey, LowerTiers
from kvrouter.v1.errors import (
    DeadlineExceeded,
    DependencyAway,
    Draining,
    KvRouterError,
    NotFound,
    NoWorkers,
    SessionLost,
    UnknownModel,
)
from kvrouter.v1.names import ComponentName
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

log = structlog.get_logger(component="frontend")

HEARTBEAT_TIMEOUT_SECONDS = 0.7
"""Silence after which a Scheduler is replaced by another. Heartbeats are sent four times as often, so one that answers
within 0.5 s is never replaced, and one that stops is within 0.9 s."""
ANSWER_SECONDS = 2.0
"""Time for the answer to a call that several Schedulers get."""
_REASSERT_SECONDS = 0.1
"""Pause before refused bookings are asserted again: about as long as a Scheduler takes to discover a component."""
_LONGEST_REASSERT_SECONDS = 5.0
_RESELECT_SECONDS = 0.1
"""Pause before a selection is repeated at a Scheduler that may not have discovered the component yet."""
_REFUSALS_LOGGED = 5
"""Consecutive refusals before they are logged, since a Scheduler that has just started may lack some workers."""
_FAILOVER_SECONDS = 2.0
"""Time without a session in which a link stays ready: selections wait, and the next session opens within milliseconds
if there is another Scheduler."""
_YOUNG_SECONDS = 2.0
"""Age of a link up to which its Scheduler may not have discovered the component: many times what discovery takes."""
_MAX_TOKENS = (1 << 32) - 1
"""Largest number of tokens in an update."""
_LONGEST_SELECTION_SECONDS = 86_400.0
"""Time limit of the call of a selection. Its deadline is shorter, and is kept here and in the Scheduler's queue."""


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
        tenant: Callable[[], tuple[str, float]] | None = None,
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
            tenant: Returns tenant and weight of the caller of the running call; None without authentication.
            on_sharding_advised: Called when a Scheduler reports overload.
        """
        self._tenant = tenant
        self._component = component
        self._on_sharding_advised = on_sharding_advised
        self._young_until = time.monotonic() + _YOUNG_SECONDS
        self._choice = SchedulerChoice(component, source, shard)
        self._session_id = session_id
        self._heartbeat_timeout = heartbeat_timeout_seconds
        self._updates = BookingUpdates(session_id, client_name)
        self._monitor = HeartbeatMonitor()
        self._session: Session | None = None
        """The session, while it is open."""
        self._is_sending = False
        """Whether the updates of this step of the event loop are sent at its end."""
        self._is_due = False
        """Whether updates wait that are to be sent when those under way are acknowledged."""
        self._background = trace_context.background()
        self._is_open = asyncio.Event()
        self._failover_until = 0.0
        self._refusal = asyncio.Event()
        """Set when the Scheduler has refused a re-assert."""

    @property
    def ready(self) -> bool:
        """Whether a session is open, or was open less than the time of a failover ago."""
        return self._is_open.is_set() or time.monotonic() < self._failover_until

    @property
    def live_bookings(self) -> int:
        """Number of bookings not yet freed."""
        return len(self._updates.live)

    @property
    def waiting_updates(self) -> int:
        """Number of unacknowledged booking updates."""
        return self._updates.waiting

    @property
    def avoided(self) -> Collection[str]:
        """Ids of the Schedulers that recently did not answer."""
        return self._choice.avoided

    async def select(self, request: pb.SelectWorkerRequest, *, deadline: Deadline) -> pb.SelectWorkerResponse:
        """Chooses a rank. If the session ends meanwhile, the call is repeated in the next session.

        Args:
            request: The request; session and time left are filled in here.
            deadline: Time by which a rank must be chosen.

        Raises:
            KvRouterError: the error the Scheduler returned.
            DependencyAway: no Scheduler was available before the deadline, or the only one answers no heartbeat.
            DeadlineExceeded: the Scheduler answers heartbeats, but did not decide before the deadline.
        """
        sent = False
        if self._tenant is not None:
            request.tenant, request.tenant_weight = self._tenant()
        self._updates.selecting[id(request)] = request.booking
        try:
            while (session := self._session or await self._wait_session(deadline)) is not None:
                sent = True
                try:
                    if self._updates.has_unsent:
                        self._send_updates(session)
                        self._end_if_overflowed(session)
                    seconds = deadline.remaining()
                    selected = await session.answer(self._call(session, request, seconds), seconds)
                except SelectionUnanswered:
                    if session.has_ended:
                        continue
                    break
                except (NotFound, UnknownModel, NoWorkers):
                    if time.monotonic() >= self._young_until or deadline.before_answer() == 0:
                        raise
                    await asyncio.sleep(_RESELECT_SECONDS)
                    continue
                except (SessionLost, DependencyAway, Draining) as error:
                    self._end(session, error.message)
                    continue
                if selected.sharding_advised:
                    self._on_sharding_advised()
                return selected
            if sent:
                self._release(request.booking)
            raise self._unanswered()
        except asyncio.CancelledError:
            if sent:
                self._release(request.booking)
            raise
        finally:
            del self._updates.selecting[id(request)]

    async def book(
        self, key: BookingKey, request: pb.SelectWorkerRequest, hashes: bytes, *, deadline: Deadline
    ) -> tuple[pb.SelectWorkerResponse, LiveBooking]:
        """Books a rank, and keeps the booking until it is freed. Returns the decision and the booking.

        Args:
            key: Key of the booking.
            request: The request, as for ``select``; the booking is filled in here too.
            hashes: Local hashes of its prompt, packed.
            deadline: As for ``select``.

        Raises:
            KvRouterError: as for ``select``.
        """
        request.booking.CopyFrom(key)
        selection = await self.select(request, deadline=deadline)
        routing = request.request
        sequences = routing.sequences or 1
        booking = LiveBooking.of(key, selection, hashes, routing.prompt_tokens, routing.block_size, sequences)
        self._updates.live[booking] = None
        return selection, booking

    async def _wait_session(self, deadline: Deadline) -> Session | None:
        """Returns the session when it is open; None if it is not before the deadline."""
        try:
            async with asyncio.timeout(deadline.remaining()):
                while self._session is None:
                    await self._is_open.wait()
        except TimeoutError:
            return None
        return self._session

    def _call(
        self, session: Session, request: pb.SelectWorkerRequest, seconds: float | None
    ) -> Coroutine[Any, Any, pb.SelectWorkerResponse]:
        """Returns the call of a selection with so many seconds left, which has not begun."""
        request.session_id, request.opening_number = self._session_id, self._updates.opening_number
        if seconds is not None:
            request.time_left_ms = int(seconds * 1e3)
        limit = Deadline.after(_LONGEST_SELECTION_SECONDS)
        call = session.connection.scheduler.select_worker(request, deadline=limit)
        return client_call("kvrouter.v1.SchedulerService/SelectWorker", call)

    def _unanswered(self) -> KvRouterError:
        if self._monitor.silent:
            return DependencyAway(
                f"the only Scheduler of {self._component} has answered nothing for {self._heartbeat_timeout:g} s"
            )
        if self._session is None:
            return DependencyAway(f"no session with a Scheduler of {self._component} is open: check that one is ready")
        return DeadlineExceeded("the Scheduler chose no worker before the deadline")

    def prefill_complete(self, booking: LiveBooking, *, handover_us: int | None = None) -> None:
        """Reports a computed prompt. Does not wait.

        Args:
            booking: The booking.
            handover_us: Time from the end of a prefill elsewhere to the first token, microseconds; None if unknown.
        """
        update = self._updates.prefill_complete(booking, handover_us)
        # Without a session nothing is to be sent: the next opening re-asserts the booking as it is by then.
        if self._session is not None:
            self._updates.unsent.append(update)
            self._schedule_send()

    def report_output(self, booking: LiveBooking, output_tokens: int) -> None:
        """Reports the number of output tokens with the next call if the request needs a further block."""
        self._updates.report_output(booking, output_tokens)

    def free(
        self,
        booking: LiveBooking,
        cached_tokens: int | None = None,
        *,
        lower_cached_tokens: LowerTiers | None = None,
        output_tokens: int | None = None,
        prefill_complete: bool = False,
    ) -> None:
        """Frees a booking. Does not wait, so a handler being cancelled can call it.

        Args:
            booking: The booking.
            cached_tokens: Prompt tokens the worker found in its cache; None if it did not say so.
            lower_cached_tokens: Those from below device memory; None if there are none, or if it did not say so.
            output_tokens: Length of the output; None if that broke off, or is unknown.
            prefill_complete: Whether the prompt is computed, and ``prefill_complete`` was not called.
        """
        self._updates.free(
            booking,
            Free(
                booking.value, _sendable(cached_tokens), lower_cached_tokens, _sendable(output_tokens), prefill_complete
            ),
        )
        self._schedule_send()

    def _release(self, key: BookingKey) -> None:
        """Frees a booking which a selection may have made."""
        self._updates.unsent.append(Free(key_of(key)))
        self._schedule_send()

    def _schedule_send(self) -> None:
        """Sends updates unless some are under way: then they go together when those are acknowledged.

        They are sent when the current message from a worker is processed, since it may cause updates of many requests.
        """
        session = self._session
        if session is None:
            return
        self._is_due = True
        if not session.unanswered:
            if not self._is_sending:
                self._is_sending = True
                asyncio.get_running_loop().call_soon(self._flush, context=self._background)
        else:
            self._end_if_overflowed(session)

    def _flush(self) -> None:
        if not self._is_sending:
            return
        self._is_sending = False
        session = self._session
        if session is not None:
            if not session.unanswered:
                self._send_updates(session)
            self._end_if_overflowed(session)

    def _end_if_overflowed(self, session: Session) -> None:
        if session.unanswered and self._updates.overflowed:
            # Nothing is lost: the next opening re-asserts live bookings, and frees are sent again.
            self._end(session, f"the Scheduler has not acknowledged {MAX_UPDATES} updates")

    def _send_updates(self, session: Session) -> None:
        self._is_due = False
        # A Scheduler in this process answers before the next call is made.
        session.unanswered += 1
        while session is self._session and self._updates.has_unsent:
            self._send_call(session, self._updates.next_call())
        session.unanswered -= 1

    def _send_call(self, session: Session, call: UpdateCall) -> None:
        session.unanswered += 1
        session.connection.update_bookings(call, partial(self._answered, session))

    def _answered(self, session: Session, answer: UpdateAnswer | KvRouterError) -> None:
        session.unanswered -= 1
        if session is not self._session:
            return
        if isinstance(answer, KvRouterError):
            self._end(session, answer.message)
            return
        self._monitor.heard()
        are_lost = self._updates.answered(answer, is_last=not session.unanswered)
        if self._updates.refused:
            self._refusal.set()
        if are_lost or self._is_due:
            self._schedule_send()

    def _end(self, session: Session, cause: str) -> None:
        """Ends a session in this step: nothing more is sent in it."""
        if session is self._session:
            self._session = None
            self._is_open.clear()
            self._failover_until = time.monotonic() + _FAILOVER_SECONDS
        session.end(cause)

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
            self._choice.avoid(picked[0], "no session could be opened")
            raise _NotOpened

    async def _keep_session(self, scheduler_id: str, connection: SchedulerConnection) -> bool:
        """Opens a session and keeps it until it ends or another Scheduler becomes the component's.

        Returns whether it was opened.
        """
        opened = False
        session = Session(connection)
        opening = self._updates.opening()
        self._monitor = HeartbeatMonitor()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._end_when_moved(scheduler_id))
                group.create_task(self._end_when_silent(scheduler_id, session))
                response = await connection.open_session(opening)
                opened = True
                # Without an await: earlier changes are in these updates, later ones are sent as they come.
                self._updates.opened(response)
                self._session = session
                self._is_open.set()
                self._monitor.heard()
                self._send_updates(session)
                log.info("session.opened", scheduler=scheduler_id, component_name=str(self._component))
                group.create_task(self._reassert_refused())
                group.create_task(self._end_when_lost(session))
                raise _SessionEnded(await session.ended())
        except* (_SessionEnded, KvRouterError) as group_error:
            causes = "; ".join(str(error) for error in group_error.exceptions if str(error))
            log.warning("session.ended", scheduler=scheduler_id, component_name=str(self._component), cause=causes)
        finally:
            self._flush()
            self._end(session, "")
            connection.close_session(self._updates.closing())
            self._monitor = HeartbeatMonitor()
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # A cancellation that arrives while the group ends by its own error is lost in the group.
            raise asyncio.CancelledError
        return opened

    async def _reassert_refused(self) -> None:
        backoff = Backoff(_REASSERT_SECONDS, _LONGEST_REASSERT_SECONDS)
        pause = _REASSERT_SECONDS
        while True:
            if not backoff.failures:
                await self._refusal.wait()
            self._refusal.clear()
            await asyncio.sleep(pause)
            refused = self._updates.assert_refused()
            pause = _REASSERT_SECONDS
            if refused:
                pause = backoff.failed()
                if backoff.failures == _REFUSALS_LOGGED:
                    log.warning("bookings.refused", component_name=str(self._component), bookings=refused)
            elif not self._updates.asserting and (failures := backoff.succeeded()) >= _REFUSALS_LOGGED:
                log.info("bookings.accepted", component_name=str(self._component), refusals=failures)
            self._schedule_send()

    async def _end_when_silent(self, scheduler_id: str, session: Session) -> None:
        """Sends the updates that wait, or heartbeats.

        Leaves a Scheduler that answers nothing, not even the opening, if there is another.
        """
        while True:
            await asyncio.sleep(self._heartbeat_timeout / MISSES)
            self._monitor.tick()
            if self._monitor.silent and self._choice.instead_of(scheduler_id) is not None:
                cause = f"no answer for {self._heartbeat_timeout:g} s"
                self._choice.avoid(scheduler_id, cause)
                raise _SessionEnded(cause)
            if session is not self._session:
                continue
            if session.unanswered:
                self._is_due = self._updates.has_unsent
            elif self._updates.has_unsent:
                self._send_updates(session)
            else:
                self._send_call(session, self._updates.next_call())

    async def _end_when_lost(self, session: Session) -> None:
        await session.connection.lost()
        self._end(session, "the connection was lost")

    async def _end_when_moved(self, scheduler_id: str) -> None:
        """Ends the session when another Scheduler becomes the component's and answers."""
        while True:
            better = self._choice.better_than(scheduler_id)
            if better is None:
                await self._choice.changed()
            elif await self._choice.answers(*better, self._heartbeat_timeout):
                raise _SessionEnded(f"{better[0]} is now the component's Scheduler")


def _sendable(tokens: int | None) -> int | None:
    """Returns a number of tokens that an engine has reported, limited to what an update can have."""
    return None if tokens is None else min(max(0, tokens), _MAX_TOKENS)
