"""A client of one session, and the updates that it sends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from inspect import isawaitable
from typing import Any

from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import Component, Rank
from kvrouter.v1.errors import SessionLost
from kvrouter.v1.scheduler_pb2 import (
    BookingUpdate,
    CloseSessionRequest,
    FreeRequest,
    LiveBookings,
    MarkPrefillCompleteRequest,
    OpenSessionRequest,
    OpenSessionResponse,
    ReassertBooking,
    ReportOutputRequest,
    SelectWorkerRequest,
    SelectWorkerResponse,
    UpdateBookingsRequest,
    UpdateBookingsResponse,
)

from ...runtime.rpc.rpc_harness import SCHEDULER, called
from ..harness import POOL, Parts, key, prompt, selecting


class Client:
    """A client of one session."""

    def __init__(self, scheduler: Any, session_id: str) -> None:
        self.scheduler = scheduler
        self.session_id = session_id
        self.opening_number = 0
        self.updates = 0

    async def call(self, method: str, request: object) -> Any:
        response = getattr(self.scheduler, method)(request, deadline=Deadline.after(10))
        return await response if isawaitable(response) else response

    async def open(self, *live: str, lists: bool = False, **fields: Any) -> OpenSessionResponse:
        """Opens the session again, by default with the next number; ``live`` bookings are listed if there are any."""
        known: dict[str, Any] = {"session_id": self.session_id, "client_name": "c"}
        if live or lists:
            known["live"] = LiveBookings(bookings=[key(each) for each in live])
        self.opening_number = fields.setdefault("opening_number", self.opening_number + 1)
        response: OpenSessionResponse = await self.call("open_session", OpenSessionRequest(**known | fields))
        return response

    async def close(self, opening_number: int | None = None) -> bool:
        number = self.opening_number if opening_number is None else opening_number
        request = CloseSessionRequest(session_id=self.session_id, opening_number=number)
        return bool((await self.call("close_session", request)).was_open)

    async def update(self, *updates: BookingUpdate, number: int | None = None) -> UpdateBookingsResponse:
        """Sends updates with the next numbers, or from ``number`` on."""
        first = self.updates + 1 if number is None else number
        if number is None:
            self.updates += len(updates)
        request = UpdateBookingsRequest(
            session_id=self.session_id, opening_number=self.opening_number, first_number=first, updates=updates
        )
        response: UpdateBookingsResponse = await self.call("update_bookings", request)
        return response

    def selection(self, name: str, **fields: Any) -> SelectWorkerRequest:
        return selecting(name, session_id=self.session_id, opening_number=self.opening_number, **fields)

    async def select(self, name: str, **fields: Any) -> SelectWorkerResponse:
        response: SelectWorkerResponse = await self.call("select_worker", self.selection(name, **fields))
        return response


@asynccontextmanager
async def connected(parts: Parts, transport: str = "object", session_id: str = "s") -> AsyncIterator[Client]:
    """A client without an open session."""
    if transport == "object":
        yield Client(parts.service(), session_id)
        return
    async with called(SCHEDULER, parts.service(), transport) as (_, stub):
        yield Client(stub, session_id)


@asynccontextmanager
async def opened(parts: Parts, transport: str = "object", session_id: str = "s") -> AsyncIterator[Client]:
    """A client with an open session."""
    async with connected(parts, transport, session_id) as client:
        response = await client.open()
        assert (response.grace_ms, response.scheduler_id, response.acknowledged) == (10_000, "s", 0)
        yield client


def prefilled(name: str) -> BookingUpdate:
    return BookingUpdate(prefill_complete=MarkPrefillCompleteRequest(booking=key(name)))


def output(name: str, tokens: int) -> BookingUpdate:
    return BookingUpdate(output=ReportOutputRequest(booking=key(name), output_tokens=tokens))


def free(name: str) -> BookingUpdate:
    return BookingUpdate(free=FreeRequest(booking=key(name)))


def reassert(request_id: str, *, worker_id: int = 1, blocks: int = 4, **fields: object) -> BookingUpdate:
    hashes = memoryview(prompt(blocks).sequence_hashes).cast("Q").tolist()
    known = {
        "booking": key(request_id),
        "rank": Rank(worker_id=worker_id),
        "component": Component(namespace=POOL.namespace, name=POOL.name),
        "sequence_hashes": hashes,
        "prompt_tokens": 64,
        "prefill_tokens": 32,
    }
    return BookingUpdate(reassert=ReassertBooking(**(known | fields)))  # type: ignore[arg-type]


def expire(parts: Parts, seconds: float) -> None:
    parts.now += seconds
    parts.updates.expire()


def silence(parts: Parts, ticks: int) -> None:
    for _ in range(ticks):
        parts.sessions.close_silent()


def is_open(parts: Parts, session_id: str) -> bool:
    try:
        parts.booking_ownership.check_open(session_id)
    except SessionLost:
        return False
    return True
