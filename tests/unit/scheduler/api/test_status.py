"""The Scheduler's status: load, busy and hits of every rank, and the last decisions."""

from __future__ import annotations

import time

import pytest
from kvrouter.runtime.overview.services import ServiceQueries
from kvrouter.scheduler.api.status import Status
from kvrouter.scheduler.request.options import RoutingOptions, Thresholds
from kvrouter.v1.common_pb2 import AvoidedWorker, BookingKey, Component, RoutingConstraints
from kvrouter.v1.errors import UnknownComponent
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import FreeRequest, GetStatusRequest, GetStatusResponse, RankStatus

from ..harness import BLOCK, Parts, ResidentBlocks, routing, selecting, view, worker


def ask(parts: Parts, **fields: object) -> GetStatusResponse:
    status = Status(
        parts.pools,
        parts.booking_ownership,
        parts.decisions,
        parts.board,
        parts.queued,
        scheduler_id="s",
        mode=parts.options.mode,
        clock=lambda: parts.now,
    )
    return status.answer(GetStatusRequest(**fields), ready=True)


def ranks(parts: Parts) -> list[RankStatus]:
    return list(ask(parts).components[0].ranks)


async def test_load_is_shown_rank_by_rank_with_what_makes_it_busy() -> None:
    options = RoutingOptions("kv", thresholds=Thresholds(prefill_tokens=4 * BLOCK - 1))
    parts = Parts(view(worker(1), worker(2, total_blocks=50)), options=options)
    chosen = await parts.select(selecting("a"))
    component = ask(parts).components[0]
    assert (component.model, component.block_size, component.mode) == ("m", BLOCK, "kv")
    assert component.thresholds.active_prefill_tokens_threshold == 4 * BLOCK - 1
    announced = {each.rank.worker_id: each for each in component.ranks}
    loaded, idle = announced[chosen.rank.worker_id], announced[3 - chosen.rank.worker_id]
    assert (loaded.active_blocks, loaded.prefill_tokens, loaded.active_requests) == (4, 4 * BLOCK, 1)
    assert "prefill tokens" in loaded.busy
    assert (idle.active_blocks, idle.active_requests, idle.busy) == (0, 0, "")
    assert (announced[1].total_blocks, announced[2].total_blocks) == (100, 50)
    assert announced[1].registered
    assert announced[1].endpoint == "host:1"
    assert not announced[1].HasField("reported")


async def test_a_rank_that_left_is_shown_for_as_long_as_it_is_booked() -> None:
    parts = Parts(view(worker(1)))
    await parts.select(selecting("a"))
    parts.registered.register(view())
    assert [(each.registered, each.active_blocks, each.endpoint) for each in ranks(parts)] == [(False, 4, "")]
    parts.bookings.free(FreeRequest(booking=BookingKey(request_id="a")))
    assert ranks(parts) == []


async def test_sums_are_those_of_the_registered_ranks_with_the_hits_of_all() -> None:
    parts = Parts(view(worker(1), worker(2, total_blocks=50)))
    await parts.select(selecting("a"))
    parts.bookings.free(FreeRequest(booking=BookingKey(request_id="a"), cached_tokens=BLOCK))
    await parts.select(selecting("b"))
    (component,) = ask(parts, sums=True).components
    assert not component.ranks
    each = [rank.cache_hits for rank in ranks(parts)]
    assert component.sums.cache_hits.requests == sum(hits.requests for hits in each) == 1
    assert component.sums.cache_hits.prompt_tokens == sum(hits.prompt_tokens for hits in each) > 0
    assert (component.sums.total_blocks, component.sums.active_blocks, component.sums.active_requests) == (150, 4, 1)
    before = component.sums.cache_hits
    parts.registered.register(view())
    (component,) = ask(parts, sums=True).components
    assert (component.sums.cache_hits, component.sums.total_blocks) == (before, 0), "hits on ranks that have left"


async def test_sums_of_the_largest_caches_fit() -> None:
    parts = Parts(view(*(worker(each, total_blocks=(1 << 63) - 1) for each in range(1, 5))))
    (component,) = ask(parts, sums=True).components
    assert component.sums.total_blocks == (1 << 64) - 1


