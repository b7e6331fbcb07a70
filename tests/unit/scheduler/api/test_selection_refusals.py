"""Selections that are refused: by what error, and that they book nothing."""

from __future__ import annotations

from typing import Any

import pytest
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.request.options import RoutingOptions, Thresholds, ThresholdUpdate
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.errors import (
    AllBusy,
    BadRequest,
    BlockSizeMismatch,
    KvRouterError,
    NoWorkers,
    PromptTooLong,
    SessionLost,
    UnknownComponent,
    UnknownModel,
    UnknownWorker,
)
from kvrouter.v1.registry_pb2 import WorkerRegistration

from ..harness import Parts, constraints, overrides, routing, selecting, tokens, view, worker

BAD: list[tuple[dict[str, Any], type[KvRouterError]]] = [
    ({"model": "other"}, UnknownModel),
    ({"component": Component(namespace="ns", name="other")}, UnknownComponent),
    ({"component": Component(namespace="ns", name="in/valid")}, UnknownComponent),
    ({"token_ids": None}, BadRequest),
    ({"block_size": 32}, BlockSizeMismatch),
    ({"block_size": 0}, BlockSizeMismatch),
    ({"token_ids": {"ids": tokens(100)}}, PromptTooLong),
    ({"constraints": constraints(worker_id=7)}, UnknownWorker),
    ({"constraints": constraints(worker_id=1, dp_rank=3)}, UnknownWorker),
    ({"constraints": constraints(dp_rank=3)}, BadRequest),
    ({"constraints": constraints(excluded_worker_ids=[1, 2])}, NoWorkers),
    ({"constraints": constraints(allowed_worker_ids=[7])}, NoWorkers),
    ({"constraints": constraints(required_labels={"zone": "x"})}, NoWorkers),
    ({"overrides": overrides(mode="direct")}, BadRequest),
    ({"overrides": overrides(mode="nonsense")}, BadRequest),
    ({"overrides": overrides(router_temperature=-1)}, BadRequest),
    ({"overrides": overrides(overlap_score_weight=-1)}, BadRequest),
]


@pytest.mark.parametrize(("fields", "error"), BAD)
async def test_a_request_that_cannot_be_routed_is_refused_and_books_nothing(
    fields: dict[str, Any], error: type[KvRouterError]
) -> None:
    parts = Parts(view(worker(1), worker(2), max_model_len=1000))
    with pytest.raises(error) as refused:
        await parts.select(selecting("a", routing(**fields)))
    assert type(refused.value) is error
    assert refused.value.info.advice
    assert parts.idle()
    await parts.select(selecting("a"))


async def test_a_rank_that_no_worker_has_is_refused_by_the_ranks_there_are() -> None:
    parts = Parts(view(worker(1)))
    with pytest.raises(BadRequest) as refused:
        await parts.select(selecting("a", routing(constraints=constraints(dp_rank=3))))
    assert refused.value.info.field == "constraints.dp_rank"
    assert refused.value.info.advice == "Use one of: 0."
    assert list(refused.value.info.known_values) == ["0"]


@pytest.mark.parametrize("request_id", ["", "x" * 129])
async def test_booking_needs_a_request_id(request_id: str) -> None:
    with pytest.raises(BadRequest):
        await Parts(view(worker(1))).select(selecting(request_id))


@pytest.mark.parametrize("lease_ms", [0, 10**12])
async def test_leases_have_bounds(lease_ms: int) -> None:
    with pytest.raises(BadRequest) as refused:
        await Parts(view(worker(1))).select(selecting("a", lease_ms=lease_ms))
    assert refused.value.field == "lease_ms"


@pytest.mark.parametrize(
    ("workers", "missing"), [([], True), ([worker(1, draining=True)], True), ([worker(1), worker(2)], False)]
)
async def test_a_refusal_names_the_component_if_it_has_no_worker_for_any_request(
    workers: list[WorkerRegistration], missing: bool
) -> None:
    parts = Parts(view(*workers))
    with pytest.raises(NoWorkers) as refused:
        await parts.select(selecting("a", routing(constraints=constraints(excluded_worker_ids=[1, 2]))))
    assert refused.value.info.retry_after_ms
    assert bool(refused.value.info.resource_name) == missing


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


async def test_thresholds_of_the_request_and_the_model_override_the_options() -> None:
    parts = Parts(view(worker(1)), options=RoutingOptions(thresholds=Thresholds(prefill_tokens=10)))
    await parts.select(selecting("a"))
    with pytest.raises(AllBusy):
        await parts.select(selecting("b"))
    await parts.board.update("m", ThresholdUpdate(Thresholds(prefill_tokens=64)))
    await parts.select(selecting("b"))
    with pytest.raises(AllBusy):
        await parts.select(selecting("c"))
    await parts.select(selecting("c", routing(overrides=overrides(active_prefill_tokens_threshold=128))))
