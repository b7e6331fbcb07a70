"""The SchedulerService as an object and behind gRPC: both answer alike, over a real etcd and NATS."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from inspect import isawaitable
from typing import Any, TypeVar, cast

import pytest
from kvrouter.runtime.contracts import Immediate
from kvrouter.v1.common_pb2 import BookingKey, BusyThresholds, Component, Rank, RoutingConstraints, RoutingOverrides
from kvrouter.v1.errors import (
    AllBusy,
    BadRequest,
    BlockSizeMismatch,
    KvRouterError,
    NotFound,
    NoWorkers,
    RequestIdReused,
    SessionLost,
    UnknownModel,
    UnknownWorker,
)
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import (
    BookingUpdate,
    CloseSessionRequest,
    ExplainRequest,
    FreeRequest,
    ListBusyThresholdsRequest,
    MarkPrefillCompleteRequest,
    OpenSessionRequest,
    ReportOutputRequest,
    SetBusyThresholdRequest,
    UpdateBookingsRequest,
)

from ..scheduling import MODEL, PrefixResident, Stack, eventually, indexing, routing, scheduling, selecting, soon

T = TypeVar("T")


@pytest.fixture(params=["object", "stub"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def stack(how: str, etcd_endpoint: str, nats_url: str, component: ComponentName) -> AsyncIterator[Stack]:
    # An Indexer that is there answers, however busy the machine is.
    patience: dict[str, Any] = {"session_grace_seconds": 0.3, "indexer_timeout_ms": 20_000}
    async with scheduling(component, etcd_endpoint, nats_url, how=how, **patience) as scheduler:
        yield scheduler


def key(request_id: str) -> BookingKey:
    return BookingKey(request_id=request_id)


async def test_the_life_of_a_booking(stack: Stack) -> None:
    await stack.register(1)
    chosen = await stack.select(selecting("a"))
    assert (chosen.rank.worker_id, chosen.endpoint) == (1, "127.0.0.1:1")
    assert chosen.component == stack.named
    scheduler = stack.scheduler
    marked = await scheduler.mark_prefill_complete(MarkPrefillCompleteRequest(booking=key("a")), deadline=soon())
    assert marked.known
    reported = await scheduler.report_output(ReportOutputRequest(booking=key("a"), output_tokens=1), deadline=soon())
    assert reported.known
    (load,) = await stack.loads(routing(1, seed=9))
    assert (load.potential_prefill_tokens, load.potential_decode_blocks, load.active_requests) == (16, 6, 1)
    freed = [await scheduler.free(FreeRequest(booking=key("a")), deadline=soon()) for _ in range(2)]
    assert [answer.known for answer in freed] == [True, False]
    assert await stack.booked() == 0


async def test_a_burst_of_selections_spreads(stack: Stack) -> None:
    await stack.register(*range(1, 9))
    chosen = await asyncio.gather(*[stack.select(selecting(f"r{n}", routing(4, seed=n))) for n in range(100)])
    spread = Counter(each.rank.worker_id for each in chosen)
    assert len(spread) == 8
    assert max(spread.values()) - min(spread.values()) <= 1
    assert await stack.booked() == 100


async def test_retries_get_the_first_outcome(stack: Stack) -> None:
    await stack.register(1, 2, 3)
    outcomes = await asyncio.gather(*[stack.select(selecting("a")) for _ in range(8)])
    assert len({outcome.decision_id for outcome in outcomes}) == 1
    assert [outcome.repeated for outcome in outcomes].count(False) == 1
    with pytest.raises(RequestIdReused):
        await stack.select(selecting("a", routing(5)))
    assert await stack.booked() == 1


BAD: list[tuple[dict[str, Any], type[KvRouterError], str]] = [
    ({"model": "other"}, UnknownModel, "model"),
    ({"component": Component(namespace="n", name="other")}, NotFound, "component"),
    ({"token_ids": None}, BadRequest, "token_ids"),
    ({"block_size": 32}, BlockSizeMismatch, "block_size"),
    ({"prompt_tokens": 7}, BadRequest, "prompt_tokens"),
    ({"constraints": RoutingConstraints(worker_id=77)}, UnknownWorker, "constraints.worker_id"),
    ({"constraints": RoutingConstraints(excluded_worker_ids=[1])}, NoWorkers, ""),
    ({"overrides": RoutingOverrides(mode="direct")}, BadRequest, "constraints.worker_id"),
    ({"overrides": RoutingOverrides(mode="magic")}, BadRequest, "overrides.mode"),
    ({"overrides": RoutingOverrides(router_temperature=-1)}, BadRequest, "overrides.router_temperature"),
    ({"overrides": RoutingOverrides(overlap_score_weight=-1)}, BadRequest, "overrides.overlap_score_weight"),
]


@pytest.mark.parametrize(("fields", "error", "field"), BAD)
async def test_bad_requests_are_refused_by_type(
    stack: Stack, fields: dict[str, Any], error: type[KvRouterError], field: str
) -> None:
    await stack.register(1)
    with pytest.raises(error) as refused:
        await stack.select(selecting("a", routing(**fields)))
    assert refused.value.info.field == field
    assert refused.value.info.advice
    assert await stack.booked() == 0
    assert (await stack.select(selecting("a"))).rank.worker_id == 1


async def test_no_workers_is_said_at_once(stack: Stack) -> None:
    await stack.register()
    with pytest.raises(NoWorkers) as refused:
        await stack.select(selecting("a"))
    assert refused.value.info.HasField("retry_after_ms")


async def test_before_anything_is_registered_no_model_is_known(stack: Stack) -> None:
    with pytest.raises(UnknownModel, match="does not exist: no component serves it"):
        await stack.select(selecting("a"))


async def test_workers_come_and_go(stack: Stack) -> None:
    await stack.register(1, 2)
    await stack.unregister(1)
    assert (await stack.select(selecting("a"))).rank.worker_id == 2
    await stack.register(1, draining=True)
    assert (await stack.select(selecting("b"))).rank.worker_id == 2
    await stack.unregister(2)
    with pytest.raises(NoWorkers, match="draining"):
        await stack.select(selecting("c"))


async def test_another_indexer_is_queried_when_the_first_is_gone(stack: Stack) -> None:
    await stack.register(1, 2)
    assert (await stack.select(selecting(None))).load_only
    first, second = PrefixResident(1, 3), PrefixResident(1, 3)
    async with indexing(stack, second, "b"):
        async with indexing(stack, first, "a"):
            chosen = await stack.select(selecting("during", routing(4)))
            assert (chosen.rank.worker_id, chosen.overlap_blocks, chosen.load_only) == (1, 3, False)
            assert (chosen.cursor.incarnation, chosen.cursor.next_event_id) == (5, 3)
            assert (first.asked, second.asked) == (1, 0)
        # Its registration is still there, as after a crash.
        chosen = await eventually(lambda: stack.select(selecting(None, routing(4))), lambda each: not each.load_only)
        assert chosen.overlap_blocks == 3
    assert (await stack.select(selecting(None))).load_only


async def test_a_silent_indexer_costs_the_overlap_and_never_the_request(
    how: str, etcd_endpoint: str, nats_url: str, component: ComponentName
) -> None:
    silent = PrefixResident(1, 3)
    silent.answers.clear()
    async with scheduling(component, etcd_endpoint, nats_url, how=how, indexer_timeout_ms=500) as stack:
        await stack.register(1, 2)
        async with indexing(stack, silent, "a"):
            async with asyncio.timeout(60):
                while not silent.asked:  # A pause may use the timeout up before.
                    chosen = await stack.select(selecting(None, routing(4)))
                    assert (chosen.load_only, chosen.overlap_blocks) == (True, 0)


async def test_explain_tells_every_candidate(stack: Stack) -> None:
    await stack.register(1, 2)
    async with indexing(stack, PrefixResident(1, 3), "a"):
        chosen = await stack.select(selecting("a", routing(4, constraints=RoutingConstraints(excluded_worker_ids=[2]))))
    explained = await stack.scheduler.explain(ExplainRequest(decision_id=chosen.decision_id), deadline=soon())
    same = await stack.scheduler.explain(ExplainRequest(request_id="a"), deadline=soon())
    assert explained == same
    weighed, left_out = explained.decision.candidates
    assert weighed.formula == "Formula for worker_1: 5.0 = 1.0 * 1.0 + 4.0 (cached_blocks: 3)"
    assert (weighed.cost, dict(weighed.terms)) == (5.0, {"prefill_blocks": 1.0, "decode_blocks": 4.0})
    assert (left_out.rank.worker_id, left_out.excluded) == (2, "excluded by the request")
    for unknown in (ExplainRequest(decision_id=1), ExplainRequest(request_id="b")):
        with pytest.raises(NotFound):
            await stack.scheduler.explain(unknown, deadline=soon())
    with pytest.raises(BadRequest):
        await stack.scheduler.explain(ExplainRequest(), deadline=soon())


async def answered(response: Immediate[T]) -> T:
    """The response of a method that never waits: an object returns it, a stub returns an awaitable."""
    return await response if isawaitable(response) else cast(T, response)


async def test_a_session_owns_what_is_booked_in_it(stack: Stack) -> None:
    await stack.register(1)
    opening = OpenSessionRequest(session_id="s", client_name="c", opening_number=1)
    opened = await answered(stack.scheduler.open_session(opening, deadline=soon()))
    assert opened.scheduler_id == "scheduler-1"
    chosen = await asyncio.gather(
        *[
            stack.select(selecting(f"r{number}", routing(4, seed=number), session_id="s", opening_number=1))
            for number in range(50)
        ]
    )
    assert {each.rank.worker_id for each in chosen} == {1}
    # A call that names no session can free as well.
    await stack.scheduler.free(FreeRequest(booking=key("r2")), deadline=soon())
    updates = UpdateBookingsRequest(
        session_id="s",
        opening_number=1,
        first_number=1,
        updates=[BookingUpdate(free=FreeRequest(booking=key(name))) for name in ("r3", "r4")],
    )
    for _ in range(2):
        assert (await answered(stack.scheduler.update_bookings(updates, deadline=soon()))).acknowledged == 2
    assert await stack.booked() == 47
    await stack.select(selecting("leased"))
    closing = CloseSessionRequest(session_id="s", opening_number=1)
    assert (await answered(stack.scheduler.close_session(closing, deadline=soon()))).was_open
    await eventually(stack.booked, lambda booked: booked == 1)
    with pytest.raises(SessionLost):
        await stack.select(selecting("late", session_id="s"))


async def test_thresholds_are_set_by_field_and_listed(stack: Stack) -> None:
    await stack.register(1)

    async def set_to(**fields: Any) -> BusyThresholds:
        request = SetBusyThresholdRequest(model=MODEL, thresholds=BusyThresholds(**fields))
        return (await stack.scheduler.set_busy_threshold(request, deadline=soon())).thresholds

    assert await set_to() == BusyThresholds()
    await set_to(active_decode_blocks_threshold=0.5)
    both = await set_to(active_prefill_tokens_threshold=63)
    assert both == BusyThresholds(active_decode_blocks_threshold=0.5, active_prefill_tokens_threshold=63)
    assert await set_to() == both
    listed = await stack.scheduler.list_busy_thresholds(ListBusyThresholdsRequest(), deadline=soon())
    assert dict(listed.thresholds) == {MODEL: both}
    for wrong in (1.5, -0.1, math.nan):
        with pytest.raises(BadRequest) as out_of_range:
            await set_to(active_decode_blocks_threshold=wrong)
        assert out_of_range.value.info.field == "active_decode_blocks_threshold"
    assert await set_to() == both
    with pytest.raises(UnknownModel):
        await stack.scheduler.set_busy_threshold(SetBusyThresholdRequest(model="other"), deadline=soon())
    await stack.select(selecting("a"))
    with pytest.raises(AllBusy) as refused:
        await stack.select(selecting("b"))
    assert refused.value.info.HasField("retry_after_ms")


async def test_reported_load_makes_a_rank_busy(stack: Stack) -> None:
    await stack.register(1, 2)
    client = await stack.runtime.nats()
    subject = stack.component.load_subject(1, 0)
    report = LoadReport(rank=Rank(worker_id=1), incarnation=5, active_blocks=801, total_blocks=1000)
    limit = RoutingOverrides(active_decode_blocks_threshold=0.8)

    async def is_busy() -> bool:
        await client.publish(subject, report.SerializeToString())
        loads = await stack.loads(routing(overrides=limit))
        return {load.rank.worker_id: load.busy for load in loads} == {1: True, 2: False}

    await client.publish(subject, b"\xff not a report")
    await eventually(is_busy, bool)
    for number in range(5):
        assert (await stack.select(selecting(f"r{number}", routing(overrides=limit)))).rank.worker_id == 2
