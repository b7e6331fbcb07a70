"""What a link sends to a Scheduler that it moves to, and when it moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest
from kvrouter.frontend.scheduler_client import scheduler_choice
from kvrouter.frontend.scheduler_client import session_link as scheduler_link
from kvrouter.frontend.scheduler_client.live_bookings import LiveBooking
from kvrouter.frontend.scheduler_client.session_link import SchedulerLink
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import DeadlineExceeded, DependencyAway, NotFound
from kvrouter.v1.common_pb2 import BookingKey, Component, Rank
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import (
    BookingReasserted,
    CallFailed,
    FreeRequest,
    FreeResponse,
    ListBusyThresholdsRequest,
    ListBusyThresholdsResponse,
    ReassertBooking,
    SelectWorkerRequest,
    SelectWorkerResponse,
    SessionOpened,
    SessionRequest,
    SessionResponse,
)

COMPONENT = ComponentName("test", "workers")


class Refusing:
    """A Scheduler that refuses so many bookings or selections with one code; it is its own source.

    Its first ``deaf_sessions`` sessions read nothing after they are open.
    """

    def __init__(self, refusals: int, code: grpc.StatusCode = grpc.StatusCode.NOT_FOUND) -> None:
        self.refusals = refusals
        self.code = code
        self.asserted: list[ReassertBooking] = []
        self.selected: list[SelectWorkerRequest] = []
        self.freed: list[FreeRequest] = []
        self.ends_with_selections = 0
        self.sessions = 0
        self.deaf_sessions = 0
        self.opened = asyncio.Event()

    def pick(
        self, component: ComponentName, avoid: Collection[str] = (), shard: int = 0
    ) -> tuple[str, Scheduler] | None:
        return "one", cast(Scheduler, self)

    def everyone(self) -> list[Scheduler]:
        return [cast(Scheduler, self)]

    def count(self) -> int:
        return 1

    def is_live(self, scheduler_id: str) -> bool:
        return True

    async def changed(self) -> None:
        await asyncio.Event().wait()

    async def session(
        self, requests: AsyncIterator[SessionRequest], *, deadline: Deadline
    ) -> AsyncGenerator[SessionResponse, None]:
        async for request in requests:
            if self.sessions and self.sessions <= self.deaf_sessions and not request.HasField("open"):
                await asyncio.Event().wait()
            response = SessionResponse(call_id=request.call_id)
            if request.HasField("open"):
                self.sessions += 1
                await self.opened.wait()
                response.opened.CopyFrom(SessionOpened(scheduler_id="one"))
            elif request.HasField("reassert"):
                self.asserted.append(request.reassert)
                if self.refusals >= len(self.asserted):
                    response.failed.CopyFrom(CallFailed(code=self.code.value[0], message="no"))
                else:
                    response.reasserted.CopyFrom(BookingReasserted())
            elif request.HasField("free"):
                self.freed.append(request.free)
                response.free.CopyFrom(FreeResponse())
            elif request.HasField("select"):
                self.selected.append(request.select)
                if self.ends_with_selections:
                    self.ends_with_selections -= 1
                    await asyncio.sleep(0.005)
                    return
                if self.refusals >= len(self.selected):
                    response.failed.CopyFrom(CallFailed(code=self.code.value[0], message="no"))
                else:
                    response.select.CopyFrom(SelectWorkerResponse(sharding_advised=True))
            elif request.HasField("heartbeat"):
                response.heartbeat.CopyFrom(request.heartbeat)
            yield response


def booking(request_id: str) -> LiveBooking:
    selection = SelectWorkerResponse(rank=Rank(worker_id=1), component=Component(namespace="test", name="workers"))
    return LiveBooking.of(BookingKey(request_id=request_id), selection, b"\0" * 8, 16, 16)


@asynccontextmanager
async def linked(scheduler: Refusing, **settings: Any) -> AsyncIterator[SchedulerLink]:
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


async def test_changes_while_a_session_opens_are_sent() -> None:
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


def selection(**fields: Any) -> SelectWorkerRequest:
    return SelectWorkerRequest(booking=BookingKey(request_id="a"), **fields)


async def test_a_selection_that_moves_keeps_its_arrival_and_its_remaining_time() -> None:
    scheduler = Refusing(0)
    scheduler.opened.set()
    scheduler.ends_with_selections = 1
    async with linked(scheduler) as link:
        await link.select(selection(arrived_unix_ns=77), deadline=Deadline.after(9))
    first, second = scheduler.selected
    assert first.arrived_unix_ns == second.arrived_unix_ns == 77
    assert 9000 >= first.time_left_ms > second.time_left_ms > 0


async def test_a_component_that_the_scheduler_has_not_discovered_yet_is_requested_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_link, "_YOUNG_SECONDS", 60.0)
    scheduler = Refusing(2)
    scheduler.opened.set()
    async with linked(scheduler) as link:
        await link.select(selection(), deadline=Deadline.never())
    assert len(scheduler.selected) == 3


async def test_one_that_it_does_not_have_after_a_while_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_link, "_YOUNG_SECONDS", 0.0)
    scheduler = Refusing(2)
    scheduler.opened.set()
    async with linked(scheduler) as link:
        with pytest.raises(NotFound):
            await link.select(selection(), deadline=Deadline.never())


async def test_advice_to_shard_is_passed_on() -> None:
    scheduler, advised = Refusing(0), asyncio.Event()
    scheduler.opened.set()
    async with linked(scheduler, on_sharding_advised=advised.set) as link:
        await link.select(selection(), deadline=Deadline.never())
    assert advised.is_set()


async def test_a_scheduler_that_reads_nothing_more_costs_no_call_and_gets_all_in_the_next_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_link, "_QUEUE_LIMIT", 8)
    scheduler = Refusing(0)
    scheduler.deaf_sessions = 1
    scheduler.opened.set()
    async with linked(scheduler) as link, asyncio.TaskGroup() as group:
        await link.wait_ready()
        selecting = group.create_task(link.select(selection(), deadline=Deadline.never()))
        kept, freed = booking("kept"), booking("freed")
        link.keep(kept)
        link.keep(freed)
        for tokens in range(16, 16 * 20, 16):
            link.report_output(kept, tokens)
        link.prefill_complete(kept)
        link.free(freed, 7)
        await selecting
        await until_asserted(scheduler, 1)
        while not scheduler.freed:
            await asyncio.sleep(0.01)
    (sent,) = scheduler.asserted
    assert (sent.booking.request_id, sent.prefill_complete, sent.output_tokens) == ("kept", True, 16 * 19)
    assert [(each.booking.request_id, each.cached_tokens) for each in scheduler.freed] == [("freed", 7)]
    assert scheduler.sessions == 2


class Failing(Refusing):
    """A Scheduler that cannot be reached."""

    async def session(
        self, requests: AsyncIterator[SessionRequest], *, deadline: Deadline
    ) -> AsyncGenerator[SessionResponse, None]:
        raise DependencyAway("connection refused")
        yield SessionResponse()


async def test_it_ends_when_it_is_cancelled_at_any_point() -> None:
    for steps in range(40):
        link = SchedulerLink(COMPONENT, Failing(0), session_id="session", client_name="test")
        running = asyncio.create_task(link.run())
        for _ in range(steps):
            await asyncio.sleep(0)
        running.cancel()
        ended, _ = await asyncio.wait({running}, timeout=10)
        assert ended, f"a cancel after {steps} steps was lost"


class Answering(Refusing):
    """A Scheduler that answers everything until it is frozen."""

    def __init__(self) -> None:
        super().__init__(0)
        self.opened.set()
        self.openings: list[SessionRequest] = []
        self.heartbeats = 0
        self.at_work = asyncio.Event()
        self.at_work.set()

    async def session(
        self, requests: AsyncIterator[SessionRequest], *, deadline: Deadline
    ) -> AsyncGenerator[SessionResponse, None]:
        async def served() -> AsyncGenerator[SessionRequest, None]:
            async for request in requests:
                await self.at_work.wait()
                self.heartbeats += request.HasField("heartbeat")
                if request.HasField("open"):
                    self.openings.append(request)
                yield request

        async for response in super().session(served(), deadline=deadline):
            yield response

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
    ) -> tuple[str, Scheduler] | None:
        requested = [name for name in self.schedulers if name not in avoid] or list(self.schedulers)
        return requested[0], cast(Scheduler, self.schedulers[requested[0]])

    async def changed(self) -> None:
        await self.change.wait()
        self.change.clear()


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def test_a_scheduler_that_answers_no_heartbeat_is_left_for_another() -> None:
    first, second = Answering(), Answering()
    async with linked(Several(first=first, second=second), heartbeat_timeout_seconds=0.1) as link:
        await until(lambda: first.heartbeats)
        link.keep(booking("kept"))
        first.at_work.clear()
        await link.select(selection(), deadline=Deadline.never())
        await until_asserted(second, 1)
        assert link.avoided == {"first"}
    assert [each.booking.request_id for each in second.selected] == ["a"]
    (opening,) = second.openings
    assert {each.request_id for each in opening.open.live.bookings} >= {"kept"}
    assert opening.open.opening_number > first.openings[0].open.opening_number


async def test_one_that_opens_no_session_is_left_for_another() -> None:
    first, second = Answering(), Answering()
    first.at_work.clear()
    async with linked(Several(first=first, second=second), heartbeat_timeout_seconds=0.1) as link:
        await link.select(selection(), deadline=Deadline.never())
    assert second.selected


async def test_a_link_returns_to_its_scheduler_only_once_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_choice, "_AVOIDED_SECONDS", 0.02)
    first, second = Answering(), Answering()
    async with linked(Several(first=first, second=second), heartbeat_timeout_seconds=0.1) as link:
        await until(lambda: first.heartbeats)
        first.at_work.clear()
        await until(lambda: second.heartbeats > 10)
        assert len(second.openings) == 1, "it has stayed"
        first.at_work.set()
        await until(lambda: len(first.openings) > 1)
        await link.select(selection(), deadline=Deadline.never())
    assert first.selected


async def test_requests_wait_for_the_only_scheduler_and_keep_their_session() -> None:
    only = Answering()
    async with linked(only, heartbeat_timeout_seconds=0.1) as link:
        await until(lambda: only.heartbeats)
        only.at_work.clear()
        with pytest.raises(DependencyAway, match="has answered nothing"):
            await link.select(selection(), deadline=Deadline.after(0.5))
        waiting = asyncio.create_task(link.select(selection(), deadline=Deadline.never()))
        await asyncio.sleep(0)
        only.at_work.set()
        await waiting
    assert len(only.openings) == 1


async def test_an_opening_lists_live_bookings_and_waiting_selections() -> None:
    scheduler = Answering()
    scheduler.ends_with_selections = 1
    async with linked(scheduler) as link:
        await link.wait_ready()
        kept, freed = booking("kept"), booking("freed")
        link.keep(kept)
        link.keep(freed)
        link.free(freed, None)
        await link.select(selection(), deadline=Deadline.after(9))
    listed = [[each.request_id for each in opening.open.live.bookings] for opening in scheduler.openings]
    assert listed == [[], ["kept", "a"]]
    assert [opening.open.opening_number for opening in scheduler.openings] == [1, 2]
