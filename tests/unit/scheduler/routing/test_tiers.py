"""Blocks below device memory: what routing makes of them, in each mode, and what a response says of them."""

from __future__ import annotations

import pytest
from kvrouter.runtime.deadline import Deadline
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.overlap.indexer_query import read_answer
from kvrouter.scheduler.policies.forecast.policy import PREFILL_N1_MS
from kvrouter.scheduler.request.options import RoutingOptions, TierOptions
from kvrouter.v1.common_pb2 import KvSource, LowerTiers, Rank, Tier
from kvrouter.v1.indexer_pb2 import FindMatchesResponse
from kvrouter.v1.registry_pb2 import StorageTier
from kvrouter.v1.scheduler_pb2 import (
    FreeRequest,
    GetStatusRequest,
    MarkPrefillCompleteRequest,
    SelectWorkerResponse,
    TierTokens,
)

from ..harness import BLOCK, MODEL, POOL, Parts, ResidentBlocks, key, routing, selecting, view, worker

BLOCKS = 40


def parts(
    held: dict[int, tuple[int, int, int, int]],
    options: RoutingOptions | None = None,
    *,
    pooled: int = 0,
    reads: int = 0,
) -> Parts:
    """Workers with leading blocks down to device, host, disk and shared storage; one may read all of that."""
    device = {(number, 0): blocks[0] for number, blocks in held.items()}
    lower = {(number, 0): blocks[1:] for number, blocks in held.items()}
    workers = [worker(number, reads_shared_storage=number == reads) for number in held]
    indexer = ResidentBlocks(device, lower=lower, pooled=pooled)
    return Parts(view(*workers), options=options or RoutingOptions("kv"), indexer=indexer)


async def chosen(scheduler: Parts, name: str = "a", *, seed: int = 0) -> SelectWorkerResponse:
    return await scheduler.select(selecting(name, routing(BLOCKS, tail=1, seed=seed)))


def pool_of(scheduler: Parts) -> Pool:
    pool = scheduler.pools.get(POOL)
    assert pool is not None
    return pool


@pytest.mark.parametrize(
    ("held", "tiers", "saved"),
    [
        ((0, 20, 20, 20), TierOptions(), 15),
        ((4, 12, 24, 40), TierOptions(), 4 + 6 + 3 + 8),
        ((4, 12, 24, 40), TierOptions((0.0, 0.0, 1.0)), 4 + 16),
        ((7, 7, 7, 7), TierOptions(), 7),
    ],
)
async def test_kv_weighs_each_tier(held: tuple[int, int, int, int], tiers: TierOptions, saved: int) -> None:
    scheduler = parts({1: held}, RoutingOptions("kv", tiers=tiers))
    response = await chosen(scheduler)
    assert response.prefill_tokens == (BLOCKS - saved) * BLOCK + 1
    assert response.overlap_blocks == held[3], "what the engine finds, wherever it is"
    device, host, disk, shared = held
    lower = LowerTiers(host=host - device, disk=disk - host, shared=shared - disk)
    assert (response.lower_blocks if response.HasField("lower_blocks") else LowerTiers()) == lower
    assert response.HasField("lower_blocks") == (shared > device)


@pytest.mark.parametrize("mode", ["kv", "forecast", "product", "sticky"])
async def test_a_rank_that_can_load_the_prompt_is_preferred_to_one_without_it(mode: str) -> None:
    scheduler = parts({1: (0, 0, 0, 0), 2: (0, 40, 40, 40), 3: (0, 0, 0, 0)}, RoutingOptions(mode))
    assert (await chosen(scheduler)).rank.worker_id == 2


async def test_forecast_counts_a_load_by_its_time_relative_to_computation() -> None:
    options = RoutingOptions("forecast", tiers=TierOptions(load_gb_per_second=(20.0, 1.0, 10.0)))
    scheduler = parts({1: (0, 20, 40, 40)}, options)
    load_ms = 131_072 / 20e6
    saved = int(20 * (1 - load_ms / PREFILL_N1_MS))
    response = await chosen(scheduler)
    assert response.prefill_tokens == (BLOCKS - saved) * BLOCK + 1, "the disk takes longer than the computation"


async def test_the_time_of_loads_is_learned_from_first_tokens_by_rank_and_tier() -> None:
    scheduler = parts({1: (0, 40, 40, 40), 2: (0, 0, 0, 0)}, RoutingOptions("forecast"))
    load = pool_of(scheduler).booked_load
    loads, load.clock = load.tier_loads, lambda: scheduler.now
    fast, slow = 12.0, 400.0
    for milliseconds, above in ((fast, False), (slow, True)):
        for number in range(40):
            name = f"{milliseconds}{number}"
            request = selecting(name, routing(BLOCKS, tail=1))
            request.request.constraints.worker_id = 1
            await scheduler.select(request)
            scheduler.now += milliseconds / 1e3
            scheduler.bookings.mark_prefill_complete(MarkPrefillCompleteRequest(booking=key(name)))
            scheduler.bookings.free(FreeRequest(booking=key(name)))
        (of_loading, of_other), disk, shared = loads.factors(scheduler.now + 1).tolist()
        assert of_loading > 1 if above else of_loading < 0.5, milliseconds
        assert (of_other, disk, shared) == (1.0, [1.0, 1.0], [1.0, 1.0])
    assert load.latency_calibration.value == 1.0, "loads say nothing about computation"
    scheduler.now += 3600
    assert loads.factors(scheduler.now)[0][0] == pytest.approx(1.0, abs=1e-3), "it is tried again"


