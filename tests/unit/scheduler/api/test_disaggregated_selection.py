"""Selections of a decode worker, which may compute the prompt itself."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from kvrouter.runtime.kv_transfer import KvTransfer
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.scheduler.request.remote_prefill import RemotePrefillOptions, modelled_ms
from kvrouter.v1.common_pb2 import BookingKey, Component, PrefillDecision, Role, Stage
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import FreeRequest, MarkPrefillCompleteRequest, SelectWorkerRequest, SelectWorkerResponse

from ..harness import BLOCK, POOL, Parts, ResidentBlocks, routing, selecting, view, worker

PREFILL = RemotePrefillOptions(min_tokens=4 * BLOCK, prefill_us_per_token=10.0, transfer=KvTransfer(latency_ms=0.0))


def parts(mode: str, indexer: ResidentBlocks | None = None, options: RemotePrefillOptions = PREFILL) -> Parts:
    return Parts(
        view(*(worker(number, role=Role.ROLE_DECODE) for number in (1, 2)), role=Role.ROLE_DECODE),
        options=RoutingOptions(mode, remote_prefill=options),
        indexer=indexer or ResidentBlocks(),
    )


def with_prefill_worker(scheduler: Parts) -> ComponentName:
    """Registers worker 3, which computes prompts for the decode workers."""
    name = ComponentName(POOL.namespace, "prefill")
    prefilling = view(worker(3, role=Role.ROLE_PREFILL), name=name, role=Role.ROLE_PREFILL)
    scheduler.registered.register(scheduler.registered.components[POOL], prefilling)
    return name


@pytest.mark.parametrize("mode", ["kv", "forecast"])
async def test_a_long_prompt_is_left_to_a_prefill_worker_and_booked_without_prefill(mode: str) -> None:
    scheduler = parts(mode)
    chosen = await scheduler.select(
        selecting("a", routing(8, may_prefill_locally=True), stage=Stage.STAGE_DECODE),
    )
    assert chosen.prefill.remote
    assert chosen.prefill.uncached_tokens == 8 * BLOCK
    assert chosen.prefill_tokens == 0
    assert scheduler.load(chosen.rank.worker_id) == (8, 0, 1)


@pytest.mark.parametrize("mode", ["kv", "forecast"])
async def test_a_worker_that_holds_nearly_all_is_chosen_and_computes_the_rest(mode: str) -> None:
    scheduler = parts(mode, ResidentBlocks({(2, 0): 6}))
    chosen = await scheduler.select(
        selecting("a", routing(8, may_prefill_locally=True), stage=Stage.STAGE_DECODE),
    )
    assert (chosen.rank.worker_id, chosen.overlap_blocks) == (2, 6)
    assert not chosen.prefill.remote
    assert chosen.prefill_tokens == 2 * BLOCK
    assert scheduler.load(2) == (8, 2 * BLOCK, 1)


@pytest.mark.parametrize("mode", sorted(POLICIES.keys() - {"direct"}))
async def test_without_permission_a_prefill_worker_always_computes_the_prompt(mode: str) -> None:
    scheduler = parts(mode, ResidentBlocks({(1, 0): 3}))
    chosen = await scheduler.select(selecting("a", routing(4), stage=Stage.STAGE_DECODE))
    assert not chosen.HasField("prefill")
    assert chosen.prefill_tokens == 0
    assert chosen.overlap_blocks == (3 if chosen.rank.worker_id == 1 and POLICIES[mode].uses_overlap else 0)


async def test_the_permission_has_no_effect_on_whole_requests() -> None:
    scheduler = parts("kv")
    chosen = await scheduler.select(selecting("a", routing(8, may_prefill_locally=True)))
    assert not chosen.HasField("prefill")
    assert chosen.prefill_tokens == 8 * BLOCK


async def test_explain_shows_who_computes_the_prompt_and_what_each_worker_holds() -> None:
    scheduler = parts("kv", ResidentBlocks({(1, 0): 2}))
    chosen = await scheduler.select(
        selecting("a", routing(8, may_prefill_locally=True), stage=Stage.STAGE_DECODE),
    )
    decision = scheduler.decisions.by_id(chosen.decision_id)
    assert decision is not None
    explained = decision.to_message()
    assert explained.prefill == chosen.prefill
    assert [each.overlap_blocks for each in explained.candidates] == [2, 0]
    assert chosen.rank.worker_id == 1, "it must receive less"


@pytest.mark.parametrize("mode", ["kv", "forecast"])
async def test_the_decision_follows_measured_hand_overs(mode: str) -> None:
    scheduler = parts(mode, options=RemotePrefillOptions(min_tokens=0))
    selected = []
    for number in range(8):
        key = BookingKey(request_id=str(number), stage=Stage.STAGE_DECODE)
        request = SelectWorkerRequest(request=routing(8, may_prefill_locally=True), booking=key)
        selected.append((await scheduler.select(request)).prefill)
        for handover_us in (1_000_000, 1):  # The second is a repetition, as after a reconnection.
            scheduler.bookings.mark_prefill_complete(MarkPrefillCompleteRequest(booking=key, handover_us=handover_us))
        scheduler.bookings.free(FreeRequest(booking=key))
    first, last = selected[0], selected[-1]
    assert (first.remote, first.compute_factor, first.transfer_factor) == (True, 1.0, 1.0)
    assert last.transfer_factor > 3
    assert last.transfer_ms == pytest.approx(first.transfer_ms * last.transfer_factor)
    assert not last.remote
    assert "no less than to compute them" in last.reason


@pytest.mark.parametrize("mode", ["kv", "forecast"])
async def test_the_decode_worker_computes_the_prompt_while_the_prefill_workers_have_others_to_compute(
    mode: str,
) -> None:
    # A token takes a second, so that the wait hardly shrinks during the test.
    scheduler = parts(mode, options=replace(PREFILL, prefill_us_per_token=1e6))
    name = with_prefill_worker(scheduler)

    async def select(request_id: str, pool: ComponentName, stage: Stage) -> SelectWorkerResponse:
        component = Component(namespace=pool.namespace, name=pool.name)
        may_stay = stage == Stage.STAGE_DECODE
        request = routing(40, seed=len(request_id), may_prefill_locally=may_stay, component=component)
        return await scheduler.select(selecting(request_id, request, stage=stage))

    assert (await select("a", POOL, Stage.STAGE_DECODE)).prefill.remote
    for request_id in ("bb", "bbb"):
        await select(request_id, name, Stage.STAGE_PREFILL)
    waiting = await select("cccc", POOL, Stage.STAGE_DECODE)
    assert not waiting.prefill.remote
    assert waiting.prefill.compute_ms < waiting.prefill.prefill_wait_ms <= 2 * waiting.prefill.compute_ms
    decision = scheduler.decisions.by_id(waiting.decision_id)
    assert decision is not None
    assert decision.to_message().prefill == waiting.prefill
    assert "after a wait of " in waiting.prefill.reason
    for request_id in ("bb", "bbb"):
        key = BookingKey(request_id=request_id, stage=Stage.STAGE_PREFILL)
        scheduler.bookings.mark_prefill_complete(MarkPrefillCompleteRequest(booking=key))
    again = await select("ddddd", POOL, Stage.STAGE_DECODE)
    assert again.prefill.remote
    assert again.prefill.prefill_wait_ms == 0


@pytest.mark.parametrize("mode", ["kv", "forecast"])
async def test_prefill_workers_stand_in_until_a_decode_worker_has_computed_a_prompt(mode: str) -> None:
    scheduler = parts(mode, options=RemotePrefillOptions(min_tokens=1 << 20))
    name = with_prefill_worker(scheduler)
    measured = scheduler.pools.named(name.namespace, name.name).booked_load
    now = time.monotonic()
    measured.prefill_times.learn(1000.0, 40 * BLOCK, now)

    async def compute(request_id: str) -> PrefillDecision:
        key = BookingKey(request_id=request_id, stage=Stage.STAGE_DECODE)
        component = Component(namespace=POOL.namespace, name=POOL.name)
        request = routing(40, may_prefill_locally=True, component=component)
        chosen = await scheduler.select(SelectWorkerRequest(request=request, booking=key))
        scheduler.bookings.mark_prefill_complete(MarkPrefillCompleteRequest(booking=key))
        scheduler.bookings.free(FreeRequest(booking=key))
        return chosen.prefill

    of_prefill = await compute("a")
    assert of_prefill.compute_factor == pytest.approx(measured.prefill_factors().compute, rel=0.01)
    assert of_prefill.compute_factor > 1
    own = await compute("b")
    assert own.compute_factor != of_prefill.compute_factor


def at_decode_pool(blocks: int) -> SelectWorkerRequest:
    component = Component(namespace=POOL.namespace, name=POOL.name)
    request = routing(blocks, may_prefill_locally=True, component=component)
    return selecting(f"of {blocks} blocks", request, stage=Stage.STAGE_DECODE)


@pytest.mark.parametrize(("held", "is_remote"), [(0, False), (28, True)])
async def test_what_prefill_workers_hold_of_a_prompt_decides(held: int, is_remote: bool) -> None:
    scheduler = parts("kv", ResidentBlocks({(1, 0): 30, (2, 0): 30, (3, 0): held}))
    with_prefill_worker(scheduler)
    chosen = await scheduler.select(at_decode_pool(40))
    assert chosen.prefill.remote is is_remote
    assert (chosen.prefill.uncached_tokens, chosen.prefill.compute_ms) == (10 * BLOCK, pytest.approx(0.1 * BLOCK))
    there = chosen.prefill.prefill_uncached_tokens, chosen.prefill.prefill_compute_ms
    assert there == ((40 - held) * BLOCK, pytest.approx(0.01 * (40 - held) * BLOCK))
    decision = scheduler.decisions.by_id(chosen.decision_id)
    assert decision is not None
    assert decision.to_message().prefill == chosen.prefill


async def test_prompts_below_the_least_length_cost_no_query_of_what_prefill_workers_hold() -> None:
    indexer = ResidentBlocks()
    scheduler = parts("kv", indexer)
    with_prefill_worker(scheduler)
    for blocks, queries in ((3, 1), (4, 3)):
        await scheduler.select(at_decode_pool(blocks))
        assert len(indexer.queries) == queries


@pytest.mark.parametrize("slowness", [0.5, 4.0])
async def test_each_pool_computes_at_its_own_measured_speed(slowness: float) -> None:
    scheduler = parts("kv", options=RemotePrefillOptions(min_tokens=0, transfer=KvTransfer(latency_ms=0.0)))
    name = with_prefill_worker(scheduler)
    now = time.monotonic()
    modelled = modelled_ms(40 * BLOCK)
    for pool, measured in ((POOL, 1.0), (name, slowness)):
        times = scheduler.pools.named(pool.namespace, pool.name).booked_load.prefill_times
        for _ in range(200):
            times.learn(measured * modelled, 40 * BLOCK, now)
    chosen = await scheduler.select(at_decode_pool(40))
    ratio = chosen.prefill.prefill_compute_ms / chosen.prefill.compute_ms
    assert ratio == pytest.approx(slowness, rel=0.05)
    assert chosen.prefill.remote is (slowness < 2)
