"""Several decode pools of one model, which come and go."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import BookingKey, RoutingConstraints, RoutingOverrides, RoutingRequest, TokenIds
from kvrouter.v1.errors import AllBusy
from kvrouter.v1.frontend_pb2 import FrontendServiceSelectWorkerRequest
from kvrouter.v1.scheduler_pb2 import GetStatusRequest

from ....hostile_worker import aborts, piece
from ..gateway import MODEL
from .fleet import DECODE, PREFILL, Fleet, running_fleet

A, B = "decode-a", "decode-b"


@pytest.fixture
async def fleet(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[Fleet]:
    async with running_fleet(nats_url, etcd_endpoint, namespace, router_mode="forecast") as running:
        yield running


@pytest.mark.parametrize("mode", ["forecast", "kv"])
async def test_a_request_goes_to_the_pool_that_holds_its_prompt(fleet: Fleet, mode: str) -> None:
    await fleet.start(1, DECODE, component=A)
    await fleet.start(2, DECODE, component=A)
    await fleet.start(3, DECODE, component=B, block_size=32)
    pinned = await fleet.serve(320, constraints=RoutingConstraints(worker_id=3))
    assert pinned.routing[0].component.name == B
    for more in (10, 20, 30):
        await fleet.until_idle()
        again = (await fleet.serve(320 + more, overrides=RoutingOverrides(mode=mode))).routing[0]
        assert (again.rank.worker_id, again.predicted_overlap_blocks) == (3, 10)
    await fleet.until_idle()


async def test_load_is_shared_among_the_pools(fleet: Fleet) -> None:
    await fleet.start(1, DECODE, component=A)
    await fleet.start(2, DECODE, component=B)
    used = []
    for number in range(4):
        prompt = TokenIds(ids=range(1000 * number, 1000 * number + 200))
        # The cost of mode kv does not depend on the time that passes here.
        request = RoutingRequest(model=MODEL, token_ids=prompt, overrides=RoutingOverrides(mode="kv"))
        booked = FrontendServiceSelectWorkerRequest(request=request, booking=BookingKey(request_id=str(number)))
        answer = await fleet.system.client.select_worker(booked, deadline=Deadline.after(10))
        used.append(answer.selection.component.name)
    assert sorted(used[:2]) == sorted(used[2:]) == [A, B]


async def test_comparing_pools_leaves_no_trace_in_the_decisions(fleet: Fleet) -> None:
    await fleet.start(1, DECODE, component=A)
    await fleet.start(2, DECODE, component=B)
    for _ in range(3):
        await fleet.serve()
    status = await fleet.system.scheduler.get_status(GetStatusRequest(decisions=100), deadline=Deadline.after(10))
    assert len([each for each in status.decisions if each.request_id]) == len(status.decisions) == 3


async def test_pools_come_and_go_in_any_order(fleet: Fleet) -> None:
    await fleet.start(1, PREFILL, component="prefill-a")
    await fleet.start(2, DECODE, component=A)
    assert (await fleet.serve()).routing[0].component.name == A
    await fleet.start(3, DECODE, component=B)
    await fleet.stop(2)
    alone = await fleet.serve(first=1000)
    assert (alone.routing[0].component.name, alone.prefill) == (B, 1)
    await fleet.start(4, PREFILL, component="prefill-b")
    await fleet.stop(1)
    assert (await fleet.serve(first=2000)).prefill == 4
    await fleet.start(2, DECODE, component=A)
    await fleet.stop(3)
    last = await fleet.serve(first=3000)
    assert (last.routing[0].component.name, last.prefill) == (A, 4)
    await fleet.until_idle()


async def test_a_request_of_a_failed_pool_continues_in_another_one(fleet: Fleet) -> None:
    await fleet.start(1, DECODE, component=A, block_size=32)
    await fleet.start(2, DECODE, component=B)

    async def breaks(context: object) -> None:
        await context.write(piece(7, 8))  # type: ignore[attr-defined]
        await aborts(grpc.StatusCode.UNAVAILABLE)(context)

    async with fleet.hostile(3, B, breaks) as worker:
        await fleet.stop(2)
        served = await fleet.serve_until_called(worker)
        assert (served.tokens[:2], len(served.tokens)) == ([7, 8], 4)
        assert [each.component.name for each in served.routing] == [B, A]
        await fleet.until_idle()


async def test_a_pool_whose_workers_are_busy_leaves_requests_to_the_others(fleet: Fleet) -> None:
    await fleet.start(1, DECODE, component=A, num_blocks=64)
    await fleet.start(2, DECODE, component=B)
    await _book(fleet, 1)
    full = RoutingOverrides(active_decode_blocks_threshold=0.3)
    assert (await fleet.serve(first=5000, overrides=full)).routing[0].component.name == B
    nothing = RoutingOverrides(active_decode_blocks_threshold=0.0)
    await _book(fleet, 2)
    with pytest.raises(AllBusy):
        await fleet.serve(first=7000, overrides=nothing)


async def test_a_prompt_goes_to_the_pool_whose_workers_take_its_length(fleet: Fleet) -> None:
    await fleet.start(1, DECODE, component=A, max_model_len=128)
    await fleet.start(2, DECODE, component=A, max_model_len=128)
    await fleet.start(3, DECODE, component=B, max_model_len=2048)
    assert (await fleet.serve(1000)).routing[0].rank.worker_id == 3


async def test_labels_choose_the_pool(fleet: Fleet) -> None:
    await fleet.start(1, DECODE, component=A, labels={"zone": "a"})
    await fleet.start(2, DECODE, component=B, labels={"zone": "b"})
    for number, (zone, worker_id) in enumerate([("a", 1), ("b", 2), ("a", 1), ("b", 2)]):
        labels = RoutingConstraints(required_labels={"zone": zone})
        served = await fleet.serve(first=1000 * number, constraints=labels)
        assert served.routing[0].rank.worker_id == worker_id


async def test_best_worker_compares_the_pools_of_a_model(fleet: Fleet) -> None:
    await fleet.start(1, DECODE, component=A)
    await fleet.start(2, DECODE, component=B)
    await fleet.serve(320, constraints=RoutingConstraints(worker_id=2))
    await fleet.until_idle()
    request = FrontendServiceSelectWorkerRequest(
        request=RoutingRequest(model=MODEL, token_ids=TokenIds(ids=range(320)))
    )
    for _ in range(4):
        answer = await fleet.system.client.select_worker(request, deadline=Deadline.after(10))
        assert answer.selection.rank.worker_id == 2
        assert answer.selection.overlap_blocks == 19, "the last block is computed again"


async def _book(fleet: Fleet, worker_id: int) -> None:
    """Books a prompt of 600 tokens, which no engine gets to end it."""
    pinned = RoutingConstraints(worker_id=worker_id)
    request = RoutingRequest(model=MODEL, token_ids=TokenIds(ids=range(600)), constraints=pinned)
    booked = FrontendServiceSelectWorkerRequest(request=request, booking=BookingKey(request_id=str(worker_id)))
    await fleet.system.client.select_worker(booked, deadline=Deadline.after(10))
