"""When updates of bookings are sent, and which travel together."""

from __future__ import annotations

import asyncio

import pytest
from kvrouter.frontend.schedulers import booking_updates, scheduler_link
from kvrouter.runtime.booking_updates import Free
from kvrouter.runtime.deadline import Deadline

from ....waiting import until
from .linked_scheduler import Answering, Refusing, booking, keep, linked, selection, until_asserted


async def test_a_refused_booking_is_asserted_until_it_is_taken_as_it_is_by_then() -> None:
    scheduler = Refusing(2)
    async with linked(scheduler) as link:
        live = booking("a")
        keep(link, live)
        scheduler.opened.set()
        await until_asserted(scheduler, 1)
        link.prefill_complete(live)
        await until_asserted(scheduler, 3)
    assert [each.prefill_complete for each in scheduler.asserted] == [False, True, True]


async def test_a_link_without_refusals_looks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def assert_refused(_: booking_updates.BookingUpdates) -> int:
        nonlocal looks
        looks += 1
        return 0

    monkeypatch.setattr(scheduler_link, "_REASSERT_SECONDS", 0.0)
    monkeypatch.setattr(booking_updates.BookingUpdates, "assert_refused", assert_refused)
    scheduler = Answering()
    async with linked(scheduler, heartbeat_timeout_seconds=0.02) as link:
        await until(lambda: link.ready)
        keep(link, booking("a"))
        await until(lambda: scheduler.heartbeats > 3)
    assert not looks


async def test_changes_while_a_session_opens_are_sent() -> None:
    scheduler = Refusing(0)
    async with linked(scheduler) as link:
        done, freed = booking("done"), booking("freed")
        keep(link, done)
        keep(link, freed)
        await asyncio.sleep(0)
        link.prefill_complete(done)
        link.free(freed, None)
        scheduler.opened.set()
        await until_asserted(scheduler, 1)
        await until(lambda: link.ready)
    assert [(each.booking.request_id, each.prefill_complete) for each in scheduler.asserted] == [("done", True)]


async def test_a_scheduler_that_reads_nothing_more_costs_no_call_and_gets_all_in_the_next_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(booking_updates, "MAX_UPDATES", 8)
    scheduler = Refusing(0)
    scheduler.deaf_sessions = 1
    scheduler.opened.set()
    async with linked(scheduler) as link, asyncio.TaskGroup() as group:
        await until(lambda: link.ready)
        selecting = group.create_task(link.select(selection(), deadline=Deadline.never()))
        kept, freed = booking("kept"), [booking(f"freed-{number}") for number in range(9)]
        keep(link, kept)
        for each in freed:
            keep(link, each)
        for tokens in range(16, 16 * 20, 16):
            link.report_output(kept, tokens)
        link.prefill_complete(kept)
        for each in freed:
            link.free(each, 7)
        await selecting
        await until_asserted(scheduler, 1)
        while len(scheduler.freed) < len(freed):
            await asyncio.sleep(0.01)
    (sent,) = scheduler.asserted
    assert (sent.booking.request_id, sent.prefill_complete, sent.output_tokens) == ("kept", True, 16 * 19)
    assert [(each.booking.request_id, each.cached_tokens) for each in scheduler.freed] == [
        (each.key.request_id, 7) for each in freed
    ]
    assert len(scheduler.openings) == 2


async def test_reports_that_a_scheduler_does_not_acknowledge_end_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(booking_updates, "MAX_UPDATES", 8)
    scheduler = Refusing(0)
    scheduler.deaf_sessions = 1
    scheduler.opened.set()
    async with linked(scheduler) as link, asyncio.TaskGroup() as group:
        await until(lambda: link.ready)
        live = [booking(f"{number}") for number in range(3)]
        for each in live:
            keep(link, each)
        for tokens in range(17, 17 + 16 * 3, 16):
            assert len(scheduler.openings) == 1
            assert link.waiting_updates <= 6
            for each in live:
                link.report_output(each, tokens)
            group.create_task(link.select(selection(), deadline=Deadline.never()))
            await asyncio.sleep(0)
        await until_asserted(scheduler, 3)
    assert len(scheduler.openings) == 2


async def test_re_asserts_of_any_number_of_bookings_are_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(booking_updates, "MAX_UPDATES", 8)
    scheduler = Refusing(0)
    async with linked(scheduler) as link:
        for number in range(9):
            keep(link, booking(f"{number}"))
        scheduler.opened.set()
        await until_asserted(scheduler, 9)
        await until(lambda: not link.waiting_updates)
    assert len(scheduler.openings) == 1


@pytest.mark.parametrize(("reported", "sent"), [(1 << 32, (1 << 32) - 1), (-1, 0), (None, None)])
async def test_what_an_engine_reports_fits_into_an_update(reported: int | None, sent: int | None) -> None:
    scheduler = Answering()
    async with linked(scheduler) as link:
        await until(lambda: link.ready)
        link.free(booking("a"), reported, output_tokens=reported)
        await until(lambda: scheduler.freed)
        link.free(booking("b"), 3)
        await until(lambda: len(scheduler.freed) == 2 and not link.waiting_updates)
    freed = Free.of(scheduler.freed[0])
    assert (freed.cached_tokens, freed.output_tokens) == (sent, sent)