@pytest.mark.parametrize("most", [1, 2, 3, 100])
async def test_an_overview_of_pages_equals_the_whole(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(
        view(*map(worker, (1, 2, 10))),
        view(worker(1), worker(3), name=ComponentName("ns", "pool-2"), model="other"),
        view(name=ComponentName("ns", "empty"), model="empty"),
    )
    for request_id in ("a", "b"):
        await parts.select(selecting(request_id))
    whole = ask(parts, decisions=50, queued_requests=5)
    names = ["ns/empty", "ns/pool", "ns/pool-2"]
    assert [f"{each.component.namespace}/{each.component.name}" for each in whole.components] == names
    monkeypatch.setattr("kvrouter.v1.pages.MAX_PAGE", most)
    queries = ServiceQueries(
        lambda kind: ["s:1"] if kind == "scheduler" else [],
        note=str,
        tls=lambda: None,
        local={"s:1": parts.service()},
    )
    (seen,) = (await queries.look()).schedulers
    assert seen.status is not None
    assert list(seen.status.components) == list(whole.components)
    assert [each.decision_id for each in seen.status.decisions] == [each.decision_id for each in whole.decisions]


async def test_a_rank_that_is_slower_than_its_component_is_shown_so() -> None:
    parts = Parts(view(worker(1), worker(2), worker(3)))
    calibration = next(iter(parts.pools)).booked_load.latency_calibration
    speeds = [calibration.speed((worker_id, 0), 0.0) for worker_id in (1, 2, 3)]
    for _ in range(50):
        for measured_ms, speed in zip((100.0, 100.0, 300.0), speeds, strict=True):
            calibration.learn(measured_ms, 100.0, speed, time.monotonic())
    fast, _, slow = ranks(parts)
    assert slow.relative_latency > 1.5 > 1.0 > fast.relative_latency
    parts.registered.register(view(worker(1), worker(2), worker(3, incarnation=2)))
    assert [each.relative_latency for each in ranks(parts)] == [1.0] * 3


async def test_hits_are_summed_as_predicted_and_as_reported() -> None:
    parts = Parts(view(worker(1)), indexer=ResidentBlocks({(1, 0): 4}))
    for request_id, cached in (("a", 3 * BLOCK), ("b", 0), ("says nothing", None)):
        await parts.select(selecting(request_id))
        parts.bookings.free(FreeRequest(booking=BookingKey(request_id=request_id), cached_tokens=cached))
    hits = ranks(parts)[0].cache_hits
    assert (hits.requests, hits.prompt_tokens, hits.cached_tokens) == (2, 8 * BLOCK, 3 * BLOCK)
    # The block of the last token is computed even where it is cached.
    assert (hits.predicted_prompt_tokens, hits.predicted_cached_tokens) == (8 * BLOCK, 6 * BLOCK)


async def test_what_any_rank_held_is_summed_beside_what_the_chosen_one_held() -> None:
    parts = Parts(view(worker(1), worker(2)), indexer=ResidentBlocks({(1, 0): 4}))
    elsewhere = RoutingConstraints(excluded_worker_ids=[1])
    for request_id, constraints in (("a", None), ("b", elsewhere)):
        await parts.select(selecting(request_id, routing(constraints=constraints)))
        parts.bookings.free(FreeRequest(booking=BookingKey(request_id=request_id), cached_tokens=0))
    hits = [each.cache_hits for each in ranks(parts)]
    assert [each.predicted_cached_tokens for each in hits] == [3 * BLOCK, 0]
    assert [each.reachable_cached_tokens for each in hits] == [3 * BLOCK, 3 * BLOCK]


async def test_what_failed_workers_held_was_not_possible_and_what_was_found_was() -> None:
    parts = Parts(view(worker(1), worker(2)), indexer=ResidentBlocks({(1, 0): 4}))
    avoided = RoutingConstraints(avoided_workers=[AvoidedWorker(worker_id=1)])
    for request_id, cached in (("a", 0), ("b", 2 * BLOCK)):
        await parts.select(selecting(request_id, routing(constraints=avoided)))
        parts.bookings.free(FreeRequest(booking=BookingKey(request_id=request_id), cached_tokens=cached))
    retried = selecting("c", routing(constraints=RoutingConstraints(excluded_worker_ids=[1])))
    retried.booking.attempt = 1
    await parts.select(retried)
    parts.bookings.free(FreeRequest(booking=BookingKey(request_id="c", attempt=1), cached_tokens=0))
    assert [each.cache_hits.reachable_cached_tokens for each in ranks(parts)] == [0, 2 * BLOCK]


async def test_hits_are_shown_without_predictions() -> None:
    parts = Parts(view(worker(1)), options=RoutingOptions(mode="random"))
    await parts.select(selecting("a"))
    parts.bookings.free(FreeRequest(booking=BookingKey(request_id="a"), cached_tokens=2 * BLOCK))
    hits = ranks(parts)[0].cache_hits
    assert (hits.requests, hits.cached_tokens, hits.predicted_prompt_tokens) == (1, 2 * BLOCK, 0)


async def test_the_requested_number_of_decisions_is_returned() -> None:
    parts = Parts(view(worker(1), worker(2), worker(3)))
    for number in range(3):
        await parts.select(selecting(f"r{number}", routing(seed=number)))
    assert list(ask(parts).decisions) == []
    newest = ask(parts, decisions=2).decisions
    assert [each.request_id for each in newest] == ["r2", "r1"]
    assert [len(each.candidates) for each in newest] == [2, 2]
    assert len(ask(parts, decisions=1000).decisions) == 3
    assert ask(parts).bookings == 3


async def test_an_unknown_component_is_refused() -> None:
    with pytest.raises(UnknownComponent):
        ask(Parts(view(worker(1))), component=Component(namespace="ns", name="elsewhere"))
