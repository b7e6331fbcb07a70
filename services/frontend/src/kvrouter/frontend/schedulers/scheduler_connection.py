"""Connections to Schedulers: objects of this process, or call streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, cast

import msgspec
from google.protobuf.message import DecodeError
from kvrouter.net.calls import CallStreamCounts
from kvrouter.net.tls import Tls
from kvrouter.runtime.booking_updates import UpdateAnswer, UpdateCall
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import call_stream_client, remote_on_call_stream
from kvrouter.v1 import scheduler_pb2 as pb
from kvrouter.v1.errors import Internal, KvRouterError

_NEVER = Deadline.never()
_DESCRIPTOR = pb.DESCRIPTOR.services_by_name["SchedulerService"]
_UPDATE = f"{_DESCRIPTOR.full_name}/UpdateBookings"
_CLOSE = f"{_DESCRIPTOR.full_name}/CloseSession"

TakeAnswer = Callable[[UpdateAnswer | KvRouterError], None]
"""Receives the answer to a call with updates, or its failure. Must not block."""


class SchedulerConnection(Protocol):
    """A connection to one Scheduler."""

    @property
    def scheduler(self) -> Scheduler:
        """The object, or a stub of it."""

    async def open_session(self, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        """Opens a session.

        Raises:
            KvRouterError: it was not opened.
        """

    def update_bookings(self, call: UpdateCall, answer: TakeAnswer) -> None:
        """Sends updates and does not wait. ``answer`` is called once, possibly before this returns."""

    def close_session(self, request: pb.CloseSessionRequest) -> None:
        """Closes a session and does not wait. If the call is lost, the session ends with its connection."""

    async def lost(self) -> None:
        """Returns when the connection has ended or takes no new calls, and at once if it is not open."""


class _SchedulerObject(Scheduler, Protocol):
    """A Scheduler in this process, whose methods that never wait are plain functions."""

    def open_session(self, request: pb.OpenSessionRequest, *, deadline: Deadline) -> pb.OpenSessionResponse: ...

    def apply_updates(self, call: UpdateCall) -> UpdateAnswer: ...

    def close_session(self, request: pb.CloseSessionRequest, *, deadline: Deadline) -> pb.CloseSessionResponse: ...


class LocalConnection:
    """Calls a Scheduler in this process."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = cast(_SchedulerObject, scheduler)
        """The object."""

    async def open_session(self, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        """Opens a session.

        Raises:
            KvRouterError: it was not opened.
        """
        return self.scheduler.open_session(request, deadline=_NEVER)

    def update_bookings(self, call: UpdateCall, answer: TakeAnswer) -> None:
        """Applies updates, and passes the answer on."""
        answered: UpdateAnswer | KvRouterError
        try:
            answered = self.scheduler.apply_updates(call)
        except KvRouterError as error:
            answered = error
        answer(answered)

    def close_session(self, request: pb.CloseSessionRequest) -> None:
        """Closes a session."""
        self.scheduler.close_session(request, deadline=_NEVER)

    async def lost(self) -> None:
        """Never returns."""
        await asyncio.Event().wait()


class StreamConnection:
    """Calls a Scheduler on a call stream. ``run`` must be running."""

    def __init__(self, endpoint: str, *, client_name: str, counts: CallStreamCounts, tls: Tls | None = None) -> None:
        """Connects nothing yet.

        Args:
            endpoint: Address of the Scheduler, host:port.
            client_name: Name of this Frontend, for the Scheduler's logs.
            counts: Counts for metrics.
            tls: Encrypts the connection; None for plain text.
        """
        # A Scheduler that is silent is left by the sessions, which know whether there is another.
        self._client = call_stream_client(
            endpoint, client_name=client_name, counts=counts, ends_when_silent=False, tls=tls, role="scheduler"
        )
        self.scheduler = cast(Scheduler, remote_on_call_stream(_DESCRIPTOR, self._client))
        """A stub."""
        self.run = self._client.run

    async def open_session(self, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        """Opens a session.

        Raises:
            KvRouterError: it was not opened.
        """
        opening = self.scheduler.open_session(request, deadline=_NEVER)
        return opening if isinstance(opening, pb.OpenSessionResponse) else await opening

    def update_bookings(self, call: UpdateCall, answer: TakeAnswer) -> None:
        """Sends updates with whatever else is ready for the stream."""
        try:
            self._client.start(_UPDATE, call.to_message().SerializeToString(), _Response(answer))
        except KvRouterError as error:
            answer(error)

    def close_session(self, request: pb.CloseSessionRequest) -> None:
        """Closes a session."""
        with suppress(KvRouterError):
            self._client.start(_CLOSE, request.SerializeToString(), _Response(lambda _: None))

    @property
    def running_calls(self) -> int:
        """Number of calls waiting for their answer."""
        return self._client.running

    async def lost(self) -> None:
        """Returns when the stream has ended or takes no new calls, and at once if it is not open."""
        await self._client.wait_lost()


class _Response(msgspec.Struct, eq=False):
    """Receives the response of a call with updates."""

    answer: TakeAnswer
    encoded: bytes = b""

    def on_response(self, encoded: bytes) -> None:
        self.encoded = encoded

    def on_end(self) -> None:
        try:
            response = pb.UpdateBookingsResponse.FromString(self.encoded)
        except DecodeError:
            self.answer(Internal("the service sent a response that cannot be parsed"))
        else:
            self.answer(UpdateAnswer.of(response))

    def on_error(self, error: KvRouterError) -> None:
        self.answer(error)