async def test_a_registered_bandwidth_counts_before_the_configured_one() -> None:
    slow = StorageTier(tier=Tier.TIER_HOST, load_gb_per_second=1.0)
    held = {(number, 0): 0 for number in (1, 2, 3)}
    indexer = ResidentBlocks(held, lower=dict.fromkeys(held, (40, 40, 40)))
    views = view(worker(1, storage_tiers=[slow]), worker(2), worker(3, storage_tiers=[slow]))
    scheduler = Parts(views, options=RoutingOptions("forecast"), indexer=indexer)
    response = await chosen(scheduler)
    assert response.rank.worker_id == 2
    assert response.prefill_tokens < BLOCKS * BLOCK, "at the configured bandwidth, loads save computation"


async def test_tokens_to_load_are_counted_by_tier() -> None:
    scheduler = parts({1: (4, 12, 24, 40)})
    await chosen(scheduler)
    counted = {
        tier: scheduler.figure("kvrouter_scheduler_lower_tier_tokens_total", model=MODEL, tier=tier)
        for tier in ("host", "disk", "shared")
    }
    assert counted == {"host": 8 * BLOCK, "disk": 12 * BLOCK, "shared": 16 * BLOCK}


async def test_predicted_tokens_by_tier_are_compared_with_those_that_the_worker_loaded() -> None:
    scheduler = parts({1: (4, 12, 24, 40)})
    await chosen(scheduler)
    loaded = LowerTiers(host=5 * BLOCK, shared=16 * BLOCK)
    scheduler.bookings.free(FreeRequest(booking=key("a"), cached_tokens=25 * BLOCK, lower_cached_tokens=loaded))
    audited = {
        (tier, source): scheduler.figure(
            "kvrouter_scheduler_audited_tier_tokens_total", model=MODEL, tier=tier, source=source
        )
        / BLOCK
        for tier in ("host", "disk", "shared")
        for source in ("predicted", "reported")
    }
    assert list(audited.values()) == [8, 5, 12, 0, 16, 16]
    hits = pool_of(scheduler).cache_hits.of((1, 0))
    assert hits.lower_cached_tokens == TierTokens(host=5 * BLOCK, shared=16 * BLOCK)
    assert hits.predicted_lower_tokens == TierTokens(host=8 * BLOCK, disk=12 * BLOCK, shared=16 * BLOCK)


@pytest.mark.parametrize("mode", ["kv", "forecast"])
async def test_decisions_count_the_share_that_workers_reuse(mode: str) -> None:
    scheduler = parts({1: (20, 20, 20, 20)}, RoutingOptions(mode))
    pool_of(scheduler).prediction_check.reuse_ratio = 0.26
    response = await chosen(scheduler)
    assert response.prefill_tokens == (BLOCKS - 5) * BLOCK + 1
    assert response.overlap_blocks == 20, "the prediction stays as it is, for the next comparison"
    status = await scheduler.service().get_status(GetStatusRequest(), deadline=Deadline.after(1))
    assert status.components[0].reuse_ratio == 0.26


async def test_blocks_in_shared_storage_count_for_every_rank_that_reads_it() -> None:
    scheduler = parts({1: (0, 0, 0, 0), 2: (3, 3, 3, 3), 3: (0, 0, 0, 0)}, pooled=30, reads=3)
    response = await chosen(scheduler)
    assert (response.rank.worker_id, response.overlap_blocks) == (3, 30)
    assert response.lower_blocks == LowerTiers(shared=30)


async def test_the_longest_prefix_of_another_rank_is_returned() -> None:
    scheduler = parts({1: (10, 10, 10, 10), 2: (0, 12, 12, 12), 3: (4, 4, 4, 4)})
    response = await chosen(scheduler)
    assert response.rank.worker_id == 1
    assert response.kv_source == KvSource(rank=Rank(worker_id=2), tier=Tier.TIER_HOST, blocks=12)
    decision = scheduler.decisions.newest(1)[0].to_message()
    assert decision.kv_source == response.kv_source
    assert decision.candidates[1].lower_blocks == LowerTiers(host=12)
    assert not decision.candidates[0].HasField("lower_blocks")


async def test_no_other_rank_is_returned_if_the_chosen_one_has_as_much() -> None:
    response = await chosen(parts({1: (10, 10, 10, 10), 2: (0, 10, 10, 10)}))
    assert response.rank.worker_id == 1
    assert not response.HasField("kv_source")


async def test_a_worker_that_may_be_dead_is_no_source() -> None:
    scheduler = parts({1: (10, 10, 10, 10), 2: (12, 12, 12, 12), 3: (11, 11, 11, 11)})
    request = selecting("a", routing(BLOCKS, tail=1))
    request.request.constraints.worker_id = 1
    request.request.constraints.excluded_worker_ids.append(2)
    assert (await scheduler.select(request)).kv_source.rank == Rank(worker_id=3)


def test_an_answer_without_lower_tiers_is_that_of_device_memory() -> None:
    columns = {"device_blocks": [4, 200], "host_blocks": [4, 200], "disk_blocks": [4, 200], "shared_blocks": [4, 200]}
    known = {"worker_ids": [1, 2], "dp_ranks": [0, 0], "incarnations": [1, 1], "next_event_ids": [1, 1]}
    answer = FindMatchesResponse(**known, **columns).SerializeToString()  # type: ignore[arg-type]
    assert read_answer(answer, 300).lower is None
