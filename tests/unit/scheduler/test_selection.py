"""A selection from request to booking: its order, its bounds, its errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import (
    AllBusy,
    BadRequest,
    BlockSizeMismatch,
    DependencyAway,
    Internal,
    KvRouterError,
    NotReady,
    NoWorkers,
    PromptTooLong,
    RequestIdReused,
    SessionLost,
    UnknownComponent,
    UnknownModel,
    UnknownWorker,
)
from kvrouter.scheduler.options import RoutingOptions, Thresholds
from kvrouter.scheduler.policies import kv
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.policies.interface import Explanation, Hold
from kvrouter.v1.common_pb2 import BookingKey, Component, Role, Stage
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import FreeRequest, MarkPrefillCompleteRequest, ReportOutputRequest

from .harness import (
    BLOCK,
    POOL,
    HeldBlocks,
    Parts,
    constraints,
    hashed,
    overrides,
    routing,
    selecting,
    tokens,
    view,
    worker,
)


def key(request_id: str, attempt: int = 0) -> BookingKey:
    return BookingKey(request_id=request_id, attempt=attempt)


async def test_it_books_what_the_rank_does_not_hold() -> None:
    parts = Parts(view(worker(1), worker(2)), indexer=HeldBlocks({(2, 0): 3}))
    chosen = await parts.select(selecting("a", routing(4, tail=5)))
    assert (chosen.rank.worker_id, chosen.endpoint, chosen.role) == (2, "host:2", Role.ROLE_UNSPECIFIED)
    assert (chosen.overlap_blocks, chosen.prompt_blocks, chosen.mode) == (3, 4, "kv")
    assert (chosen.cursor.incarnation, chosen.cursor.next_event_id) == (1, 7)
    assert not chosen.load_only
    assert not chosen.repeated
    assert parts.load(2) == (5, BLOCK + 5, 1)
    assert parts.load(1) == (0, 0, 0)


async def test_without_a_booking_nothing_is_booked() -> None:
    parts = Parts(view(worker(1)))
    chosen = await parts.select(selecting(None))
    assert chosen.decision_id
    assert parts.idle()


async def test_a_burst_spreads_over_the_ranks() -> None:
    parts = Parts(view(*[worker(number) for number in range(1, 9)]), indexer=HeldBlocks())
    await asyncio.gather(*[parts.select(selecting(f"r{n}", routing(4, seed=n))) for n in range(100)])
    requests = [parts.load(number)[2] for number in range(1, 9)]
    assert sum(requests) == 100
    assert max(requests) - min(requests) <= 1


async def test_tokens_and_hashes_are_booked_alike() -> None:
    parts = Parts(view(worker(1)))
    await parts.select(selecting("a", routing(4)))
    await parts.select(selecting("b", hashed(4)))
    assert parts.load(1) == (4, 128, 2)


async def test_the_life_of_a_booking() -> None:
    parts = Parts(view(worker(1)), indexer=HeldBlocks({(1, 0): 2}))
    await parts.select(selecting("a", routing(4)))
    assert parts.bookings.mark_prefill_complete(MarkPrefillCompleteRequest(booking=key("a"))).known
    assert parts.bookings.mark_prefill_complete(MarkPrefillCompleteRequest(booking=key("a"))).known
    assert parts.load(1) == (4, 0, 1)
    assert parts.bookings.report_output(ReportOutputRequest(booking=key("a"), output_tokens=17)).known
    assert parts.load(1) == (6, 0, 1)
    assert parts.bookings.free(FreeRequest(booking=key("a"))).known
    assert not parts.bookings.free(FreeRequest(booking=key("a"))).known
    assert not parts.bookings.free(FreeRequest(booking=key("b"))).known
    assert not parts.bookings.mark_prefill_complete(MarkPrefillCompleteRequest(booking=key("a"))).known
    assert not parts.bookings.report_output(ReportOutputRequest(booking=key("a"), output_tokens=90)).known
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
    indexer = HeldBlocks()
    indexer.may_answer.clear()
    parts = Parts(view(worker(1), worker(2)), indexer=indexer)
    calls = [asyncio.create_task(parts.select(selecting("a"))) for _ in range(5)]
    while not indexer.asked:
        await asyncio.sleep(0)
    indexer.may_answer.set()
    outcomes = await asyncio.gather(*calls)
    assert len({outcome.decision_id for outcome in outcomes}) == 1
    assert sorted(outcome.repeated for outcome in outcomes) == [False, True, True, True, True]
    assert len(parts.ledger) == 1


async def test_a_repeat_takes_over_from_a_call_that_was_cancelled() -> None:
    indexer = HeldBlocks()
    indexer.may_answer.clear()
    parts = Parts(view(worker(1)), indexer=indexer)
    first = asyncio.create_task(parts.select(selecting("a")))
    second = asyncio.create_task(parts.select(selecting("a")))
    while not indexer.asked:
        await asyncio.sleep(0)
    first.cancel()
    indexer.may_answer.set()
    assert not (await second).repeated
    assert len(parts.ledger) == 1


async def test_a_booking_is_not_reused_with_another_prompt() -> None:
    indexer = HeldBlocks()
    indexer.may_answer.clear()
    parts = Parts(view(worker(1)), indexer=indexer)
    first = asyncio.create_task(parts.select(selecting("a", routing(4))))
    while not indexer.asked:
        await asyncio.sleep(0)
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
    assert len(parts.ledger) == 3


async def test_a_booking_that_was_freed_while_it_was_selected_is_not_made() -> None:
    indexer = HeldBlocks()
    indexer.may_answer.clear()
    parts = Parts(view(worker(1)), indexer=indexer)
    call = asyncio.create_task(parts.select(selecting("a")))
    while not indexer.asked:
        await asyncio.sleep(0)
    assert not parts.bookings.free(FreeRequest(booking=key("a"))).known
    indexer.may_answer.set()
    with pytest.raises(RequestIdReused, match="freed already"):
        await call
    assert parts.idle()


async def test_a_session_that_ends_while_it_selects_books_nothing() -> None:
    indexer = HeldBlocks()
    indexer.may_answer.clear()
    parts = Parts(view(worker(1)), indexer=indexer)
    token = parts.ledger.open_session("s", "c")
    call = asyncio.create_task(parts.select(selecting("a"), "s"))
    while not indexer.asked:
        await asyncio.sleep(0)
    parts.ledger.close_session("s", token, parts.now)
    indexer.may_answer.set()
    with pytest.raises(SessionLost):
        await call
    assert parts.idle()


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (NotReady("restoring"), "unavailable"),
        (DependencyAway("gone"), "unavailable"),
        (Internal("broken"), "internal"),
        (ValueError("a bug"), "internal"),
    ],
)
async def test_a_failing_indexer_costs_the_overlap_only(failure: Exception, reason: str) -> None:
    parts = Parts(view(worker(1)), indexer=HeldBlocks({(1, 0): 4}, failure=failure))
    chosen = await parts.select(selecting("a"))
    assert chosen.load_only
    assert chosen.overlap_blocks == 0
    assert not chosen.HasField("cursor")
    assert parts.figure("kvrouter_scheduler_load_only_total", reason=reason) == 1
    assert parts.decisions.by_request("a").load_only  # type: ignore[union-attr]


async def test_a_missing_indexer_costs_the_overlap_only() -> None:
    parts = Parts(view(worker(1)))
    assert (await parts.select(selecting("a"))).load_only
    assert parts.figure("kvrouter_scheduler_load_only_total", reason="no_indexer") == 1


async def test_a_silent_indexer_is_not_waited_for() -> None:
    indexer = HeldBlocks()
    indexer.may_answer.clear()
    parts = Parts(view(worker(1)), indexer=indexer, indexer_timeout=0.01)
    assert (await parts.select(selecting("a"))).load_only
    assert parts.figure("kvrouter_scheduler_load_only_total", reason="timeout") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"overlap_score_weight": 0},
        {"mode": "random"},
        {"mode": "round-robin"},
        {"mode": "power-of-two"},
    ],
)
async def test_no_indexer_is_asked_where_overlaps_do_not_matter(changes: dict[str, Any]) -> None:
    indexer = HeldBlocks({(1, 0): 4})
    parts = Parts(view(worker(1)), indexer=indexer)
    chosen = await parts.select(selecting("a", routing(overrides=overrides(**changes))))
    assert (chosen.load_only, chosen.overlap_blocks, indexer.asked) == (False, 0, [])


async def test_an_override_asks_where_the_option_does_not() -> None:
    indexer = HeldBlocks({(1, 0): 4})
    parts = Parts(view(worker(1)), indexer=indexer, options=RoutingOptions(overlap_score_weight=0))
    chosen = await parts.select(selecting("a", routing(overrides=overrides(overlap_score_weight=1))))
    assert chosen.overlap_blocks == 4


async def test_the_weight_of_one_request_is_for_that_request_alone() -> None:
    parts = Parts(view(worker(1), worker(2)), indexer=HeldBlocks({(1, 0): 4}))
    await parts.select(selecting("a", routing(6, seed=1, constraints=constraints(worker_id=1))))
    parts.bookings.mark_prefill_complete(MarkPrefillCompleteRequest(booking=key("a")))
    # By weight 1 it is 0 + 10 blocks against 4 + 4; by weight 2 the cached ones count for more.
    heavy = routing(overrides=overrides(overlap_score_weight=2))
    chosen = [(await parts.select(selecting(None, each))).rank.worker_id for each in (routing(), heavy, routing())]
    assert chosen == [2, 1, 2]


async def test_the_temperature_of_one_request_is_for_that_request_alone() -> None:
    parts = Parts(view(worker(1), worker(2)), indexer=HeldBlocks({(1, 0): 4}))
    hot = routing(overrides=overrides(router_temperature=10))
    drawn = {(await parts.select(selecting(None, hot))).rank.worker_id for _ in range(50)}
    lowest = {(await parts.select(selecting(None))).rank.worker_id for _ in range(50)}
    assert (drawn, lowest) == ({1, 2}, {1})


@pytest.mark.parametrize(
    ("wanted", "rank"),
    [
        ({"required_labels": {"zone": "b"}}, (2, 0)),
        ({"allowed_worker_ids": [2]}, (2, 0)),
        ({"excluded_worker_ids": [1]}, (2, 0)),
        ({"dp_rank": 1}, (1, 1)),
        ({"worker_id": 1, "dp_rank": 1}, (1, 1)),
    ],
)
@pytest.mark.parametrize("mode", POLICIES)
async def test_a_request_goes_where_it_may_though_another_rank_is_cheaper(
    mode: str, wanted: dict[str, Any], rank: tuple[int, int]
) -> None:
    workers = [worker(1, ranks=2, labels={"zone": "a"}), worker(2, labels={"zone": "b"})]
    parts = Parts(view(*workers), indexer=HeldBlocks({(1, 0): 4}), options=RoutingOptions(mode))
    if mode == "direct":
        wanted = {"worker_id": rank[0], **wanted}
    chosen = await parts.select(selecting("a", routing(constraints=constraints(**wanted))))
    assert (chosen.rank.worker_id, chosen.rank.dp_rank) == rank


async def test_blocks_of_an_earlier_life_do_not_count() -> None:
    parts = Parts(view(worker(1, incarnation=5)), indexer=HeldBlocks({(1, 0): 4}, incarnation=4))
    assert (await parts.select(selecting("a"))).overlap_blocks == 0


async def test_round_robin_takes_turns_with_and_without_booking() -> None:
    parts = Parts(view(worker(1, ranks=2), worker(2)), options=RoutingOptions(mode="round-robin"))
    chosen = [await parts.select(selecting(name)) for name in ("a", None, "b", None)]
    assert [(each.rank.worker_id, each.rank.dp_rank) for each in chosen] == [(1, 0), (1, 1), (2, 0), (1, 0)]


async def test_direct_goes_where_it_is_told() -> None:
    parts = Parts(view(worker(1, ranks=2), worker(2)), options=RoutingOptions(mode="direct"))
    request = routing(constraints=constraints(worker_id=1, dp_rank=1))
    chosen = await parts.select(selecting("a", request))
    assert (chosen.rank.worker_id, chosen.rank.dp_rank) == (1, 1)
    request = routing(constraints=constraints(worker_id=1))
    chosen = await parts.select(selecting("b", request))
    assert (chosen.rank.worker_id, chosen.rank.dp_rank) == (1, 0)


async def test_decode_stages_book_no_prefill() -> None:
    parts = Parts(view(worker(1)))
    await parts.select(selecting("a", stage=Stage.STAGE_DECODE))
    assert parts.load(1) == (4, 0, 1)


async def test_prefill_stages_go_to_the_pool_for_prefill() -> None:
    prefill = ComponentName("ns", "prefill")
    parts = Parts(
        view(worker(1, role=Role.ROLE_DECODE), role=Role.ROLE_DECODE),
        view(worker(9, role=Role.ROLE_PREFILL), name=prefill, role=Role.ROLE_PREFILL),
    )
    whole = await parts.select(selecting("a"))
    before = await parts.select(selecting("a", stage=Stage.STAGE_PREFILL))
    assert (whole.rank.worker_id, whole.component.name) == (1, "pool")
    assert (before.rank.worker_id, before.component.name) == (9, "prefill")
    named = routing(component=Component(namespace="ns", name="prefill"))
    assert (await parts.select(selecting(None, named))).rank.worker_id == 9


async def test_of_two_components_the_larger_serves_the_model() -> None:
    other = ComponentName("ns", "a-larger-pool")
    parts = Parts(view(worker(1)), view(worker(8), worker(9), name=other))
    assert (await parts.select(selecting("a"))).component.name == "a-larger-pool"


BAD: list[tuple[dict[str, Any], type[KvRouterError]]] = [
    ({"model": "other"}, UnknownModel),
    ({"component": Component(namespace="ns", name="other")}, UnknownComponent),
    ({"component": Component(namespace="ns", name="in/valid")}, UnknownComponent),
    ({"token_ids": None}, BadRequest),
    ({"block_size": 32}, BlockSizeMismatch),
    ({"token_ids": {"ids": tokens(100)}}, PromptTooLong),
    ({"constraints": constraints(worker_id=7)}, UnknownWorker),
    ({"constraints": constraints(worker_id=1, dp_rank=3)}, UnknownWorker),
    ({"constraints": constraints(excluded_worker_ids=[1, 2])}, NoWorkers),
    ({"constraints": constraints(allowed_worker_ids=[7])}, NoWorkers),
    ({"constraints": constraints(required_labels={"zone": "x"})}, NoWorkers),
    ({"overrides": overrides(mode="direct")}, BadRequest),
    ({"overrides": overrides(mode="nonsense")}, BadRequest),
    ({"overrides": overrides(router_temperature=-1)}, BadRequest),
    ({"overrides": overrides(overlap_score_weight=-1)}, BadRequest),
]


@pytest.mark.parametrize(("fields", "error"), BAD)
async def test_what_cannot_be_routed_is_refused_and_books_nothing(
    fields: dict[str, Any], error: type[KvRouterError]
) -> None:
    parts = Parts(view(worker(1), worker(2), max_model_len=1000))
    with pytest.raises(error) as refused:
        await parts.select(selecting("a", routing(**fields)))
    assert type(refused.value) is error
    assert refused.value.info.advice
    assert parts.idle()
    await parts.select(selecting("a"))


@pytest.mark.parametrize("request_id", ["", "x" * 129])
async def test_booking_needs_a_request_id(request_id: str) -> None:
    with pytest.raises(BadRequest):
        await Parts(view(worker(1))).select(selecting(request_id))


async def test_leases_have_a_bound() -> None:
    with pytest.raises(BadRequest):
        await Parts(view(worker(1))).select(selecting("a", lease_ms=10**12))


async def test_no_workers_at_all() -> None:
    with pytest.raises(NoWorkers) as refused:
        await Parts(view()).select(selecting("a"))
    assert refused.value.info.retry_after_ms


async def test_an_unknown_session_is_lost() -> None:
    parts = Parts(view(worker(1)))
    with pytest.raises(SessionLost):
        await parts.select(selecting("a"), "nobody's")
    assert parts.idle()


@pytest.mark.parametrize("mode", POLICIES)
async def test_busy_ranks_are_left_out_in_every_mode(mode: str) -> None:
    options = RoutingOptions(mode=mode, thresholds=Thresholds(prefill_tokens=63))
    parts = Parts(view(worker(1), worker(2)), options=options)
    pinned = routing(4, constraints=constraints(worker_id=1))
    await parts.select(selecting("a", pinned))
    # 64 tokens are above 63: worker 1 is busy.
    if mode != "direct":
        chosen = await parts.select(selecting("b", routing(4, seed=1)))
        assert chosen.rank.worker_id == 2
    with pytest.raises(AllBusy) as refused:
        await parts.select(selecting("c", pinned))
    assert refused.value.info.retry_after_ms
    decided = parts.decisions.by_request("c")
    assert decided is not None
    message = decided.to_message()
    assert not message.HasField("chosen")
    assert any("above 63" in candidate.excluded for candidate in message.candidates)


async def test_the_request_itself_makes_no_rank_busy() -> None:
    parts = Parts(view(worker(1, total_blocks=4)), options=RoutingOptions(thresholds=Thresholds(decode_blocks=0.5)))
    await parts.select(selecting("a", routing(4)))
    with pytest.raises(AllBusy):
        await parts.select(selecting("b", routing(4)))


async def test_thresholds_of_the_request_and_of_the_model_go_over_those_at_start() -> None:
    parts = Parts(view(worker(1)), options=RoutingOptions(thresholds=Thresholds(prefill_tokens=10)))
    await parts.select(selecting("a"))
    with pytest.raises(AllBusy):
        await parts.select(selecting("b"))
    parts.board.put("m", Thresholds(prefill_tokens=64))
    await parts.select(selecting("b"))
    with pytest.raises(AllBusy):
        await parts.select(selecting("c"))
    await parts.select(selecting("c", routing(overrides=overrides(active_prefill_tokens_threshold=128))))


async def test_where_nothing_is_held_a_request_waits_in_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv.Rule, "decide", lambda *_: Hold(1, Explanation("no room")))
    parts = Parts(view(worker(1), worker(2)), max_held=0)
    assert (await parts.select(selecting("a"))).rank.worker_id == 2


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
    assert set(pool.slots.load_by_rank()) == {(2, 0)}


async def test_predictions_are_held_against_what_workers_report() -> None:
    parts = Parts(view(worker(1)), indexer=HeldBlocks({(1, 0): 4}))
    # Of four cached blocks an engine computes the last again.
    for name, reported in (("exact", 3), ("low", 4), ("high", 1)):
        await parts.select(selecting(name, routing(4)))
        parts.bookings.free(FreeRequest(booking=key(name), cached_tokens=reported * BLOCK))
        assert parts.figure("kvrouter_scheduler_predictions_total", verdict=name) == 1
    assert parts.figure("kvrouter_scheduler_predicted_cached_blocks_total") == 9
    assert parts.figure("kvrouter_scheduler_actual_cached_blocks_total") == 8
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
    parts.bookings.expire()
    assert parts.load(1)[2] == 1
    parts.now += 0.1
    parts.bookings.expire()
    assert parts.idle()
    assert parts.figure("kvrouter_scheduler_expired_leases_total") == 1


WORKERS = st.lists(st.integers(1, 6), unique=True, max_size=6)


@settings(deadline=None, max_examples=200)
@given(
    registered=st.sets(st.integers(1, 6), min_size=1),
    draining=st.sets(st.integers(1, 6)),
    allowed=WORKERS,
    excluded=WORKERS,
    mode=st.sampled_from(["kv", "random", "round-robin", "power-of-two"]),
    temperature=st.sampled_from([0.0, 5.0]),
)
def test_a_rank_that_is_ruled_out_is_never_chosen(
    registered: set[int], draining: set[int], allowed: list[int], excluded: list[int], mode: str, temperature: float
) -> None:
    parts = Parts(view(*[worker(number, draining=number in draining) for number in registered]))
    request = routing(
        constraints=constraints(allowed_worker_ids=allowed, excluded_worker_ids=excluded),
        overrides=overrides(mode=mode, router_temperature=temperature),
    )
    fit = {number for number in registered - draining - set(excluded) if not allowed or number in allowed}
    call = parts.selector.select(selecting("a", request), session_id="", deadline=Deadline.never())
    if fit:
        assert asyncio.run(call).rank.worker_id in fit
    else:
        with pytest.raises(NoWorkers):
            asyncio.run(call)
