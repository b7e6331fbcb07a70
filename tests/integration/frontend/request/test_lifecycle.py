"""Whatever ends a request, its load is freed; and a worker that fails costs an attempt, not the request."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import RoutingConstraints
from kvrouter.v1.errors import DeadlineExceeded, WorkerLost
from kvrouter.v1.worker_pb2 import FinishReason, StopConditions

from ....hostile_worker import registered_beside
from ....waiting import until
from ..gateway import System, request, running_system

LONG = StopConditions(max_tokens=3000)


async def test_a_request_streams_and_is_freed(system: System) -> None:
    await system.start_worker(1)
    pieces = await system.answer()
    assert sum(len(piece.output.token_ids) for piece in pieces) == 4
    assert pieces[0].routing.rank.worker_id == 1
    assert pieces[0].routing.request_id
    assert pieces[0].output.HasField("cached_tokens")
    assert not any(piece.HasField("routing") for piece in pieces[1:])
    assert pieces[-1].output.finish_reason == FinishReason.FINISH_REASON_LENGTH
    await system.until_idle()


async def test_load_is_booked_while_a_request_runs_and_its_prefill_ends_at_the_first_token(system: System) -> None:
    await system.start_worker(1, clock_factor=2.0)
    async with aclosing(system.client.generate(request(stop_conditions=LONG), deadline=Deadline.after(30))) as pieces:
        first = await anext(pieces)
        assert first.output.token_ids
        async with asyncio.timeout(30):
            while (load := (await system.loads())[1]).potential_prefill_tokens > 1:
                await asyncio.sleep(0.01)
        assert load.active_requests == 1
        assert load.potential_decode_blocks >= 100 // 16
    await system.until_idle()


async def test_a_client_that_goes_away_frees_its_load_and_aborts_its_request(system: System) -> None:
    worker = await system.start_worker(1, clock_factor=2.0)
    async with aclosing(system.client.generate(request(stop_conditions=LONG), deadline=Deadline.after(60))) as pieces:
        await anext(pieces)
    await system.until_idle()
    await until(lambda: worker.stats().requests == 0)


async def test_a_client_that_goes_away_before_the_first_token_frees_its_load(system: System) -> None:
    worker = await system.start_worker(1, clock_factor=0.01)

    async def ask() -> None:
        async with aclosing(system.client.generate(request(), deadline=Deadline.after(60))) as pieces:
            await anext(pieces)

    asking = asyncio.create_task(ask())
    await until(lambda: worker.stats().requests == 1)
    asking.cancel()
    await asyncio.wait([asking])
    await system.until_idle()
    await until(lambda: worker.stats().requests == 0)


async def test_a_deadline_ends_the_request_and_frees_its_load(system: System) -> None:
    worker = await system.start_worker(1, clock_factor=0.01)
    with pytest.raises(DeadlineExceeded):
        async for _ in system.client.generate(request(), deadline=Deadline.after(1)):
            pass
    await system.until_idle()
    await until(lambda: worker.stats().requests == 0)


async def test_a_worker_that_dies_before_the_first_token_costs_an_attempt(system: System) -> None:
    slow = await system.start_worker(1, clock_factor=0.001)
    answer = asyncio.create_task(system.answer())
    await until(lambda: slow.stats().requests == 1)
    await system.start_worker(2)
    await system.stop_worker(1)
    pieces = await answer
    routed = [piece.routing for piece in pieces if piece.HasField("routing")]
    assert [(info.rank.worker_id, info.attempt) for info in routed] == [(2, 1)]
    assert sum(len(piece.output.token_ids) for piece in pieces) == 4
    await system.until_idle()


async def test_a_worker_that_vanished_before_the_dispatch_costs_an_attempt(
    nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    # A probe would find it away before a request does.
    async with running_system(nats_url, etcd_endpoint, namespace, worker_probe_seconds=3600.0) as system:
        await system.start_worker(1)
        view = next(iter(system.runtime.directory.components.values()))
        async with registered_beside(view, etcd_endpoint, 2, "127.0.0.1:1"):
            await system.until_candidate(2)
            answers = [await system.answer() for _ in range(4)]
        assert {pieces[0].routing.rank.worker_id for pieces in answers} == {1}
        assert 1 in {pieces[0].routing.attempt for pieces in answers}
        await system.until_idle()


async def test_a_worker_that_dies_later_ends_the_request(system: System) -> None:
    await system.start_worker(1, clock_factor=1.0)
    await system.start_worker(2, clock_factor=1.0)
    pinned = RoutingConstraints(worker_id=1)
    stream = system.client.generate(request(stop_conditions=LONG, constraints=pinned), deadline=Deadline.after(60))
    async with aclosing(stream) as pieces:
        await anext(pieces)
        stopping = asyncio.create_task(system.stop_worker(1))
        with pytest.raises(WorkerLost) as caught:
            async for _ in pieces:
                pass
        await stopping
    assert caught.value.code.name == "UNAVAILABLE"
    await system.until_idle()


async def test_a_pinned_request_is_not_tried_elsewhere(system: System) -> None:
    slow = await system.start_worker(1, clock_factor=0.001)
    await system.start_worker(2)
    pinned = request(constraints=RoutingConstraints(worker_id=1))
    answer = asyncio.create_task(system.answer(pinned))
    await until(lambda: slow.stats().requests == 1)
    await system.stop_worker(1)
    with pytest.raises(WorkerLost):
        await answer
    await system.until_idle()


async def test_a_hundred_requests_dropped_at_once_leave_nothing(system: System) -> None:
    worker = await system.start_worker(1, clock_factor=0.05)
    asking = [asyncio.create_task(system.answer(request(stop_conditions=LONG))) for _ in range(100)]
    await until(lambda: worker.stats().requests > 50)
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)
    await system.until_idle()
    await until(lambda: worker.stats().requests == 0)
