"""Bookings that selections made: one for each key, however often it is asked for, until it is freed or expires."""

from __future__ import annotations

import asyncio

import pytest
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.v1.common_pb2 import Stage
from kvrouter.v1.errors import RequestIdReused, SessionLost
from kvrouter.v1.scheduler_pb2 import FreeRequest, MarkPrefillCompleteRequest, ReportOutputRequest

from ..harness import BLOCK, MODEL, POOL, Parts, ResidentBlocks, constraints, key, routing, selecting, view, worker


async def test_the_life_of_a_booking() -> None:
    parts = Parts(view(worker(1)), indexer=ResidentBlocks({(1, 0): 2}))
    await parts.select(selecting("a", routing(4)))
    assert parts.bookings.mark_prefill_complete(MarkPrefillCompleteRequest(booking=key("a")))
    assert parts.bookings.mark_prefill_complete(MarkPrefillCompleteRequest(booking=key("a")))
    assert parts.load(1) == (4, 0, 1)
    assert parts.bookings.report_output(ReportOutputRequest(booking=key("a"), output_tokens=17))
    assert parts.load(1) == (6, 0, 1)
    assert parts.bookings.free(FreeRequest(booking=key("a")))
    assert not parts.bookings.free(FreeRequest(booking=key("a")))
    assert not parts.bookings.free(FreeRequest(booking=key("b")))
    assert not parts.bookings.mark_prefill_complete(MarkPrefillCompleteRequest(booking=key("a")))
    assert not parts.bookings.report_output(ReportOutputRequest(booking=key("a"), output_tokens=90))
    assert parts.idle()


@pytest.mark.parametrize("prefilled", [False, True])
async def test_a_free_may_report_that_the_prompt_was_computed(prefilled: bool) -> None:
    parts = Parts(view(worker(1)), options=RoutingOptions("forecast"))
    await parts.select(selecting("a", routing(64)))
    parts.bookings.free(FreeRequest(booking=key("a"), prefill_complete=prefilled))
    (pool,) = parts.pools
    assert pool.booked_load.prefill_times.measured_prompts == prefilled
    assert (pool.booked_load.latency_calibration.value != 1.0) == prefilled
    assert parts.idle()


async def test_a_repeated_selection_gets_its_first_outcome() -> None:
    parts = Parts(view(worker(1), worker(2)))
    first = await parts.select(selecting("a"))
    again = await parts.select(selecting("a"))
    assert again.repeated
    assert (again.rank, again.decision_id) == (first.rank, first.decision_id)
    assert parts.load(first.rank.worker_id)[2] == 1
    assert not first.repeated


async def test_repeats_that_come_together_book_once() -> None:
    indexer = ResidentBlocks.held()
    parts = Parts(view(worker(1), worker(2)), indexer=indexer)
    calls = [asyncio.create_task(parts.select(selecting("a"))) for _ in range(5)]
    await indexer.queried()
    indexer.may_answer.set()
    outcomes = await asyncio.gather(*calls)
    assert len({outcome.decision_id for outcome in outcomes}) == 1
    assert sorted(outcome.repeated for outcome in outcomes) == [False, True, True, True, True]
    assert len(parts.booking_table) == 1


async def test_a_repeat_takes_over_from_a_call_that_was_cancelled() -> None:
    indexer = ResidentBlocks.held()
    parts = Parts(view(worker(1)), indexer=indexer)
    first = asyncio.create_task(parts.select(selecting("a")))
    second = asyncio.create_task(parts.select(selecting("a")))
    await indexer.queried()
    first.cancel()
    indexer.may_answer.set()
    assert not (await second).repeated
    assert len(parts.booking_table) == 1


async def test_a_booking_is_not_reused_with_another_prompt() -> None:
    indexer = ResidentBlocks.held()
    parts = Parts(view(worker(1)), indexer=indexer)
    first = asyncio.create_task(parts.select(selecting("a", routing(4))))
    await indexer.queried()
    meanwhile = asyncio.create_task(parts.select(selecting("a", routing(4, seed=1))))
    indexer.may_answer.set()
    await first
    with pytest.raises(RequestIdReused):
        await meanwhile
    with pytest.raises(RequestIdReused):
        await parts.select(selecting("a", routing(4, seed=1)))
    # Another attempt, or another stage, is another booking.
    await parts.select(selecting("a", routing(4, seed=1), attempt=1))
    await parts.select(selecting("a", routing(4, seed=1), stage=Stage.STAGE_DECODE))
    assert len(parts.booking_table) == 3


