"""Queued requests: which requests wait, what ends the wait, and how the queue is reported."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kvrouter.runtime.deadline import Deadline
from kvrouter.scheduler.policies.forecast import policy as forecast
from kvrouter.scheduler.queue import queued_requests as queued
from kvrouter.scheduler.queue.queued_requests import QueuedRequests
from kvrouter.scheduler.queue.request_queue import PATIENCE_S
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.v1.common_pb2 import BookingKey
from kvrouter.v1.errors import (
    AllBusy,
    DeadlineExceeded,
    Internal,
    KvRouterError,
    NotReady,
    NoWorkers,
    RequestIdReused,
    TooLarge,
)
from kvrouter.v1.scheduler_pb2 import (
    FreeRequest,
    MarkPrefillCompleteRequest,
    QueueStatus,
    SelectWorkerRequest,
    SelectWorkerResponse,
)

from ....waiting import until
from ..api.session_client import opened
from ..harness import BLOCK, POOL, Parts, ResidentBlocks, routing, selecting, view, worker

FORECAST = RoutingOptions("forecast")


def parts_of(total_blocks: int = 10, **fields: Any) -> Parts:
    """One worker; of requests of 4 blocks, two fit on it."""
    return Parts(view(worker(1, total_blocks=total_blocks)), options=FORECAST, **fields)


def request(name: str, **fields: Any) -> SelectWorkerRequest:
    """4 blocks that no other request has."""
    return selecting(name, routing(4, seed=sum(name.encode())), **fields)


def queue(parts: Parts) -> QueuedRequests:
    return parts.queued


def status(parts: Parts) -> QueueStatus:
    return queue(parts).status(POOL, listed=10)


def look(parts: Parts, *, after: float = 1.0) -> None:
    parts.now += after
    queue(parts).look()


def free(parts: Parts, name: str) -> None:
    parts.bookings.free(FreeRequest(booking=BookingKey(request_id=name)))


def outcomes(parts: Parts, outcome: str) -> float:
    return parts.figure("kvrouter_scheduler_queued_requests_total", outcome=outcome)


@asynccontextmanager
async def waiting(
    parts: Parts, *requests: SelectWorkerRequest
) -> AsyncIterator[list[asyncio.Task[SelectWorkerResponse]]]:
    """A full worker, and requests that are queued for it, in this order."""
    for name in ("x", "y"):
        await parts.select(request(name))
    tasks: list[asyncio.Task[SelectWorkerResponse]] = []
    try:
        for number, each in enumerate(requests, start=1):
            tasks.append(asyncio.create_task(parts.select(each)))
            await until(lambda number=number: status(parts).requests == number or tasks[-1].done())  # type: ignore[misc]
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_requests_are_accounted_for_until_their_end_when_the_block_size_changes() -> None:
    parts = parts_of(total_blocks=100)
    await parts.select(request("x"))
    before = parts.pools.named(POOL.namespace, POOL.name)
    parts.registered.register(view(worker(1, total_blocks=100), block_size=2 * BLOCK))
    await parts.select(request("y"))
    after = parts.pools.named(POOL.namespace, POOL.name)
    assert after is not before
    assert after.headroom.used("") > 0
    free(parts, "x")
    free(parts, "y")
    assert (before.headroom.used(""), after.headroom.used("")) == (0, 0)


async def test_one_without_room_waits_until_another_ends() -> None:
    parts = parts_of()
    async with waiting(parts, request("a")) as [queued_one]:
        look(parts)
        assert not queued_one.done()
        assert parts.load(1)[2] == 2
        free(parts, "x")
        look(parts)
        answer = await queued_one
        assert (answer.rank.worker_id, answer.queued_us, answer.prefill_tokens) == (1, 2_000_000, 64)
        assert parts.load(1)[2] == 2
        assert outcomes(parts, "room") == 1
    assert status(parts) == QueueStatus(capacity=100, released=1)


async def test_what_ends_wakes_the_one_that_waits() -> None:
    parts = parts_of()
    async with waiting(parts, request("a")) as [queued_one], asyncio.TaskGroup() as group:
        running = group.create_task(queue(parts).run())
        free(parts, "x")
        async with asyncio.timeout(10):
            await queued_one
        running.cancel()


async def test_one_that_is_refused_when_its_patience_ends_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of()
    async with waiting(parts, request("a"), request("b")) as [first, second]:
        settle, failing = parts.router.settle, iter([True])

        def fail_once(*given: Any, **options: Any) -> SelectWorkerResponse:
            if next(failing, False):
                raise TooLarge("no more bookings are possible")
            return settle(*given, **options)

        monkeypatch.setattr(parts.router, "settle", fail_once)
        look(parts, after=PATIENCE_S)
        with pytest.raises(TooLarge):
            await first
        look(parts)
        assert (await second).rank.worker_id == 1


async def test_a_start_releases_the_next_request_whose_patience_has_ended() -> None:
    parts = parts_of()
    async with waiting(parts, request("a"), request("b")) as [first, second], asyncio.TaskGroup() as group:
        parts.now += PATIENCE_S
        running = group.create_task(queue(parts).run())
        async with asyncio.timeout(10):
            await first
            parts.now += 1
            parts.bookings.mark_prefill_complete(MarkPrefillCompleteRequest(booking=BookingKey(request_id="a")))
            await second
        running.cancel()


async def test_a_full_queue_is_all_busy_at_once() -> None:
    parts = parts_of(max_queued_requests=1)
    async with waiting(parts, request("a")):
        with pytest.raises(AllBusy) as caught:
            await parts.select(request("b"))
        assert caught.value.info.retry_after_ms > 0
        assert status(parts).refused_full == outcomes(parts, "full") == 1


async def test_one_that_cannot_make_its_deadline_is_refused_at_once() -> None:
    parts = parts_of()
    async with waiting(parts):
        with pytest.raises(DeadlineExceeded):
            await parts.select(request("a", time_left_ms=2))
        with pytest.raises(DeadlineExceeded):
            await parts.selector.select(request("b"), deadline=Deadline.after(0.002))
        assert status(parts).refused_late == outcomes(parts, "late") == 2
    assert parts.load(1)[2] == 2


async def test_one_that_waited_too_long_for_its_deadline_is_refused() -> None:
    parts = parts_of()
    async with waiting(parts, request("a", time_left_ms=5000)) as [queued_one]:
        look(parts, after=4.0)
        assert not queued_one.done()
        look(parts, after=0.999)
        with pytest.raises(DeadlineExceeded):
            await queued_one
    assert not len(queue(parts))


async def test_patience_ends() -> None:
    parts = parts_of()
    async with waiting(parts, request("a"), request("b")) as [first, second]:
        look(parts, after=PATIENCE_S)
        assert (await first).rank.worker_id == 1
        look(parts)
        assert len(queue(parts)) == 1, "the next one goes when this one has started"
        parts.bookings.mark_prefill_complete(MarkPrefillCompleteRequest(booking=BookingKey(request_id="a")))
        look(parts)
        await second
        assert outcomes(parts, "patience") == 2


async def test_a_caller_that_goes_away_takes_its_request_along() -> None:
    parts = parts_of()
    async with waiting(parts, request("a")) as [queued_one]:
        queued_one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued_one
        free(parts, "x")
        look(parts)
        assert (parts.load(1)[2], len(queue(parts)), outcomes(parts, "cancelled")) == (1, 0, 1)


async def test_one_booked_in_the_moment_of_its_cancel_is_answered_so_that_it_can_be_freed() -> None:
    parts = parts_of()
    async with waiting(parts, request("a")) as [queued_one]:
        free(parts, "x")
        look(parts)
        queued_one.cancel()
        assert (await queued_one).rank.worker_id == 1


async def test_a_retry_joins_the_wait() -> None:
    parts = parts_of()
    async with waiting(parts, request("a")) as [queued_one]:
        retry = asyncio.create_task(parts.select(request("a")))
        await asyncio.sleep(0)
        free(parts, "x")
        look(parts)
        assert [(await queued_one).repeated, (await retry).repeated] == [False, True]
        assert parts.load(1)[2] == 2


async def test_a_retry_continues_to_wait_when_the_first_call_is_cancelled() -> None:
    parts = parts_of()
    async with waiting(parts, request("a")) as [queued_one]:
        retry = asyncio.create_task(parts.select(request("a")))
        await asyncio.sleep(0)
        queued_one.cancel()
        await until(lambda: queued_one.done() and len(queue(parts)) == 1)
        free(parts, "x")
        look(parts)
        assert not (await retry).repeated


@pytest.mark.parametrize("transport", ["rpc", "call stream"])
async def test_a_queued_call_of_a_session_can_be_cancelled_and_ends_with_its_connection(transport: str) -> None:
    parts = parts_of()
    async with waiting(parts):
        async with opened(parts, transport) as client:
            calls = [asyncio.create_task(client.select(name, request=request(name).request)) for name in "ab"]
            await until(lambda: len(queue(parts)) == 2)
            calls[0].cancel()
            await until(lambda: len(queue(parts)) == 1)
            assert [each.request_id for each in status(parts).longest] == ["b"]
        await until(lambda: not len(queue(parts)))
        await asyncio.wait(calls)
        assert isinstance(calls[1].exception(), KvRouterError)
    assert parts.load(1)[2] == 2


async def test_a_request_that_is_freed_while_queued_is_not_booked() -> None:
    parts = parts_of()
    async with waiting(parts, request("a")) as [queued_one]:
        free(parts, "a")
        free(parts, "x")
        look(parts)
        with pytest.raises(RequestIdReused, match="freed already"):
            await queued_one
        assert outcomes(parts, "refused") == 1


async def test_without_a_worker_nobody_waits() -> None:
    parts = parts_of()
    async with waiting(parts, request("a")) as [queued_one]:
        parts.registered.register(view())
        look(parts)
        with pytest.raises(NoWorkers):
            await queued_one


async def test_a_worker_that_joins_takes_one_that_waits() -> None:
    parts = parts_of()
    async with waiting(parts, request("a")) as [queued_one]:
        parts.registered.register(view(worker(1, total_blocks=10), worker(2)))
        look(parts)
        assert (await queued_one).rank.worker_id == 2


async def test_one_that_the_policy_fails_on_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of()
    async with waiting(parts, request("a"), request("bb")) as [first, second]:
        free(parts, "x")
        decide, failing = forecast.ForecastPolicy.decide, iter([True])

        def fail_once(self: forecast.ForecastPolicy, *given: Any) -> Any:
            if next(failing, False):
                raise ZeroDivisionError
            return decide(self, *given)

        monkeypatch.setattr(forecast.ForecastPolicy, "decide", fail_once)
        look(parts)
        with pytest.raises(Internal):
            await first
        assert (await second).rank.worker_id == 1


async def test_overlaps_are_queried_again_and_kept_if_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued, "FRESH_S", 0.001)
    parts = parts_of(indexer=ResidentBlocks())
    assert parts.indexer is not None
    async with waiting(parts, request("a")) as [queued_one]:
        parts.indexer.queued = {(1, 0): 3}
        queries = len(parts.indexer.queries)
        await until(lambda: len(parts.indexer.queries) > queries + 1)  # type: ignore[union-attr]
        parts.indexer.failure = NotReady("not yet")
        queries = len(parts.indexer.queries)
        await until(lambda: len(parts.indexer.queries) > queries + 1)  # type: ignore[union-attr]
        free(parts, "x")
        look(parts)
        answer = await queued_one
        assert (answer.overlap_blocks, answer.prefill_tokens, answer.load_only) == (3, 16, False)


async def test_depth_age_and_reason_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    parts = parts_of()
    moved = request("b", arrived_unix_ns=now - 7_000_000_000)
    async with waiting(parts, request("a"), moved):
        parts.now += 1
        announced = status(parts)
        assert (announced.requests, announced.capacity, announced.oldest_age_ms // 100) == (2, 100, 80)
        assert [(each.request_id, each.rank.worker_id) for each in announced.longest] == [("b", 1), ("a", 1)]
        assert "KV blocks" in announced.longest[0].reason
        assert queue(parts).waiting_for(POOL) == {(1, 0): 2}
        assert queue(parts).depths()[POOL].requests == 2
        kept = parts.decisions.by_request("a")
        assert kept is not None
        assert (kept.chosen, kept.explanation.reason[:20]) == (None, "queued for worker_1:")
        free(parts, "x")
        look(parts)
        kept = parts.decisions.by_request("b")  # it arrived first
        assert kept is not None
        assert (kept.chosen, kept.queued_seconds) == ((1, 0), 2.0)


async def test_a_request_without_a_booking_is_not_queued() -> None:
    parts = parts_of()
    async with waiting(parts):
        assert (await parts.select(selecting(None, routing(4, seed=9)))).rank.worker_id == 1
