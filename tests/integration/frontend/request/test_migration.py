"""A worker that fails in the middle of its output costs the client nothing: the request continues on another one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import grpc
import pytest
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import AvoidedWorker, RoutingConstraints
from kvrouter.v1.errors import BadRequest, WorkerLost
from kvrouter.v1.frontend_pb2 import (
    FrontendServiceGenerateRequest,
    FrontendServiceGenerateResponse,
    GetWorkerHealthRequest,
    RoutingInfo,
    WorkerHealthState,
)
from kvrouter.v1.worker_pb2 import (
    FinishReason,
    GenerateOutput,
    SamplingOptions,
    StopConditions,
    WorkerServiceGenerateResponse,
)

from ....hostile_worker import Behaviour, HostileWorker, aborts, piece, registered_beside, writes
from ..gateway import System, request, running_system

SOUND, FAILING = 1, 2
TOKENS = 40
BEFORE = 17
"""Output tokens before the failure: the continuation begins in the middle of a block."""
FIRST = RoutingConstraints(avoided_workers=[AvoidedWorker(worker_id=SOUND)])
"""The failing worker is chosen first."""


PROBING: dict[str, Any] = {"worker_probe_seconds": 0.1, "worker_probe_failures": 30}
"""Suspects a silent worker after 3 s."""


@pytest.fixture
async def system(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[System]:
    async with running_system(nats_url, etcd_endpoint, namespace, worker_back_off_failures=1000, **PROBING) as found:
        await found.start_worker(SOUND)
        yield found


@asynccontextmanager
async def failing(system: System, behave: Behaviour, worker_id: int = FAILING) -> AsyncIterator[HostileWorker]:
    view = next(iter(system.runtime.directory.components.values()))
    async with (
        HostileWorker(behave, call_streams=True).serving() as worker,
        registered_beside(view, system.where["etcd"], worker_id, worker.endpoint, call_streams=True),
    ):
        await system.until_candidate(worker_id)
        yield worker


def seeded(**fields: Any) -> FrontendServiceGenerateRequest:
    """A request whose output does not depend on its worker."""
    defaults: dict[str, Any] = {
        "stop_conditions": StopConditions(max_tokens=TOKENS, min_tokens=20),
        "sampling_options": SamplingOptions(seed=7),
    }
    return request(**(defaults | fields))


async def responses(system: System, sent: FrontendServiceGenerateRequest) -> list[FrontendServiceGenerateResponse]:
    return [each async for each in system.client.generate(sent, deadline=Deadline.after(60))]


def tokens_of(pieces: Sequence[FrontendServiceGenerateResponse]) -> list[int]:
    return [token for each in pieces for token in each.output.token_ids]


async def undisturbed(system: System) -> list[int]:
    return tokens_of(await responses(system, seeded(constraints=RoutingConstraints(worker_id=SOUND))))


def first_piece(tokens: Sequence[int]) -> bytes:
    output = GenerateOutput(token_ids=tokens, cached_tokens=32)
    return WorkerServiceGenerateResponse(output=output).SerializeToString()


def after(tokens: Sequence[int], fail: Behaviour) -> Behaviour:
    """Outputs these tokens, then fails."""

    async def behave(context: Any) -> None:
        await context.write(first_piece(tokens[:1]))
        for token in tokens[1:]:
            await context.write(piece(token))
        await fail(context)

    return behave


async def ends(context: Any) -> None:
    """Ends the response without a finish reason."""


async def fails_in_the_engine(context: Any) -> None:
    await context.write(piece(finish=FinishReason.FINISH_REASON_ERROR))


async def is_aborted(context: Any) -> None:
    await context.write(piece(finish=FinishReason.FINISH_REASON_ABORT))


async def sends_garbage(context: Any) -> None:
    await context.write(b"\xff\xfe\xfd")


@pytest.mark.parametrize(
    "fail",
    [
        pytest.param(aborts(grpc.StatusCode.UNAVAILABLE), id="unavailable"),
        pytest.param(aborts(grpc.StatusCode.INTERNAL), id="internal"),
        pytest.param(ends, id="unfinished"),
        pytest.param(fails_in_the_engine, id="error"),
        pytest.param(is_aborted, id="abort"),
        pytest.param(sends_garbage, id="garbage"),
    ],
)
async def test_the_output_continues_on_another_worker(system: System, fail: Behaviour) -> None:
    expected = await undisturbed(system)
    async with failing(system, after(expected[:BEFORE], fail)):
        pieces = await responses(system, seeded(constraints=FIRST))
    assert tokens_of(pieces) == expected
    assert [each.output.finish_reason for each in pieces if each.output.finish_reason] == [
        FinishReason.FINISH_REASON_LENGTH
    ]
    assert [each.output.cached_tokens for each in pieces if each.output.HasField("cached_tokens")] == [32]
    first, second = [each.routing for each in pieces if each.HasField("routing")]
    assert (first.rank.worker_id, first.attempt, first.migrations) == (FAILING, 0, 0)
    assert (second.rank.worker_id, second.attempt, second.migrations) == (SOUND, 1, 1)
    assert [rank.worker_id for rank in second.earlier_ranks] == [FAILING]
    assert second.inexact_continuation
    assert second.prompt_blocks == (100 + BEFORE) // 16
    await system.until_idle()


async def test_a_worker_that_stops_answering_is_left_and_what_it_sends_later_reaches_nobody(system: System) -> None:
    expected = await undisturbed(system)
    released = asyncio.Event()

    async def freeze(context: Any) -> None:
        worker.freeze()
        await released.wait()
        await context.write(piece(1, 2, 3))

    async with failing(system, after(expected[:BEFORE], freeze)) as worker:
        running = asyncio.create_task(responses(system, seeded(constraints=FIRST)))
        pieces = await running
        released.set()
        worker.thaw()
    assert tokens_of(pieces) == expected
    await system.until_idle()


async def test_a_worker_that_answers_probes_but_generates_nothing_more_is_left(
    nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    hung = asyncio.Event()
    async with running_system(nats_url, etcd_endpoint, namespace, worker_stall_seconds=3.0, **PROBING) as system:
        await system.start_worker(SOUND)
        sent = seeded(stop_conditions=StopConditions(max_tokens=400))
        alone = RoutingConstraints(worker_id=SOUND)
        expected = tokens_of(await responses(system, seeded(stop_conditions=sent.stop_conditions, constraints=alone)))

        async def generate(context: Any) -> None:
            if not hung.is_set():  # It stays hung: output for a trial of the Frontend's own would end the stall.
                for token in expected[:100]:
                    await context.write(piece(token))
                    await asyncio.sleep(0.005)
                hung.set()
            await asyncio.Event().wait()

        async with failing(system, generate) as worker:
            sent.constraints.CopyFrom(FIRST)
            pieces = await responses(system, sent)
            assert tokens_of(pieces) == expected
            assert hung.is_set()
            assert pieces[-1].output.finish_reason == FinishReason.FINISH_REASON_LENGTH
            answer = await system.client.get_worker_health(GetWorkerHealthRequest(), deadline=Deadline.after(10))
            states = {each.worker_id: each.state for each in answer.workers}
            assert states[FAILING] == WorkerHealthState.WORKER_HEALTH_STATE_STALLED
            # A trial of the Frontend's own finds that it generates again, without any request of a client.
            worker.behave = writes(piece(1, finish=FinishReason.FINISH_REASON_LENGTH))
            async with asyncio.timeout(30):
                while states[FAILING] != WorkerHealthState.WORKER_HEALTH_STATE_HEALTHY:
                    await asyncio.sleep(0.02)
                    answer = await system.client.get_worker_health(
                        GetWorkerHealthRequest(), deadline=Deadline.after(10)
                    )
                    states = {each.worker_id: each.state for each in answer.workers}
        await system.until_idle()


async def test_failures_before_the_next_token_cost_attempts_of_their_own(system: System) -> None:
    expected = await undisturbed(system)
    fails_at_once = aborts(grpc.StatusCode.UNAVAILABLE)
    async with (
        failing(system, after(expected[:BEFORE], fails_at_once)),
        failing(system, fails_at_once, worker_id=3),
        failing(system, fails_at_once, worker_id=4),
    ):
        first = RoutingConstraints(avoided_workers=[AvoidedWorker(worker_id=SOUND)])
        routed: list[RoutingInfo] = []
        while not any(each.migrations for each in routed):  # Round-robin begins anywhere.
            pieces = await responses(system, seeded(constraints=first))
            assert tokens_of(pieces) == expected
            routed = [each.routing for each in pieces if each.HasField("routing")]
    await system.until_idle()


async def test_a_request_migrates_no_more_often_than_its_limit(system: System) -> None:
    one_token = after([5], aborts(grpc.StatusCode.UNAVAILABLE))
    async with failing(system, one_token), failing(system, one_token, worker_id=3):
        only = RoutingConstraints(allowed_worker_ids=[FAILING, 3])
        received: list[int] = []

        async def receive() -> None:
            sent = seeded(constraints=only, migration_limit=2)
            async for each in system.client.generate(sent, deadline=Deadline.after(60)):
                received.extend(each.output.token_ids)

        with pytest.raises(WorkerLost, match="has migrated 2 times, its limit"):
            await receive()
        assert received == [5, 5, 5]
    await system.until_idle()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"migration_limit": 0}, "migration limit is 0"),
        ({"constraints": RoutingConstraints(worker_id=FAILING)}, "pinned to its worker"),
        (
            {"sampling_options": SamplingOptions(engine_options_json='{"guided_json": {}}')},
            "its output is structured .guided_json.",
        ),
        ({"constraints": RoutingConstraints(allowed_worker_ids=[FAILING])}, "no other worker is eligible"),
    ],
)
async def test_a_request_that_cannot_migrate_ends_with_the_reason(
    system: System, fields: dict[str, Any], why: str
) -> None:
    async with failing(system, after([5], aborts(grpc.StatusCode.UNAVAILABLE))):
        with pytest.raises(WorkerLost, match=why):
            await responses(system, seeded(**({"constraints": FIRST} | fields)))
    await system.until_idle()


async def test_a_continuation_that_the_next_worker_refuses_is_no_fault_of_the_client(system: System) -> None:
    async with (
        failing(system, after([5], aborts(grpc.StatusCode.UNAVAILABLE))),
        failing(system, aborts(grpc.StatusCode.INVALID_ARGUMENT), worker_id=3),
    ):
        only = RoutingConstraints(allowed_worker_ids=[FAILING, 3], avoided_workers=[AvoidedWorker(worker_id=3)])
        with pytest.raises(WorkerLost, match="cannot continue on another worker: as the test has it"):
            await responses(system, seeded(constraints=only))
    await system.until_idle()


async def test_a_migration_limit_has_a_maximum(system: System) -> None:
    with pytest.raises(BadRequest, match="migration_limit is 17"):
        await responses(system, seeded(migration_limit=17))


@pytest.mark.parametrize("stream", [False, True])
async def test_an_http_client_sees_one_response_with_its_own_prompt_in_the_usage(system: System, stream: bool) -> None:
    expected = await undisturbed(system)
    only = {"prompt": list(range(100)), "model": "mock-model", "max_tokens": TOKENS, "min_tokens": 20, "seed": 7}
    body = only | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})
    attempts = 0
    async with (
        failing(system, after(expected[:BEFORE], aborts(grpc.StatusCode.UNAVAILABLE))),
        aiohttp.ClientSession() as session,
    ):
        routed: dict[str, Any] = {}
        while not routed.get("migrations"):  # Round-robin chooses the failing worker every other time.
            attempts += 1
            assert attempts < 10
            async with session.post(f"http://{system.http}/v1/completions", json=body) as answer:
                text = await answer.text()
            chunks = (
                [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
                if stream
                else [json.loads(text)]
            )
            tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
            assert tokens == expected
            routed = chunks[-1]["kvrouter"]
    assert routed["earlier_ranks"] == [f"{FAILING}:0"]
    assert routed["inexact_continuation"]
    if stream:  # Clients that do not ask for the usage see it where the continuation begins.
        noticed = [number for number, chunk in enumerate(chunks) if chunk.get("kvrouter", {}).get("migrations")]
        assert noticed == [BEFORE, len(chunks) - 1]
    usage = chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (100, TOKENS)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 32}
    await system.until_idle()
