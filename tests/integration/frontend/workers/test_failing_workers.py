"""A worker that fails, freezes or misbehaves costs its requests an attempt, and soon gets no more of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest
from kvrouter.devtools.system.ports import free_ports
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import AvoidedWorker, RoutingConstraints, RoutingRequest, TokenIds
from kvrouter.v1.errors import AllBusy, BadRequest, DeadlineExceeded, Draining, KvRouterError, WorkerLost
from kvrouter.v1.frontend_pb2 import (
    FrontendServiceGenerateRequest,
    FrontendServiceGenerateResponse,
    FrontendServiceSelectWorkerRequest,
    GetWorkerHealthRequest,
    WorkerHealth,
    WorkerHealthState,
)
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, StopConditions, WorkerServiceGenerateResponse

from ....garbage import no_request_is_garbage
from ....hostile_worker import (
    Behaviour,
    HostileWorker,
    aborts,
    answers,
    hangs,
    piece,
    refuses,
    registered_beside,
    writes,
)
from ....waiting import until
from .. import gateway
from ..gateway import System, request, running_system

SOUND, HOSTILE = 1, 2


@pytest.fixture(params=[True, False], ids=["call stream", "ordinary calls"])
def call_streams(request: pytest.FixtureRequest) -> bool:
    """Whether the hostile worker serves call streams."""
    return bool(request.param)


@pytest.fixture
async def system(nats_url: str, etcd_endpoint: str, namespace: str, call_streams: bool) -> AsyncIterator[System]:
    """A gateway with one sound worker, that suspects a worker after half a second."""
    probing = {"worker_probe_seconds": 0.1, "worker_back_off_seconds": 0.2}
    async with running_system(nats_url, etcd_endpoint, namespace, **probing) as found:
        found.call_streams = call_streams
        await found.start_worker(SOUND)
        yield found


@asynccontextmanager
async def hostile_worker(system: System, worker_id: int, behave: Behaviour) -> AsyncIterator[HostileWorker]:
    async with gateway.hostile_worker(system, worker_id, behave) as worker:
        yield worker
        if (streams := worker.call_streams) is not None:
            assert streams.counts.calls == worker.calls, "no call was made beside the call stream"


async def ask(
    system: System, sent: FrontendServiceGenerateRequest | None = None
) -> list[FrontendServiceGenerateResponse]:
    return [piece async for piece in system.client.generate(sent or request(), deadline=Deadline.after(60))]


def served_by(pieces: list[FrontendServiceGenerateResponse]) -> int:
    """The worker that ran a request to its end, whose answer must be whole."""
    assert sum(len(each.output.token_ids) for each in pieces) == 4
    assert pieces[-1].output.finish_reason == FinishReason.FINISH_REASON_LENGTH
    return pieces[0].routing.rank.worker_id


async def health(system: System, worker_id: int) -> WorkerHealth:
    answer = await system.client.get_worker_health(GetWorkerHealthRequest(), deadline=Deadline.after(10))
    return next(each for each in answer.workers if each.worker_id == worker_id)


def pinned(worker_id: int, **fields: object) -> FrontendServiceGenerateRequest:
    return request(constraints=RoutingConstraints(worker_id=worker_id), **fields)


WORKER_FAULTS = [
    code
    for code in grpc.StatusCode
    if code not in {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE}
]
DISTINCT_FAULTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
"""A code like most, and those of a worker that is full or lost."""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=code.name, marks=[] if code in DISTINCT_FAULTS else pytest.mark.full)
        for code in WORKER_FAULTS
    ],
)
async def test_a_request_is_retried_elsewhere_for_any_code_of_a_failing_worker(
    system: System, code: grpc.StatusCode
) -> None:
    async with hostile_worker(system, HOSTILE, aborts(code)) as worker:
        served = [served_by(await ask(system)) for _ in range(4)]
        assert worker.calls > 0
    assert served == [SOUND] * 4
    await system.until_idle()


@pytest.mark.parametrize(
    "pieces",
    [
        [b"\xff\xff\xff"],
        [b""],
        [],
        [piece(finish=FinishReason.FINISH_REASON_ERROR)],
        [piece(), piece(finish=FinishReason.FINISH_REASON_ABORT)],
        [piece(), b"\x0a\x7f"],
    ],
    ids=["garbage", "empty", "nothing", "engine error", "engine abort", "cut short"],
)
async def test_a_request_is_retried_elsewhere_if_its_worker_sends_no_valid_response(
    system: System, pieces: list[bytes]
) -> None:
    async with hostile_worker(system, HOSTILE, writes(*pieces)) as worker:
        for _ in range(4):
            answer = await ask(system)
            assert sum(len(each.output.token_ids) for each in answer) == 4
            assert answer[-1].output.finish_reason == FinishReason.FINISH_REASON_LENGTH
        assert worker.calls > 0
    await system.until_idle()


async def test_garbage_after_output_ends_the_request_as_lost(system: System) -> None:
    async with hostile_worker(system, HOSTILE, writes(piece(1), b"\xff\xff")):
        with pytest.raises(WorkerLost, match="no WorkerServiceGenerateResponse"):
            await ask(system, pinned(HOSTILE))
    await system.until_idle()


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE])
async def test_a_request_that_its_worker_refuses_is_not_retried_and_never_counts_against_the_worker(
    system: System, code: grpc.StatusCode
) -> None:
    async with hostile_worker(system, HOSTILE, aborts(code)) as worker:
        for _ in range(6):
            with pytest.raises(KvRouterError, match="as the test has it") as refused:
                await ask(system, pinned(HOSTILE))
            assert refused.value.code is code
        assert worker.calls == 6
        assert (await health(system, HOSTILE)).state == WorkerHealthState.WORKER_HEALTH_STATE_HEALTHY


async def test_clients_that_go_away_never_count_against_a_worker(system: System) -> None:
    async with hostile_worker(system, HOSTILE, hangs) as worker:
        asking = [asyncio.create_task(ask(system, pinned(HOSTILE))) for _ in range(6)]
        await until(lambda: worker.under_way == 6)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        await until(lambda: worker.under_way == 0)
        found = await health(system, HOSTILE)
        assert (found.state, found.calls) == (WorkerHealthState.WORKER_HEALTH_STATE_HEALTHY, 0)


async def test_a_failing_worker_gets_no_requests_while_it_is_backed_off_and_comes_back(
    nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    long_back_off = {"worker_back_off_seconds": 600.0, "worker_back_off_max_seconds": 600.0}
    async with running_system(nats_url, etcd_endpoint, namespace, **long_back_off) as system:
        await system.start_worker(SOUND)
        async with hostile_worker(system, HOSTILE, aborts(grpc.StatusCode.INTERNAL)) as worker:
            for _ in range(20):
                assert served_by(await ask(system)) == SOUND
            assert worker.calls == 3
            found = await health(system, HOSTILE)
            assert found.state == WorkerHealthState.WORKER_HEALTH_STATE_BACKED_OFF
            assert found.consecutive_failures == 3
            assert found.retry_in_ms > 0
            assert "as the test has it" in found.last_failure
            worker.behave = answers
            # A request that must go there is tried, and shows that the worker is sound again.
            assert served_by(await ask(system, pinned(HOSTILE))) == HOSTILE
            assert (await health(system, HOSTILE)).state == WorkerHealthState.WORKER_HEALTH_STATE_HEALTHY
            served = Counter([served_by(await ask(system)) for _ in range(6)])
            assert served == {SOUND: 3, HOSTILE: 3}


async def test_after_its_back_off_a_failing_worker_is_tried_by_a_request(system: System) -> None:
    async with hostile_worker(system, HOSTILE, aborts(grpc.StatusCode.INTERNAL)) as worker:
        async with asyncio.timeout(60):
            while worker.calls < 5:
                assert served_by(await ask(system)) == SOUND
            worker.behave = answers
            while served_by(await ask(system)) != HOSTILE:
                await asyncio.sleep(0)
        assert (await health(system, HOSTILE)).consecutive_failures == 0


async def test_workers_that_cannot_be_connected_to_cost_no_attempts(
    nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    # No probe finds them in time.
    options: dict[str, Any] = {"worker_probe_seconds": 600, "max_attempts": 2}
    async with running_system(nats_url, etcd_endpoint, namespace, **options) as system, AsyncExitStack() as stack:
        await system.start_worker(SOUND)
        view = next(iter(system.runtime.directory.components.values()))
        for worker_id, port in enumerate(free_ports(4), HOSTILE):
            gone = registered_beside(view, system.where["etcd"], worker_id, f"127.0.0.1:{port}")
            await stack.enter_async_context(gone)
            await system.until_candidate(worker_id)
        pieces = await ask(
            system, request(constraints=RoutingConstraints(avoided_workers=[AvoidedWorker(worker_id=SOUND)]))
        )
        routing = next(each.routing for each in reversed(pieces) if each.HasField("routing"))
        assert (routing.rank.worker_id, len(routing.earlier_ranks)) == (SOUND, 4)
        assert sum(len(each.output.token_ids) for each in pieces) == 4
        await system.until_idle()


async def test_requests_wait_while_the_last_worker_of_their_pool_stops(system: System) -> None:
    # It refuses them before Frontend and Scheduler learn from its registration that it stops.
    async with hostile_worker(system, HOSTILE, refuses(Draining())) as worker:
        await system.stop_worker(SOUND)
        asking = [asyncio.create_task(ask(system)) for _ in range(4)]
        await until(lambda: worker.calls > len(asking) * 4)
        worker.behave = answers
        assert [served_by(await each) for each in asking] == [HOSTILE] * 4
        worker.behave = refuses(Draining())
        system.wait_for_no_restart()
        with pytest.raises(WorkerLost, match="the service is stopping"):
            await ask(system)
    await system.until_idle()


async def test_requests_are_attempted_even_if_every_worker_fails(system: System) -> None:
    await system.start_worker(3)
    async with hostile_worker(system, HOSTILE, aborts(grpc.StatusCode.INTERNAL)) as worker:
        for sound in (SOUND, 3):
            await system.stop_worker(sound)
        for _ in range(8):
            with pytest.raises(WorkerLost) as lost:
                await ask(system)
            message = str(lost.value)
            assert f"worker {HOSTILE} failed with INTERNAL: as the test has it" in message
            assert "no other worker is eligible for the request" in message
        assert worker.calls == 8
        worker.behave = answers
        assert served_by(await ask(system)) == HOSTILE
    await system.until_idle()


async def test_workers_that_are_all_full_are_load_for_the_client(system: System) -> None:
    async with hostile_worker(system, HOSTILE, aborts(grpc.StatusCode.RESOURCE_EXHAUSTED)):
        await system.stop_worker(SOUND)
        with pytest.raises(AllBusy, match="as the test has it"):
            await ask(system)


async def test_a_worker_that_ignores_max_tokens_is_stopped_at_the_limit(system: System) -> None:
    async def goes_on(context: object) -> None:
        while True:
            await context.write(piece(1, 2, 3))  # type: ignore[attr-defined]
            await asyncio.sleep(0)

    async with hostile_worker(system, HOSTILE, goes_on) as worker:
        assert served_by(await ask(system, pinned(HOSTILE))) == HOSTILE
        assert served_by(await ask(system, pinned(HOSTILE))) == HOSTILE
        await until(lambda: worker.under_way == 0)
        assert system.runtime.registry.get_sample_value("kvrouter_frontend_output_overruns_total") == 2
    await system.until_idle()


async def test_an_answer_that_fails_after_its_last_token_is_complete_for_the_client(system: System) -> None:
    async def fails(context: object) -> None:
        await context.write(piece(1, 2, 3, 4))  # type: ignore[attr-defined]
        await aborts(grpc.StatusCode.INTERNAL)(context)

    async with hostile_worker(system, HOSTILE, fails):
        assert served_by(await ask(system, pinned(HOSTILE))) == HOSTILE
        async with asyncio.timeout(30):
            while (await health(system, HOSTILE)).consecutive_failures != 1:
                await asyncio.sleep(0.01)


async def test_a_request_without_output_leaves_a_worker_that_stopped_answering(system: System) -> None:
    async with hostile_worker(system, HOSTILE, hangs) as worker:
        worker.freeze()
        asking = [asyncio.create_task(ask(system)) for _ in range(8)]
        assert {served_by(await each) for each in asking} == {SOUND}
        assert worker.calls > 0
        await until(lambda: worker.under_way == 0)
        before = worker.calls
        assert {served_by(await ask(system)) for _ in range(6)} == {SOUND}
        assert worker.calls == before, "a suspected worker gets no new requests"
        assert (await health(system, HOSTILE)).state == WorkerHealthState.WORKER_HEALTH_STATE_SUSPECTED
        worker.behave = answers
        worker.thaw()
        async with asyncio.timeout(60):
            while served_by(await ask(system)) != HOSTILE:
                await asyncio.sleep(0)
    await system.until_idle()


async def test_a_worker_that_answers_probes_keeps_requests_without_a_first_token(
    system: System,
) -> None:
    release = asyncio.Event()

    async def computes(context: object) -> None:
        await release.wait()
        await answers(context)

    async with hostile_worker(system, HOSTILE, computes) as worker:
        asking = [asyncio.create_task(ask(system)) for _ in range(4)]
        await until(lambda: worker.under_way == 2)
        # Long enough for a second worker, which is silent, to be suspected.
        async with hostile_worker(system, 3, hangs) as silent:
            silent.freeze()
            async with asyncio.timeout(60):
                while (await health(system, 3)).state != WorkerHealthState.WORKER_HEALTH_STATE_SUSPECTED:
                    await asyncio.sleep(0.01)
        assert worker.under_way == 2
        release.set()
        assert Counter([served_by(await each) for each in asking]) == {SOUND: 2, HOSTILE: 2}


async def test_a_request_stays_with_a_silent_worker_until_another_could_take_it(system: System) -> None:
    async with hostile_worker(system, HOSTILE, hangs) as worker:
        await system.stop_worker(SOUND)
        worker.freeze()
        asking = asyncio.create_task(ask(system))
        async with asyncio.timeout(60):
            while (await health(system, HOSTILE)).state != WorkerHealthState.WORKER_HEALTH_STATE_SUSPECTED:
                await asyncio.sleep(0.01)
        assert worker.under_way == 1
        await system.start_worker(3)
        assert served_by(await asking) == 3


async def test_a_deadline_that_passes_at_a_silent_worker_names_the_cause(system: System) -> None:
    async with hostile_worker(system, HOSTILE, hangs) as worker:
        worker.freeze()
        async with asyncio.timeout(60):
            while (await health(system, HOSTILE)).state != WorkerHealthState.WORKER_HEALTH_STATE_SUSPECTED:
                await asyncio.sleep(0.01)
        stream = system.frontend.generate(pinned(HOSTILE, request_id="r"), deadline=Deadline.after(3))
        with pytest.raises(DeadlineExceeded, match=f"worker {HOSTILE} has missed .* probes"):
            async with aclosing(stream) as pieces:
                await anext(pieces)
    await system.until_idle()


async def test_a_client_that_does_not_read_costs_bounded_memory_and_fails_alone(system: System) -> None:
    large = WorkerServiceGenerateResponse(
        output=GenerateOutput(token_ids=[1], text="x" * (256 << 10))
    ).SerializeToString()
    limit = StopConditions(max_tokens=1000)

    async def produces(context: Any) -> None:
        for _ in range(128):  # 32 MiB
            await context.write(large)
            await asyncio.sleep(0)
        await answers(context)

    async with hostile_worker(system, HOSTILE, produces) as worker:
        sent = pinned(HOSTILE, stop_conditions=limit)
        async with aclosing(system.client.generate(sent, deadline=Deadline.after(60))) as pieces:
            await anext(pieces)
            # The request has ended, though its client has read one piece.
            await until(lambda: worker.under_way == 0)
            await system.until_idle()
            assert served_by(await ask(system, pinned(SOUND))) == SOUND
            with pytest.raises(KvRouterError, match="has not read") as unread:
                async for _ in pieces:
                    pass
        assert unread.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        worker.behave = answers
        assert served_by(await ask(system, pinned(HOSTILE))) == HOSTILE


async def test_best_worker_avoids_unhealthy_workers(system: System) -> None:
    async with hostile_worker(system, HOSTILE, hangs) as worker:
        worker.freeze()
        async with asyncio.timeout(60):
            while (await health(system, HOSTILE)).state != WorkerHealthState.WORKER_HEALTH_STATE_SUSPECTED:
                await asyncio.sleep(0.01)
        asked = FrontendServiceSelectWorkerRequest(
            request=RoutingRequest(model="mock-model", token_ids=TokenIds(ids=[1]))
        )
        chosen = {
            (await system.client.select_worker(asked, deadline=Deadline.after(10))).selection.rank.worker_id
            for _ in range(4)
        }
        assert chosen == {SOUND}


async def test_a_bad_request_is_refused_before_any_worker_is_called(system: System) -> None:
    with pytest.raises(BadRequest):
        await ask(system, request(stop_conditions=StopConditions(max_tokens=0)))


@pytest.mark.parametrize(
    "behave",
    [
        pytest.param(aborts(grpc.StatusCode.INTERNAL), id="fails"),
        pytest.param(aborts(grpc.StatusCode.INVALID_ARGUMENT), id="refuses", marks=pytest.mark.full),
        pytest.param(writes(b"\xff\xff"), id="garbage", marks=pytest.mark.full),
        pytest.param(writes(), id="nothing", marks=pytest.mark.full),
        pytest.param(writes(piece(1), b"\xff\xff"), id="garbage later"),
        pytest.param(writes(piece(finish=FinishReason.FINISH_REASON_ERROR)), id="engine error", marks=pytest.mark.full),
        pytest.param(writes(piece(1, 2, 3, 4, 5)), id="too many tokens"),
    ],
)
async def test_a_request_that_fails_at_a_worker_is_freed_at_once(system: System, behave: Behaviour) -> None:
    async with hostile_worker(system, HOSTILE, behave) as worker:
        with no_request_is_garbage():
            for sent in (request(), pinned(HOSTILE)) * 3:
                with contextlib.suppress(KvRouterError):
                    await ask(system, sent)
            await system.until_idle()
        assert worker.calls >= 3


async def test_a_request_that_leaves_a_silent_worker_is_freed_at_once(system: System) -> None:
    async with hostile_worker(system, HOSTILE, hangs) as worker:
        worker.freeze()
        with no_request_is_garbage():
            assert [served_by(await ask(system)) for _ in range(4)] == [SOUND] * 4
            await system.until_idle()
        assert worker.calls > 0
