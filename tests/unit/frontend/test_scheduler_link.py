"""What a link tells a Scheduler that it moves to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import cast

import grpc
from kvrouter.frontend.bookings import LiveBooking
from kvrouter.frontend.scheduler_link import SchedulerLink
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import BookingKey, Component, Rank
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import (
    BookingReasserted,
    CallFailed,
    ReassertBooking,
    SelectWorkerResponse,
    SessionOpened,
    SessionRequest,
    SessionResponse,
)

COMPONENT = ComponentName("test", "workers")


class Refusing:
    """A Scheduler's session that refuses a booking so many times with one code; it is its own source."""

    def __init__(self, refusals: int, code: grpc.StatusCode = grpc.StatusCode.NOT_FOUND) -> None:
        self.refusals = refusals
        self.code = code
        self.asserted: list[ReassertBooking] = []
        self.opened = asyncio.Event()

    def pick(self, component: ComponentName, avoid: Collection[str] = ()) -> tuple[str, Scheduler] | None:
        return "one", cast(Scheduler, self)

    def is_live(self, scheduler_id: str) -> bool:
        return True

    async def changed(self) -> None:
        await asyncio.Event().wait()

    async def session(
        self, requests: AsyncIterator[SessionRequest], *, deadline: Deadline
    ) -> AsyncGenerator[SessionResponse, None]:
        async for request in requests:
            response = SessionResponse(call_id=request.call_id)
            if request.HasField("open"):
                await self.opened.wait()
                response.opened.CopyFrom(SessionOpened(scheduler_id="one"))
            elif request.HasField("reassert"):
                self.asserted.append(request.reassert)
                if self.refusals >= len(self.asserted):
                    response.failed.CopyFrom(CallFailed(code=self.code.value[0], message="no"))
                else:
                    response.reasserted.CopyFrom(BookingReasserted())
            yield response


def booking(request_id: str) -> LiveBooking:
    selection = SelectWorkerResponse(rank=Rank(worker_id=1), component=Component(namespace="test", name="workers"))
    return LiveBooking.of(BookingKey(request_id=request_id), selection, b"\0" * 8, 16, 16)


@asynccontextmanager
async def linked(scheduler: Refusing) -> AsyncIterator[SchedulerLink]:
    link = SchedulerLink(COMPONENT, scheduler, session_id="session", client_name="test")
    running = asyncio.create_task(link.run())
    try:
        async with asyncio.timeout(10):
            yield link
    finally:
        running.cancel()
        await asyncio.wait({running})


async def until_asserted(scheduler: Refusing, count: int) -> None:
    while len(scheduler.asserted) < count:
        await asyncio.sleep(0.01)


async def test_a_refused_booking_is_asserted_until_it_is_taken_as_it_is_by_then() -> None:
    scheduler = Refusing(2)
    async with linked(scheduler) as link:
        live = booking("a")
        link.keep(live)
        scheduler.opened.set()
        await until_asserted(scheduler, 1)
        link.prefill_complete(live)
        await until_asserted(scheduler, 3)
    assert [each.prefill_complete for each in scheduler.asserted] == [False, True, True]


async def test_what_changes_while_a_session_opens_is_told() -> None:
    scheduler = Refusing(0)
    async with linked(scheduler) as link:
        done, freed = booking("done"), booking("freed")
        link.keep(done)
        link.keep(freed)
        await asyncio.sleep(0)
        link.prefill_complete(done)
        link.free(freed, None)
        scheduler.opened.set()
        await until_asserted(scheduler, 1)
        await link.wait_ready()
    assert [(each.booking.request_id, each.prefill_complete) for each in scheduler.asserted] == [("done", True)]
