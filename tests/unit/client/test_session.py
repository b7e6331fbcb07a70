"""The session makes bookings again that a Scheduler has lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from google.protobuf.message import Message
from kvrouter.client.session import BookingSession
from kvrouter.v1.common_pb2 import Component, Rank, RoutingRequest, TokenIds
from kvrouter.v1.errors import AllBusy, UnknownWorker
from kvrouter.v1.frontend_pb2 import (
    FrontendServiceFreeResponse,
    FrontendServiceMarkPrefillCompleteResponse,
    FrontendServiceSelectWorkerRequest,
    FrontendServiceSelectWorkerResponse,
    KeepSessionResponse,
    Selection,
)


class OneScheduler:
    """The calls of a Frontend with one Scheduler, whose bookings can be lost."""

    def __init__(self) -> None:
        self.booked: dict[str, FrontendServiceSelectWorkerRequest] = {}
        self.prefilled: set[str] = set()
        self.opened: asyncio.Queue[KeepSessionResponse] = asyncio.Queue()
        self.failures: list[Exception] = []
        """Raised by the next calls of SelectWorker."""
        self.knows_session = True
        self.answers = asyncio.Event()
        """Whether SelectWorker returns."""
        self.answers.set()
        self.arrived = asyncio.Event()
        """Whether a call of SelectWorker has waited for that."""
        self.changed = asyncio.Condition()

    def lose_everything(self) -> None:
        self.booked, self.prefilled = {}, set()

    async def until_booked(self, count: int) -> list[FrontendServiceSelectWorkerRequest]:
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: len(self.booked) == count)
        return list(self.booked.values())

    async def unary(self, method: str, request: Any, seconds: float | None) -> Any:
        key = request.booking.request_id
        match method:
            case "SelectWorker":
                if not self.answers.is_set():
                    self.arrived.set()
                    await self.answers.wait()
                return await self._book(key, request)
            case "MarkPrefillComplete":
                self.prefilled.add(key)
                return FrontendServiceMarkPrefillCompleteResponse(known=key in self.booked)
            case _:
                known = self.booked.pop(key, None) is not None
                await self._notify()
                return FrontendServiceFreeResponse(known=known)

    async def _book(self, key: str, request: FrontendServiceSelectWorkerRequest) -> FrontendServiceSelectWorkerResponse:
        if self.failures:
            raise self.failures.pop(0)
        self.booked[key] = FrontendServiceSelectWorkerRequest()
        self.booked[key].CopyFrom(request)
        await self._notify()
        is_new, self.knows_session = not self.knows_session, True
        selection = Selection(rank=Rank(worker_id=7, dp_rank=1), component=Component(namespace="n", name="c"))
        return FrontendServiceSelectWorkerResponse(selection=selection, session_opened=is_new)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def stream(
        self,
        method: str,
        request: Message,
        seconds: float | None,
    ) -> AsyncGenerator[Any, None]:
        while True:
            yield await self.opened.get()


def request() -> FrontendServiceSelectWorkerRequest:
    return FrontendServiceSelectWorkerRequest(request=RoutingRequest(model="m", token_ids=TokenIds(ids=range(16))))


async def test_a_lost_booking_is_made_again_at_its_rank_with_its_progress() -> None:
    calls = OneScheduler()
    async with aclosing(BookingSession(calls, "test")) as session:
        await session.book("mine", request(), 1)
        assert await session.mark_prefill_complete("mine", 1)
        (first,) = calls.booked.values()
        calls.lose_everything()
        calls.failures = [AllBusy(0, "the Scheduler has just started")]
        calls.opened.put_nowait(KeepSessionResponse())
        (again,) = await calls.until_booked(1)
        assert again.booking == first.booking
        assert again.session_id == session.id
        constraints = again.request.constraints
        assert (constraints.worker_id, constraints.dp_rank, again.restores) == (7, 1, True)
        assert again.request.component.name == "c"
        assert await session.free("mine", 1)
        assert calls.prefilled == {first.booking.request_id}


async def test_the_next_booking_restores_the_earlier_ones() -> None:
    calls = OneScheduler()
    async with aclosing(BookingSession(calls, "test")) as session:
        await session.book("one", request(), 1)
        calls.lose_everything()
        calls.knows_session = False
        await session.book("two", request(), 1)
        assert len(await calls.until_booked(2)) == 2


async def test_marking_the_prefill_of_a_lost_booking_restores_it() -> None:
    calls = OneScheduler()
    async with aclosing(BookingSession(calls, "test")) as session:
        await session.book("mine", request(), 1)
        calls.lose_everything()
        assert await session.mark_prefill_complete("mine", 1)
        assert len(calls.booked) == 1
        calls.lose_everything()
        calls.failures = [UnknownWorker(7)]
        assert not await session.mark_prefill_complete("mine", 1)


async def test_a_booking_that_is_freed_while_it_is_restored_stays_freed() -> None:
    calls = OneScheduler()
    async with aclosing(BookingSession(calls, "test")) as session:
        await session.book("mine", request(), 1)
        calls.lose_everything()
        calls.answers.clear()
        calls.opened.put_nowait(KeepSessionResponse())
        await calls.arrived.wait()
        await session.free("mine", 1)
        calls.answers.set()
        await calls.until_booked(1)
        await calls.until_booked(0)
