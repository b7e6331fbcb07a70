"""The session of a client's bookings."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from kvrouter.client.calls import Calls
from kvrouter.v1.common_pb2 import BookingKey, RoutingConstraints
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.frontend_pb2 import (
    FrontendServiceFreeRequest,
    FrontendServiceMarkPrefillCompleteRequest,
    FrontendServiceSelectWorkerRequest,
    FrontendServiceSelectWorkerResponse,
    KeepSessionRequest,
    Selection,
)
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    RetryError,
    retry_if_exception_type,
    retry_if_result,
    stop_after_delay,
    wait_random_exponential,
)

log = logging.getLogger("kvrouter.client")

_RELEASE_SECONDS = 5.0
"""Deadline of the releases at the end. Bookings left then end with the session."""
_RESTORE_SECONDS = 5.0
"""Deadline of each call to restore a booking."""
_RESTORE_ATTEMPTS_SECONDS = 10.0
"""Time in which refused restorations are repeated: a Scheduler may not know every worker just after its start."""


@dataclass(eq=False, slots=True)
class _Booking:
    """A booking, and the call to restore it at another Scheduler."""

    key: BookingKey
    restoring: FrontendServiceSelectWorkerRequest | None = field(default=None, repr=False)
    """The call that makes it again at its rank; None until it is made."""
    prefill_complete: bool = False


class BookingSession:
    """Keeps a session open from the first booking on. The bookings of a process that dies end with it.

    If a Scheduler loses the session, because it was restarted, its bookings are made there again.
    """

    def __init__(self, calls: Calls, name: str) -> None:
        self.id = secrets.token_hex(16)
        """Id of the session."""
        self._calls = calls
        self._name = name
        self._bookings: dict[str, _Booking] = {}
        self._keeping: asyncio.Task[None] | None = None
        self._releasing: set[asyncio.Task[None]] = set()
        self._restoring: set[asyncio.Task[None]] = set()

    async def book(
        self,
        request_id: str,
        request: FrontendServiceSelectWorkerRequest,
        timeout: float | None,  # noqa: ASYNC109 - gRPC's
    ) -> Selection:
        """Chooses a worker and books the request there; returns the existing booking if there is one.

        Args:
            request_id: The caller's id of the request.
            request: The call without booking and session.
            timeout: Deadline, seconds; None for none.

        Raises:
            KvRouterError: nothing is booked.
        """
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep(), name="kvrouter session")
        known = self._bookings.get(request_id)
        # The suffix makes the key unique, so that an id may be used again.
        booking = known or _Booking(BookingKey(request_id=f"{request_id}~{secrets.token_hex(7)}"))
        self._bookings[request_id] = booking
        request.booking.CopyFrom(booking.key)
        request.session_id = self.id
        try:
            response: FrontendServiceSelectWorkerResponse = await self._calls.unary("SelectWorker", request, timeout)
        except BaseException:
            if known is None:
                self._abandon(request_id)
            raise
        if response.session_opened:
            self._restore_soon()
        booking.restoring = _pinned(request, response.selection)
        return response.selection

    async def mark_prefill_complete(self, request_id: str, timeout: float | None) -> bool:  # noqa: ASYNC109 - gRPC's
        """Marks the prefill of a booking as complete. Returns whether the booking exists.

        Raises:
            KvRouterError: the call failed.
        """
        booking = self._bookings.get(request_id)
        if booking is None:
            return False
        booking.prefill_complete = True
        answer = await self._calls.unary(
            "MarkPrefillComplete", FrontendServiceMarkPrefillCompleteRequest(booking=booking.key), timeout
        )
        if answer.known:
            return True
        try:
            await self._restore(request_id, booking)
        except KvRouterError:
            return False
        return self._bookings.get(request_id) is booking

    async def free(self, request_id: str, timeout: float | None) -> bool:  # noqa: ASYNC109 - gRPC's
        """Frees a booking. Returns whether it existed.

        Raises:
            KvRouterError: the call failed.
        """
        booking = self._bookings.get(request_id)
        if booking is None:
            return False
        answer = await self._calls.unary("Free", FrontendServiceFreeRequest(booking=booking.key), timeout)
        self._bookings.pop(request_id, None)
        return bool(answer.known)

    async def aclose(self) -> None:
        """Releases all bookings and ends the session."""
        for restoring in self._restoring:
            restoring.cancel()
        if self._restoring:
            await asyncio.wait(self._restoring)
        for request_id in list(self._bookings):
            self._abandon(request_id)
        if self._releasing:
            await asyncio.wait(self._releasing)
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])

    def _abandon(self, request_id: str) -> None:
        """Releases a booking in the background, because the call that makes it failed with an unknown outcome."""
        booking = self._bookings.pop(request_id, None)
        if booking is not None:
            self._release_soon(booking.key)

    def _release_soon(self, key: BookingKey) -> None:
        task = asyncio.create_task(self._release(key))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _release(self, key: BookingKey) -> None:
        with suppress(KvRouterError):
            await self._calls.unary("Free", FrontendServiceFreeRequest(booking=key), _RELEASE_SECONDS)

    async def _keep(self) -> None:
        def warn(state: RetryCallState) -> None:
            failure = state.outcome and state.outcome.exception()
            log.warning("the session ended, opening it again: %s", failure)

        request = KeepSessionRequest(session_id=self.id, client_name=self._name)
        retry = retry_if_exception_type(KvRouterError) | retry_if_result(lambda _: True)
        async for attempt in AsyncRetrying(
            retry=retry, wait=wait_random_exponential(multiplier=0.1, max=2), after=warn
        ):
            with attempt:
                async with aclosing(self._calls.stream("KeepSession", request, None)) as opened:
                    async for _ in opened:
                        self._restore_soon()

    def _restore_soon(self) -> None:
        """Makes all bookings again in the background, since a Scheduler opened the session that may have lost them."""
        made = {request_id: booking for request_id, booking in self._bookings.items() if booking.restoring is not None}
        if made:
            task = asyncio.create_task(self._restore_all(made), name="kvrouter restored bookings")
            self._restoring.add(task)
            task.add_done_callback(self._restoring.discard)

    async def _restore_all(self, lost: dict[str, _Booking]) -> None:
        """Makes bookings again. Those that their Scheduler has are not changed."""

        async def restore() -> KvRouterError | None:
            failure = None
            for request_id, booking in list(lost.items()):
                try:
                    if self._bookings.get(request_id) is booking:
                        await self._restore(request_id, booking)
                    del lost[request_id]
                except KvRouterError as error:
                    failure = error
            return failure

        retrying = AsyncRetrying(
            retry=retry_if_result(lambda failure: failure is not None),
            wait=wait_random_exponential(multiplier=0.1, max=1),
            stop=stop_after_delay(_RESTORE_ATTEMPTS_SECONDS),
        )
        try:
            await retrying(restore)
        except RetryError as given_up:
            failure = given_up.last_attempt.result()
            log.warning("%d bookings cannot be restored at their Scheduler: %s", len(lost), failure)

    async def _restore(self, request_id: str, booking: _Booking) -> None:
        """Makes a booking at its rank, unless its Scheduler has it, and marks its prefill if that is complete.

        Raises:
            KvRouterError: it cannot be booked there.
        """
        if booking.restoring is not None:
            await self._calls.unary("SelectWorker", booking.restoring, _RESTORE_SECONDS)
        if booking.prefill_complete:
            await self._calls.unary(
                "MarkPrefillComplete", FrontendServiceMarkPrefillCompleteRequest(booking=booking.key), _RESTORE_SECONDS
            )
        if self._bookings.get(request_id) is not booking:
            # It was freed meanwhile, at a Scheduler that did not have it.
            self._release_soon(booking.key)


def _pinned(request: FrontendServiceSelectWorkerRequest, selection: Selection) -> FrontendServiceSelectWorkerRequest:
    """Returns the call that makes a booking again at the selected rank."""
    pinned = FrontendServiceSelectWorkerRequest()
    pinned.CopyFrom(request)
    pinned.request.component.CopyFrom(selection.component)
    rank = selection.rank
    pinned.request.constraints.CopyFrom(RoutingConstraints(worker_id=rank.worker_id, dp_rank=rank.dp_rank))
    pinned.restores = True
    return pinned
