"""Each bad request gets a typed error that says what to do, within its deadline; and the next good one is served."""

from __future__ import annotations

from typing import Any

import pytest
from kvrouter.runtime import deadline as deadlines
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import (
    BookingKey,
    LocalHashes,
    RoutingConstraints,
    RoutingOverrides,
    RoutingRequest,
    TokenIds,
)
from kvrouter.v1.errors import KvRouterError, NoWorkers, PromptTooLong, TooLarge
from kvrouter.v1.errors_pb2 import ErrorReason
from kvrouter.v1.frontend_pb2 import (
    FrontendServiceFreeRequest,
    FrontendServiceGetPotentialLoadsRequest,
    FrontendServiceMarkPrefillCompleteRequest,
    FrontendServiceSelectWorkerRequest,
    ListModelsRequest,
)
from kvrouter.v1.scheduler_pb2 import GetPotentialLoadsRequest, SelectWorkerRequest
from kvrouter.v1.worker_pb2 import SamplingOptions, StopConditions

from ..gateway import MODEL, System, request


async def refusal(system: System, seconds: float = 10, **fields: Any) -> KvRouterError:
    with pytest.raises(KvRouterError) as caught:
        async for _ in system.client.generate(request(**fields), deadline=Deadline.after(seconds)):
            pass
    return caught.value


@pytest.mark.parametrize(
    ("fields", "code", "reason", "field"),
    [
        ({"model": "nobody"}, "NOT_FOUND", "UNKNOWN_MODEL", "model"),
        ({"token_ids": TokenIds()}, "INVALID_ARGUMENT", "BAD_REQUEST", "token_ids"),
        ({"token_ids": TokenIds(ids=[0] * 8192)}, "INVALID_ARGUMENT", "PROMPT_TOO_LONG", "token_ids"),
        (
            {"stop_conditions": StopConditions(max_tokens=0)},
            "INVALID_ARGUMENT",
            "BAD_REQUEST",
            "stop_conditions.max_tokens",
        ),
        (
            {"sampling_options": SamplingOptions(temperature=-1)},
            "INVALID_ARGUMENT",
            "BAD_REQUEST",
            "sampling_options.temperature",
        ),
        (
            {"overrides": RoutingOverrides(router_temperature=-1)},
            "INVALID_ARGUMENT",
            "BAD_REQUEST",
            "overrides.router_temperature",
        ),
        ({"overrides": RoutingOverrides(mode="best")}, "INVALID_ARGUMENT", "BAD_REQUEST", None),
        ({"overrides": RoutingOverrides(mode="direct")}, "INVALID_ARGUMENT", "BAD_REQUEST", "constraints.worker_id"),
        (
            {"overrides": RoutingOverrides(mode="direct"), "constraints": RoutingConstraints(worker_id=99)},
            "NOT_FOUND",
            "UNKNOWN_WORKER",
            "constraints.worker_id",
        ),
    ],
)
async def test_a_bad_request_is_refused_with_advice(
    system: System, fields: dict[str, Any], code: str, reason: str, field: str | None
) -> None:
    await system.start_worker(1)
    error = await refusal(system, **fields)
    assert error.code.name == code
    assert ErrorReason.Name(error.info.reason) == f"ERROR_REASON_{reason}"
    assert error.info.advice
    if field is not None:
        assert error.info.field == field
    assert await system.generated() == 4
    await system.until_idle()


async def test_without_workers_the_answer_comes_within_the_deadline_and_says_when_to_retry(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "ANSWER_SECONDS", 5.0)  # A busy machine may pause for seconds.
    await system.start_worker(1)
    await system.stop_worker(1)
    error = await refusal(system, seconds=6)
    assert isinstance(error, NoWorkers)
    assert error.info.HasField("retry_after_ms")
    await system.start_worker(2)
    assert await system.generated() == 4


