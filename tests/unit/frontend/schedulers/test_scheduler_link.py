"""What a link sends to a Scheduler that it moves to, and when it moves."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from kvrouter.frontend.schedulers import scheduler_choice, scheduler_link
from kvrouter.frontend.schedulers.scheduler_choice import LocalScheduler
from kvrouter.frontend.schedulers.scheduler_link import SchedulerLink
from kvrouter.runtime.booking_updates import UpdateAnswer, UpdateCall, key_of
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.errors import DependencyAway, NotFound
from kvrouter.v1.scheduler_pb2 import (
    CloseSessionRequest,
    OpenSessionRequest,
    OpenSessionResponse,
    SelectWorkerRequest,
    SelectWorkerResponse,
)

from ....waiting import until
from .linked_scheduler import (
    COMPONENT,
    Answering,
    Failing,
    Refusing,
    Several,
    booking,
    keep,
    linked,
    selection,
    until_asserted,
)


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


async def test_a_selection_names_the_tenant_of_its_caller_and_none_that_a_client_claims() -> None:
    scheduler = Refusing(0)
    scheduler.opened.set()
    async with linked(scheduler, tenant=lambda: ("caller's", 2.0)) as link:
        await link.select(selection(), deadline=Deadline.never())
        claimed = selection()
        claimed.tenant, claimed.tenant_weight = "claimed", 100.0
        await link.select(claimed, deadline=Deadline.never())
    assert [(each.tenant, each.tenant_weight) for each in scheduler.selected] == [("caller's", 2.0)] * 2


async def test_it_ends_when_it_is_cancelled_at_any_point() -> None:
    for steps in range(40):
        link = SchedulerLink(COMPONENT, Failing(0), session_id="session", client_name="test")
        running = asyncio.create_task(link.run())
        for _ in range(steps):
            await asyncio.sleep(0)
        running.cancel()
        ended, _ = await asyncio.wait({running}, timeout=10)
        assert ended, f"a cancel after {steps} steps was lost"


async def test_a_scheduler_that_answers_no_heartbeat_is_left_for_another() -> None:
    first, second = Answering(), Answering()
    async with linked(Several(first=first, second=second), heartbeat_timeout_seconds=0.1) as link:
        await until(lambda: first.heartbeats)
        keep(link, booking("kept"))
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
        await until(lambda: link.ready)
        kept, freed = booking("kept"), booking("freed")
        keep(link, kept)
        keep(link, freed)
        link.free(freed, None)
        await link.select(selection(), deadline=Deadline.after(9))
    listed = [[each.request_id for each in opening.live.bookings] for opening in scheduler.openings]
    assert listed == [[], ["kept", "a"]]
    assert [opening.opening_number for opening in scheduler.openings] == [1, 2]


async def test_a_connection_that_is_lost_ends_the_session_at_once() -> None:
    scheduler = Answering()
    async with linked(scheduler) as link:
        await until(lambda: link.ready)
        scheduler.disconnected.set()
        await until(lambda: len(scheduler.openings) > 1)
        scheduler.disconnected.clear()
    assert scheduler.closed[0].opening_number == 1


@pytest.mark.parametrize(("seconds", "stays_ready"), [(60.0, True), (0.0, False)])
async def test_a_link_without_a_session_is_ready_for_the_time_of_a_failover(
    monkeypatch: pytest.MonkeyPatch, seconds: float, stays_ready: bool
) -> None:
    monkeypatch.setattr(scheduler_link, "_FAILOVER_SECONDS", seconds)
    scheduler = Answering()
    async with linked(scheduler) as link:
        assert not link.ready
        await until(lambda: link.ready)
        scheduler.at_work.clear()
        scheduler.disconnected.set()
        await until(lambda: len(scheduler.closed) == 1)
        assert link.ready == stays_ready
        scheduler.disconnected.clear()
        scheduler.at_work.set()
        await until(lambda: link.ready)


async def test_a_scheduler_in_this_process_is_called_without_a_task() -> None:
    class Local(Answering):
        def apply_updates(self, call: UpdateCall) -> UpdateAnswer:
            self.calls.append(call.to_message())
            return UpdateAnswer(call.first_number + len(call.updates) - 1)

        def open_session(self, request: OpenSessionRequest, *, deadline: Deadline) -> OpenSessionResponse:  # type: ignore[override]
            return OpenSessionResponse(acknowledged=request.first_update - 1)

        def close_session(self, request: CloseSessionRequest, *, deadline: Deadline) -> None:  # type: ignore[override]
            self.closed.append(request)

        async def select_worker(self, request: SelectWorkerRequest, *, deadline: Deadline) -> SelectWorkerResponse:
            return SelectWorkerResponse()

    scheduler = Local()
    async with linked(LocalScheduler(cast(Scheduler, scheduler))) as link:
        await until(lambda: link.ready)
        before = asyncio.all_tasks()
        switched: list[None] = []
        asyncio.get_running_loop().call_soon(switched.append, None)
        await link.select(selection(), deadline=Deadline.after(9))
        live = booking("a")
        keep(link, live)
        link.prefill_complete(live)
        link.free(live, None)
        assert not switched, "it was answered in the same step"
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
        assert [len(call.updates) for call in scheduler.calls] == [2]
    assert len(scheduler.closed) == 1


async def test_all_reports_that_wait_are_sent_with_the_next_heartbeat() -> None:
    scheduler = Answering()
    async with linked(scheduler, heartbeat_timeout_seconds=0.4) as link:
        await until(lambda: link.ready and not link.waiting_updates)
        bookings = [booking(f"{number:064}") for number in range(2000)]
        scheduler.at_work.clear()
        for each in bookings:
            keep(link, each)
            link.report_output(each, 17)
        await until(lambda: not link._updates.has_unsent)
        assert link.waiting_updates == len(bookings)
        assert sum(len(call.updates) > 1 for call in scheduler.calls) > 1, "more than fit into one call"
        scheduler.at_work.set()
        await until(lambda: not link.waiting_updates)


async def test_a_report_that_waits_during_a_heartbeat_follows_the_answer_under_way() -> None:
    scheduler = Answering()
    async with linked(scheduler, heartbeat_timeout_seconds=0.4) as link:
        await until(lambda: link.ready and not link.waiting_updates)
        first, second = booking("a"), booking("b")
        keep(link, first)
        keep(link, second)
        scheduler.at_work.clear()
        link.prefill_complete(first)
        await until(lambda: not link._updates.unsent)
        link.report_output(second, 17)
        await until(lambda: link._is_due)  # The heartbeat that could not be sent.
        calls = len(scheduler.calls)
        scheduler.at_work.set()
        await until(lambda: not link.waiting_updates)
        (update,) = scheduler.calls[calls].updates
        assert key_of(update.output.booking) == second.value