async def test_updates_of_one_step_travel_in_one_call() -> None:
    scheduler = Answering()
    async with linked(scheduler) as link:
        await until(lambda: link.ready)
        bookings = [booking(name) for name in "abc"]
        for each in bookings:
            keep(link, each)
            link.prefill_complete(each)
            link.free(each, None)
        await until(lambda: len(scheduler.freed) == 3)
    updates = [call for call in scheduler.calls if call.updates]
    assert [(call.first_number, len(call.updates)) for call in updates] == [(1, 6)]


async def test_updates_that_gather_while_others_are_under_way_travel_together() -> None:
    scheduler = Answering()
    async with linked(scheduler) as link:
        await until(lambda: link.ready)
        scheduler.at_work.clear()
        first, *others = [booking(name) for name in "abc"]
        keep(link, first)
        link.prefill_complete(first)
        await until(lambda: any(call.updates for call in scheduler.calls))
        link.free(first, None)
        for each in others:
            keep(link, each)
            link.prefill_complete(each)
            await asyncio.sleep(0)
            link.free(each, None)
        scheduler.at_work.set()
        await until(lambda: len(scheduler.freed) == 3)
    updates = [call for call in scheduler.calls if call.updates]
    assert [(call.first_number, len(call.updates)) for call in updates] == [(1, 1), (2, 5)]


async def test_reports_of_output_travel_with_the_next_other_update() -> None:
    scheduler = Answering()
    async with linked(scheduler, heartbeat_timeout_seconds=60.0) as link:
        await until(lambda: link.ready)
        live, other = booking("a"), booking("b")
        keep(link, live)
        link.report_output(live, 17)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not any(call.updates for call in scheduler.calls)
        scheduler.at_work.clear()
        link.prefill_complete(live)
        await until(lambda: any(call.updates for call in scheduler.calls))
        link.report_output(live, 33)
        scheduler.at_work.set()
        await until(lambda: link.waiting_updates == 1)
        link.free(other, None)
        await until(lambda: scheduler.freed)
    updates = [call for call in scheduler.calls if call.updates]
    assert [(call.first_number, len(call.updates)) for call in updates] == [(1, 2), (3, 2)]


async def test_a_report_takes_the_place_of_one_that_was_never_sent() -> None:
    scheduler = Answering()
    async with linked(scheduler, heartbeat_timeout_seconds=60.0) as link:
        await until(lambda: link.ready)
        live, other = booking("a"), booking("b")
        keep(link, live)
        keep(link, other)
        link.report_output(live, 17)
        link.report_output(other, 17)
        link.report_output(live, 33)
        assert link.waiting_updates == 2
        scheduler.at_work.clear()
        link.prefill_complete(live)
        await until(lambda: any(call.updates for call in scheduler.calls))
        link.report_output(live, 49)
        assert link.waiting_updates == 4, "one that was sent stays as it is, and one of a freed booking is dropped"
        scheduler.at_work.set()
        link.free(live, None)
        await until(lambda: scheduler.freed)
    reports = [update.output for call in scheduler.calls for update in call.updates if update.HasField("output")]
    assert [(each.booking.request_id, each.output_tokens) for each in reports] == [("a", 33), ("b", 17)]


async def test_reports_of_output_travel_with_a_selection_or_a_heartbeat() -> None:
    scheduler = Answering()
    async with linked(scheduler, heartbeat_timeout_seconds=0.02) as link:
        await until(lambda: link.ready)
        live = booking("a")
        keep(link, live)
        link.report_output(live, 17)
        assert link.waiting_updates == 1
        await link.select(selection(), deadline=Deadline.never())
        await until(lambda: not link.waiting_updates)
        link.report_output(live, 33)
        await until(lambda: not link.waiting_updates)
    assert [call.updates[0].output.output_tokens for call in scheduler.calls if call.updates] == [17, 33]


async def test_a_computed_prompt_is_reported_by_the_free_that_follows_at_once() -> None:
    scheduler = Answering()
    async with linked(scheduler) as link:
        await until(lambda: link.ready)
        live = booking("a")
        keep(link, live)
        link.free(live, None, prefill_complete=True)
        await until(lambda: scheduler.freed)
    assert [len(call.updates) for call in scheduler.calls if call.updates] == [1]
    assert [each.prefill_complete for each in scheduler.freed] == [True]


async def test_updates_of_the_step_in_which_a_link_ends_are_sent() -> None:
    scheduler = Answering()
    async with linked(scheduler) as link:
        await until(lambda: link.ready)
        link.free(booking("a"), None)
    assert [len(call.updates) for call in scheduler.calls if call.updates] == [1]


async def test_a_selection_does_not_overtake_an_earlier_free() -> None:
    scheduler = Answering()
    async with linked(scheduler) as link:
        await until(lambda: link.ready)
        scheduler.at_work.clear()
        link.free(booking("a"), None)
        await until(lambda: any(call.updates for call in scheduler.calls))
        link.free(booking("b"), None)
        selecting = asyncio.create_task(link.select(selection(), deadline=Deadline.never()))
        await until(lambda: scheduler.selected)
        assert [len(call.updates) for call in scheduler.calls if call.updates] == [1, 1]
        scheduler.at_work.set()
        await selecting
