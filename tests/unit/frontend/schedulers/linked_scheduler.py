"""Schedulers that refuse, fail or fall silent, and a link to one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any, ClassVar, cast

from kvrouter.frontend.schedulers.booking_updates import LiveBooking
from kvrouter.frontend.schedulers.scheduler_choice import SchedulerSource
from kvrouter.frontend.schedulers.scheduler_connection import SchedulerConnection, TakeAnswer
from kvrouter.frontend.schedulers.scheduler_link import SchedulerLink
from kvrouter.runtime.booking_updates import UpdateAnswer, UpdateCall
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import BookingKey, Component, Rank
from kvrouter.v1.error_encoding import to_parts
from kvrouter.v1.errors import DeadlineExceeded, DependencyAway, KvRouterError, NotFound, SessionLost
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import (
    CloseSessionRequest,
    FreeRequest,
    ListBusyThresholdsRequest,
    ListBusyThresholdsResponse,
    OpenSessionRequest,
    OpenSessionResponse,
    ReassertBooking,
    SelectWorkerRequest,
    SelectWorkerResponse,
    UpdateBookingsRequest,
    UpdateBookingsResponse,
)

COMPONENT = ComponentName("test", "workers")


class Refusing:
    """A Scheduler that refuses so many bookings or selections with one error; it is its own source and connection.

    In its first ``deaf_sessions`` sessions it answers nothing after they are open.
    """

    def __init__(self, refusals: int, error: KvRouterError | None = None) -> None:
        self.refusals = refusals
        self.error = NotFound("no") if error is None else error
        self.asserted: list[ReassertBooking] = []
        self.selected: list[SelectWorkerRequest] = []
        self.freed: list[FreeRequest] = []
        self.calls: list[UpdateBookingsRequest] = []
        self.closed: list[CloseSessionRequest] = []
        self.openings: list[OpenSessionRequest] = []
        self.ends_with_selections = 0
        self.deaf_sessions = 0
        self.opened = asyncio.Event()
        self.at_work = asyncio.Event()
        self.at_work.set()
        self.disconnected = asyncio.Event()

    # The source.

    def pick(
        self, component: ComponentName, avoid: Collection[str] = (), shard: int = 0
    ) -> tuple[str, SchedulerConnection] | None:
        return "one", self

    def everyone(self) -> list[Scheduler]:
        return [self.scheduler]

    def count(self) -> int:
        return 1

    def is_live(self, scheduler_id: str) -> bool:
        return True

    async def changed(self) -> None:
        await asyncio.Event().wait()

    # The connection.

    @property
    def scheduler(self) -> Scheduler:
        return cast(Scheduler, self)

    async def open_session(self, request: OpenSessionRequest) -> OpenSessionResponse:
        await self.at_work.wait()
        self.openings.append(request)
        await self.opened.wait()
        return OpenSessionResponse(scheduler_id="one", acknowledged=request.first_update - 1)

    def update_bookings(self, call: UpdateCall, answer: TakeAnswer) -> None:
        self.calls.append(call.to_message())
        if len(self.openings) > self.deaf_sessions:
            task = asyncio.create_task(self.apply(self.calls[-1], answer))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def close_session(self, request: CloseSessionRequest) -> None:
        self.closed.append(request)

    async def lost(self) -> None:
        await self.disconnected.wait()

    # The Scheduler.

    tasks: ClassVar[set[asyncio.Task[None]]] = set()

    @property
    def heartbeats(self) -> int:
        return sum(not call.updates for call in self.calls)

    async def apply(self, request: UpdateBookingsRequest, answer: TakeAnswer) -> None:
        await self.at_work.wait()
        response = UpdateBookingsResponse(acknowledged=max(0, request.first_number + len(request.updates) - 1))
        for number, update in enumerate(request.updates, request.first_number):
            if update.HasField("reassert"):
                self.asserted.append(update.reassert)
                if self.refusals >= len(self.asserted):
                    code, message, info = to_parts(self.error)
                    response.refused.add(number=number, code=code, message=message, info=info)
            elif update.HasField("free"):
                self.freed.append(update.free)
        answer(UpdateAnswer.of(response))

    async def select_worker(self, request: SelectWorkerRequest, *, deadline: Deadline) -> SelectWorkerResponse:
        self.selected.append(SelectWorkerRequest.FromString(request.SerializeToString()))
        if len(self.openings) <= self.deaf_sessions:
            await asyncio.Event().wait()
        await self.at_work.wait()
        if self.ends_with_selections:
            self.ends_with_selections -= 1
            await asyncio.sleep(0.005)
            raise SessionLost("session")
        if self.refusals >= len(self.selected):
            raise self.error.untraced()
        return SelectWorkerResponse(sharding_advised=True)


def booking(request_id: str) -> LiveBooking:
    selection = SelectWorkerResponse(rank=Rank(worker_id=1), component=Component(namespace="test", name="workers"))
    return LiveBooking.of(BookingKey(request_id=request_id), selection, b"\0" * 8, 16, 16)


def keep(link: SchedulerLink, booking: LiveBooking) -> None:
    """Has a link keep a booking, as if it had just made it."""
    link._updates.live[booking] = None


@asynccontextmanager
async def linked(scheduler: SchedulerSource, **settings: Any) -> AsyncIterator[SchedulerLink]:
    link = SchedulerLink(COMPONENT, scheduler, session_id="session", client_name="test", **settings)
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


def selection(**fields: Any) -> SelectWorkerRequest:
    return SelectWorkerRequest(booking=BookingKey(request_id="a"), **fields)


class Failing(Refusing):
    """A Scheduler that cannot be reached."""

    async def open_session(self, request: OpenSessionRequest) -> OpenSessionResponse:
        raise DependencyAway("connection refused")


class Answering(Refusing):
    """A Scheduler that answers everything until it is frozen."""

    def __init__(self) -> None:
        super().__init__(0)
        self.opened.set()

    async def list_busy_thresholds(
        self, request: ListBusyThresholdsRequest, *, deadline: Deadline
    ) -> ListBusyThresholdsResponse:
        try:
            async with asyncio.timeout(deadline.remaining()):
                await self.at_work.wait()
        except TimeoutError:
            raise DeadlineExceeded from None
        return ListBusyThresholdsResponse()


class Several(Answering):
    """A source of several Schedulers: the first that is not to be avoided is picked."""

    def __init__(self, **schedulers: Answering) -> None:
        super().__init__()
        self.schedulers = schedulers
        self.change = asyncio.Event()

    def pick(
        self, component: ComponentName, avoid: Collection[str] = (), shard: int = 0
    ) -> tuple[str, SchedulerConnection] | None:
        requested = [name for name in self.schedulers if name not in avoid] or list(self.schedulers)
        return requested[0], self.schedulers[requested[0]]

    async def changed(self) -> None:
        await self.change.wait()
        self.change.clear()