async def test_a_booking_that_was_freed_while_it_was_selected_is_not_made() -> None:
    indexer = ResidentBlocks.held()
    parts = Parts(view(worker(1)), indexer=indexer)
    call = asyncio.create_task(parts.select(selecting("a")))
    await indexer.queried()
    assert not parts.bookings.free(FreeRequest(booking=key("a")))
    indexer.may_answer.set()
    with pytest.raises(RequestIdReused, match="freed already"):
        await call
    assert parts.idle()


async def test_a_session_that_ends_while_it_selects_books_nothing() -> None:
    indexer = ResidentBlocks.held()
    parts = Parts(view(worker(1)), indexer=indexer)
    parts.booking_ownership.open_session("s", "c")
    call = asyncio.create_task(parts.select(selecting("a"), "s"))
    await indexer.queried()
    parts.booking_ownership.close_session("s", parts.now)
    indexer.may_answer.set()
    with pytest.raises(SessionLost):
        await call
    assert parts.idle()


async def test_load_of_a_worker_whose_registration_lapsed_is_kept() -> None:
    parts = Parts(view(worker(1), worker(2)))
    pinned = routing(constraints=constraints(worker_id=1))
    await parts.select(selecting("a", pinned))
    parts.registered.register(view(worker(2)))
    assert (await parts.select(selecting("b"))).rank.worker_id == 2
    parts.registered.register(view(worker(1), worker(2)))
    assert parts.load(1)[2] == 1
    parts.registered.register(view(worker(2)))
    parts.bookings.free(FreeRequest(booking=key("a")))
    pool = parts.pools.get(POOL)
    assert pool is not None
    assert set(pool.booked_load.load_by_rank()) == {(2, 0)}


async def test_predictions_are_compared_with_reports_of_workers() -> None:
    parts = Parts(view(worker(1)), indexer=ResidentBlocks({(1, 0): 4}))
    # Of four cached blocks an engine computes the last again.
    for name, reported in (("exact", 3), ("low", 4), ("high", 1)):
        await parts.select(selecting(name, routing(4)))
        parts.bookings.free(FreeRequest(booking=key(name), cached_tokens=reported * BLOCK))
        assert parts.figure("kvrouter_scheduler_predictions_total", verdict=name) == 1
    assert parts.figure("kvrouter_scheduler_predicted_cached_blocks_total", model=MODEL) == 9
    assert parts.figure("kvrouter_scheduler_actual_cached_blocks_total", model=MODEL) == 8
    # Neither a request without a prediction nor one without a report is judged.
    parts.indexer = None
    await parts.select(selecting("x"))
    parts.bookings.free(FreeRequest(booking=key("x"), cached_tokens=0))
    assert parts.figure("kvrouter_scheduler_cached_blocks_off_count") == 3


async def test_a_lease_runs_out_and_is_counted() -> None:
    parts = Parts(view(worker(1)))
    await parts.select(selecting("a", lease_ms=5000))
    parts.now += 4
    parts.bookings.mark_prefill_complete(MarkPrefillCompleteRequest(booking=key("a")))
    parts.now += 4.9
    parts.updates.expire()
    assert parts.load(1)[2] == 1
    parts.now += 0.1
    parts.updates.expire()
    assert parts.idle()
    assert parts.figure("kvrouter_scheduler_expired_leases_total") == 1


async def test_what_the_best_ranks_had_cached_is_counted() -> None:
    held = ResidentBlocks({(1, 0): 1, (2, 0): 3, (3, 0): 4})
    parts = Parts(view(worker(1), worker(2), worker(3)), indexer=held)
    await parts.select(selecting("a", routing(5, constraints=constraints(worker_id=1))))
    await parts.select(selecting("b", routing(5, constraints=constraints(excluded_worker_ids=[3]))))

    def cached(rank: str) -> float:
        return parts.figure("kvrouter_scheduler_cached_tokens_total", model=MODEL, rank=rank) / BLOCK

    assert (cached("chosen"), cached("eligible"), cached("any")) == (1 + 3, 1 + 3, 4 + 4)
    parts.indexer = None
    await parts.select(selecting("c", routing(5)))
    assert cached("any") == 8, "without an answer of an Indexer nothing is known"
