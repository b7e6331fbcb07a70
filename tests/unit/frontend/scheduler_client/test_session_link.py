"""What a link sends to a Scheduler that it moves to, and when it moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, ClassVar, cast

import pytest
from kvrouter.frontend.scheduler_client import booking_updates, scheduler_choice
from kvrouter.frontend.scheduler_client import session_link as scheduler_link
from kvrouter.frontend.scheduler_client.connections import SchedulerConnection, UpdateAnswer
from kvrouter.frontend.scheduler_client.live_bookings import LiveBooking
from kvrouter.frontend.scheduler_client.rendezvous import LocalScheduler
from kvrouter.frontend.scheduler_client.session_link import SchedulerLink
from kvrouter.frontend.scheduler_client.source import SchedulerSource
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import (
    DeadlineExceeded,
    DependencyAway,
    KvRouterError,
    NotFound,
    SessionLost,
    to_parts,
)
from kvrouter.v1.common_pb2 import BookingKey, Component, Rank
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

    def update_bookings(self, request: UpdateBookingsRequest, answer: UpdateAnswer) -> None:
        self.calls.append(UpdateBookingsRequest.FromString(request.SerializeToString()))
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

    async def apply(self, request: UpdateBookingsRequest, answer: UpdateAnswer) -> None:
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
        answer(response)

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
    monkeypatch.setattr(booking_updates, "MAX_UPDATES", 8)
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
    assert len(scheduler.openings) == 2


class Failing(Refusing):
    """A Scheduler that cannot be reached."""

    async def open_session(self, request: OpenSessionRequest) -> OpenSessionResponse:
        raise DependencyAway("connection refused")


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
    assert {each.request_id for each in opening.live.bookings} >= {"kept"}
    assert opening.opening_number > first.openings[0].opening_number


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
    listed = [[each.request_id for each in opening.live.bookings] for opening in scheduler.openings]
    assert listed == [[], ["kept", "a"]]
    assert [opening.opening_number for opening in scheduler.openings] == [1, 2]


async def test_a_connection_that_is_lost_ends_the_session_at_once() -> None:
    scheduler = Answering()
    async with linked(scheduler) as link:
        await link.wait_ready()
        scheduler.disconnected.set()
        await until(lambda: len(scheduler.openings) > 1)
        scheduler.disconnected.clear()
    assert scheduler.closed[0].opening_number == 1


async def test_updates_of_one_step_travel_in_one_call() -> None:
    scheduler = Answering()
    async with linked(scheduler) as link:
        await link.wait_ready()
        bookings = [booking(name) for name in "abc"]
        for each in bookings:
            link.keep(each)
            link.prefill_complete(each)
            link.free(each, None)
        await until(lambda: len(scheduler.freed) == 3)
    updates = [call for call in scheduler.calls if call.updates]
    assert [(call.first_number, len(call.updates)) for call in updates] == [(1, 6)]


async def test_updates_that_gather_while_others_are_under_way_travel_together() -> None:
    scheduler = Answering()
    async with linked(scheduler) as link:
        await link.wait_ready()
        scheduler.at_work.clear()
        first, *others = [booking(name) for name in "abc"]
        link.keep(first)
        link.prefill_complete(first)
        await until(lambda: any(call.updates for call in scheduler.calls))
        link.free(first, None)
        for each in others:
            link.keep(each)
            link.prefill_complete(each)
            await asyncio.sleep(0)
            link.free(each, None)
        scheduler.at_work.set()
        await until(lambda: len(scheduler.freed) == 3)
    updates = [call for call in scheduler.calls if call.updates]
    assert [(call.first_number, len(call.updates)) for call in updates] == [(1, 1), (2, 5)]


async def test_the_last_output_of_a_request_is_reported_with_its_free() -> None:
    scheduler = Answering()
    async with linked(scheduler) as link:
        await link.wait_ready()
        live = booking("a")
        link.keep(live)
        link.prefill_complete(live, ends=True)
        link.report_output(live, 1000, ends=True)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not [call for call in scheduler.calls if call.updates]
        link.free(live, None)
        await until(lambda: scheduler.freed)
    assert [len(call.updates) for call in scheduler.calls if call.updates] == [3]


async def test_updates_of_the_step_in_which_a_link_ends_are_sent() -> None:
    scheduler = Answering()
    async with linked(scheduler) as link:
        await link.wait_ready()
        link.free(booking("a"), None)
    assert [len(call.updates) for call in scheduler.calls if call.updates] == [1]


async def test_a_selection_does_not_overtake_an_earlier_free() -> None:
    scheduler = Answering()
    async with linked(scheduler) as link:
        await link.wait_ready()
        scheduler.at_work.clear()
        link.free(booking("a"), None)
        await until(lambda: any(call.updates for call in scheduler.calls))
        link.free(booking("b"), None)
        selecting = asyncio.create_task(link.select(selection(), deadline=Deadline.never()))
        await until(lambda: scheduler.selected)
        assert [len(call.updates) for call in scheduler.calls if call.updates] == [1, 1]
        scheduler.at_work.set()
        await selecting


async def test_a_scheduler_in_this_process_is_called_without_a_task() -> None:
    class Local(Answering):
        def update_bookings(self, request: UpdateBookingsRequest, *, deadline: Deadline) -> UpdateBookingsResponse:  # type: ignore[override]
            self.calls.append(request)
            return UpdateBookingsResponse(acknowledged=request.first_number + len(request.updates) - 1)

        def open_session(self, request: OpenSessionRequest, *, deadline: Deadline) -> OpenSessionResponse:  # type: ignore[override]
            return OpenSessionResponse(acknowledged=request.first_update - 1)

        def close_session(self, request: CloseSessionRequest, *, deadline: Deadline) -> None:  # type: ignore[override]
            self.closed.append(request)

        async def select_worker(self, request: SelectWorkerRequest, *, deadline: Deadline) -> SelectWorkerResponse:
            return SelectWorkerResponse()

    scheduler = Local()
    async with linked(LocalScheduler(cast(Scheduler, scheduler))) as link:
        await link.wait_ready()
        before = asyncio.all_tasks()
        switched: list[None] = []
        asyncio.get_running_loop().call_soon(switched.append, None)
        await link.select(selection(), deadline=Deadline.after(9))
        live = booking("a")
        link.keep(live)
        link.prefill_complete(live)
        link.free(live, None)
        assert not switched, "it was answered in the same step"
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
        assert [len(call.updates) for call in scheduler.calls] == [2]
    assert len(scheduler.closed) == 1