@pytest.mark.full
async def test_a_prompt_of_100_megabytes_is_refused_and_the_service_unharmed(system: System) -> None:
    await system.start_worker(1)
    with pytest.raises(TooLarge):
        async for _ in system.client.generate(request(bytes(100 << 20), model=MODEL), deadline=Deadline.after(60)):
            pass
    # Making that prompt may stall this process, in which the worker is too, for longer than its lease.
    await system.until_candidate(1)
    assert await system.generated() == 4


@pytest.mark.parametrize(
    "prompt",
    [
        {"token_ids": TokenIds(ids=[1] * ((1 << 20) + 1))},
        {"local_hashes": LocalHashes(hashes=[1] * (1 << 16)), "prompt_tokens": (1 << 20) + 1},
    ],
    ids=["tokens", "hashes"],
)
async def test_a_prompt_that_is_too_long_to_route_is_refused_everywhere(system: System, prompt: dict[str, Any]) -> None:
    await system.start_worker(1)
    routing = RoutingRequest(model=MODEL, **prompt)
    deadline = Deadline.after(30)
    calls = [
        system.client.select_worker(FrontendServiceSelectWorkerRequest(request=routing), deadline=deadline),
        system.client.get_potential_loads(FrontendServiceGetPotentialLoadsRequest(request=routing), deadline=deadline),
        system.frontend.select_worker(FrontendServiceSelectWorkerRequest(request=routing), deadline=deadline),
        system.frontend.get_potential_loads(
            FrontendServiceGetPotentialLoadsRequest(request=routing), deadline=deadline
        ),
        system.scheduler.select_worker(SelectWorkerRequest(request=routing), deadline=deadline),
        system.scheduler.get_potential_loads(GetPotentialLoadsRequest(request=routing), deadline=deadline),
    ]
    for call in calls:
        with pytest.raises(PromptTooLong) as caught:
            await call
        expected = f"Input tokens exceed the configured limit of {1 << 20} tokens: the prompt has {(1 << 20) + 1}"
        assert caught.value.message == expected


async def test_hashes_of_another_block_size_are_refused(system: System) -> None:
    await system.start_worker(1)
    routing = RoutingRequest(model=MODEL, local_hashes=LocalHashes(hashes=[1]), prompt_tokens=40, block_size=32)
    with pytest.raises(KvRouterError) as caught:
        await system.client.get_potential_loads(
            FrontendServiceGetPotentialLoadsRequest(request=routing), deadline=Deadline.after(10)
        )
    assert caught.value.info.reason == ErrorReason.ERROR_REASON_BLOCK_SIZE_MISMATCH
    assert list(caught.value.info.known_values) == ["16"]


async def test_a_client_can_route_for_itself(system: System) -> None:
    await system.start_worker(1)
    key = BookingKey(request_id="mine")
    routing = RoutingRequest(model=MODEL, token_ids=TokenIds(ids=range(100)))
    deadline = Deadline.after(30)
    best = await system.client.select_worker(
        FrontendServiceSelectWorkerRequest(request=routing, booking=key), deadline=deadline
    )
    assert best.selection.rank.worker_id == 1
    assert best.selection.endpoint == system.workers[1].endpoint
    assert (await system.loads())[1].active_requests == 1
    prefilled = FrontendServiceMarkPrefillCompleteRequest(booking=key)
    assert (await system.client.mark_prefill_complete(prefilled, deadline=deadline)).known
    assert (await system.client.free(FrontendServiceFreeRequest(booking=key), deadline=deadline)).known
    assert not (await system.client.free(FrontendServiceFreeRequest(booking=key), deadline=deadline)).known
    await system.until_idle()


async def test_models_are_listed(system: System) -> None:
    await system.start_worker(1)
    models = (await system.client.list_models(ListModelsRequest(), deadline=Deadline.after(10))).models
    assert [(model.name, model.block_size, model.workers) for model in models] == [(MODEL, 16, 1)]
