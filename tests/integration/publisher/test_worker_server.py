"""WorkerService as callers meet it: over gRPC, with errors that they can act on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from kvrouter.publisher.errors import InvalidConfig
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.publisher.worker import Worker, running
from kvrouter.publisher.worker_server import SERVICE
from kvrouter.v1.common_pb2 import Cursor
from kvrouter.v1.errors_pb2 import ErrorInfo, ErrorReason
from kvrouter.v1.worker_pb2 import (
    AbortRequest,
    AbortResponse,
    FinishReason,
    GetEventsRequest,
    GetEventsResponse,
    GetLoadRequest,
    GetLoadResponse,
    GetRankStateRequest,
    GetRankStateResponse,
    StopConditions,
    WorkerServiceGenerateRequest,
    WorkerServiceGenerateResponse,
)

from ...faults.wires import Wire
from ...garbage import no_request_is_garbage
from .worker_harness import EchoEngine, config, eventually, store


class Calls:
    """The service's methods on a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        def stream(name: str, response: Any) -> Any:
            return channel.unary_stream(
                f"/{SERVICE}/{name}", request_serializer=_encode, response_deserializer=response.FromString
            )

        def unary(name: str, response: Any) -> Any:
            return channel.unary_unary(
                f"/{SERVICE}/{name}", request_serializer=_encode, response_deserializer=response.FromString
            )

        self.generate = stream("Generate", WorkerServiceGenerateResponse)
        self.rank_state = stream("GetRankState", GetRankStateResponse)
        self.events = stream("GetEvents", GetEventsResponse)
        self.abort = unary("Abort", AbortResponse)
        self.load = unary("GetLoad", GetLoadResponse)


def _encode(request: Any) -> bytes:
    return request if isinstance(request, bytes) else request.SerializeToString()


@asynccontextmanager
async def serving(
    engine: EchoEngine, namespace: str, etcd: str, nats_url: str, **settings: Any
) -> AsyncIterator[tuple[Worker, Calls, grpc.aio.Channel]]:
    async with (
        running(config(namespace, etcd, nats_url, **settings), engine) as worker,
        grpc.aio.insecure_channel(worker.endpoint) as channel,
    ):
        yield worker, Calls(channel), channel


def request(tokens: list[int], **fields: Any) -> WorkerServiceGenerateRequest:
    known: dict[str, Any] = {"request_id": "r", "stop_conditions": StopConditions(max_tokens=9)}
    return WorkerServiceGenerateRequest(token_ids=tokens, **(known | fields))


def detail(error: grpc.aio.AioRpcError) -> ErrorInfo:
    (value,) = [value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin"]
    assert isinstance(value, bytes)
    status = Status.FromString(value)
    info = ErrorInfo()
    assert status.code == error.code().value[0]
    assert status.details[0].Unpack(info)
    return info


async def test_a_request_streams_its_tokens(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    engine = EchoEngine()
    async with serving(engine, namespace, etcd_endpoint, nats_url) as (_, calls, _channel):
        outputs = [response.output async for response in calls.generate(request([5, 6, 7]))]
    assert [token for output in outputs for token in output.token_ids] == [5, 6, 7]
    assert outputs[-1].finish_reason == FinishReason.FINISH_REASON_LENGTH
    assert engine.aborted == []


async def test_a_refused_request_is_freed_with_its_answer(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    async with serving(EchoEngine(), namespace, etcd_endpoint, nats_url) as (_, calls, _channel):
        with no_request_is_garbage():
            for refused in 3 * (request([1] * 100, dp_rank=9), request([1] * 100, stop_conditions=None), b"\xff" * 100):
                call = calls.generate(_encode(refused))
                assert await call.code() != grpc.StatusCode.OK


@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline"])
async def test_a_caller_that_goes_away_aborts_its_request(
    namespace: str, etcd_endpoint: str, nats_url: str, how: str
) -> None:
    engine = EchoEngine()
    async with serving(engine, namespace, etcd_endpoint, nats_url) as (worker, _, _channel), AsyncExitStack() as stack:
        wire = Wire(int(worker.endpoint.rpartition(":")[2]))
        await stack.enter_async_context(wire.laid())
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(wire.address))
        call = Calls(channel).generate(request([0, 1]), timeout=4 if how == "deadline" else None)
        await call.read()
        await engine.started.wait()
        if how == "cancel":
            call.cancel()
        elif how == "disconnect":
            wire.cut()
        await eventually(lambda: engine.aborted == ["r"] and engine.closed.is_set())
        assert not engine.running
        await eventually(lambda: worker.stats().requests == 0)


async def test_a_worker_without_an_engine_publishes_only(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    async with (
        running(config(namespace, etcd_endpoint, nats_url)) as worker,
        grpc.aio.insecure_channel(worker.endpoint) as channel,
    ):
        store(worker.rank(0), 1)
        calls = Calls(channel)
        (chunk,) = [chunk async for chunk in calls.rank_state(GetRankStateRequest())]
        assert [block.engine_hash for block in chunk.blocks] == [1]
        assert (await calls.load(GetLoadRequest())).reports == []
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await calls.generate(request([1, 2])).read()
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert detail(refused.value).retry_elsewhere


async def test_abort_by_id(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    engine = EchoEngine()
    async with serving(engine, namespace, etcd_endpoint, nats_url) as (_, calls, _channel):
        call = calls.generate(request([0]))
        await call.read()
        assert (await calls.abort(AbortRequest(request_ids=["r", "unknown"]))).aborted == 1
        call.cancel()


@pytest.mark.parametrize(
    ("bad", "code", "reason", "field"),
    [
        (request([]), "INVALID_ARGUMENT", "BAD_REQUEST", "token_ids"),
        (request([1], stop_conditions=None), "INVALID_ARGUMENT", "BAD_REQUEST", "stop_conditions.max_tokens"),
        (request([1], dp_rank=7), "NOT_FOUND", "UNKNOWN_WORKER", "dp_rank"),
        (b"\xff\xff\xff", "INVALID_ARGUMENT", "BAD_REQUEST", ""),
    ],
)
async def test_responses_to_bad_requests_name_the_fault(
    namespace: str, etcd_endpoint: str, nats_url: str, bad: Any, code: str, reason: str, field: str
) -> None:
    async with serving(EchoEngine(), namespace, etcd_endpoint, nats_url) as (_, calls, _channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await calls.generate(bad).read()
        assert caught.value.code() == grpc.StatusCode[code]
        info = detail(caught.value)
        assert info.reason == ErrorReason.Value(f"ERROR_REASON_{reason}")
        assert info.field == field
        assert [len(response.output.token_ids) async for response in calls.generate(request([1]))] == [1, 0]


async def test_an_engine_that_fails_tells_no_secrets(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    class Failing(EchoEngine):
        async def abort(self, request_ids: Any) -> int:
            raise RuntimeError("secret")

    async with serving(Failing(), namespace, etcd_endpoint, nats_url) as (_, calls, _channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await calls.abort(AbortRequest(request_ids=["r"]))
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        assert "secret" not in (caught.value.details() or "")


async def test_state_and_events_serve_repair(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    async with serving(EchoEngine(), namespace, etcd_endpoint, nats_url, buffer_events=10) as (worker, calls, _channel):
        rank = worker.rank()
        store(rank, 1, 10_000)
        for number in range(20_001, 20_021):
            store(rank, number)
        chunks = [chunk async for chunk in calls.rank_state(GetRankStateRequest(dp_rank=0))]
        assert [chunk.last for chunk in chunks] == [False, False, True]
        assert sum(len(chunk.blocks) for chunk in chunks) == 10_020
        assert {chunk.digest for chunk in chunks} == {rank.stats().digest}
        assert {chunk.cursor.next_event_id for chunk in chunks} == {22}

        def wanted(event_id: int, incarnation: int = worker.incarnation) -> GetEventsRequest:
            cursor = Cursor(incarnation=incarnation, next_event_id=event_id)
            return GetEventsRequest(start=cursor)

        (answer,) = [response async for response in calls.events(wanted(12))]
        assert [event.event_id for event in answer.batch.events] == list(range(12, 22))
        assert [response async for response in calls.events(wanted(22))] == []
        for gone in (wanted(0), wanted(23), wanted(12, incarnation=1)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await calls.events(gone).read()
            assert caught.value.code() == grpc.StatusCode.OUT_OF_RANGE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await calls.rank_state(GetRankStateRequest(dp_rank=4)).read()
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_state_and_events_are_made_beside_the_loop(
    namespace: str, etcd_endpoint: str, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_in: list[threading.Thread] = []

    def noting(make: Any) -> Any:
        def noted(*arguments: Any) -> Any:
            made_in.append(threading.current_thread())
            return make(*arguments)

        return noted

    async with serving(EchoEngine(), namespace, etcd_endpoint, nats_url) as (worker, calls, _channel):
        store(worker.rank(), 1, 100)
        await worker.flush()
        monkeypatch.setattr(RankPublisher, "state_chunks", noting(RankPublisher.state_chunks))
        monkeypatch.setattr(RankPublisher, "events", noting(RankPublisher.events))
        assert len([chunk async for chunk in calls.rank_state(GetRankStateRequest(dp_rank=0))]) == 1
        cursor = Cursor(incarnation=worker.incarnation, next_event_id=0)
        wanted = GetEventsRequest(start=cursor)
        assert len([response async for response in calls.events(wanted)]) == 1
        assert len(made_in) == 2
        assert threading.main_thread() not in made_in


async def test_load_health_and_reflection(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    async with serving(EchoEngine(), namespace, etcd_endpoint, nats_url) as (worker, calls, channel):
        (report,) = (await calls.load(GetLoadRequest())).reports
        assert (report.rank.worker_id, report.incarnation) == (worker.config.worker_id, worker.incarnation)
        check = health_pb2_grpc.HealthStub(channel).Check
        assert (await check(health_pb2.HealthCheckRequest(service=SERVICE))).status == 1
        for version in ("v1", "v1alpha"):
            info: Any = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            names = [s.name async for r in info(requests) for s in r.list_services_response.service]
            assert SERVICE in names


async def test_a_worker_that_stops_lets_requests_finish_and_takes_no_more(
    namespace: str, etcd_endpoint: str, nats_url: str
) -> None:
    engine = EchoEngine()
    release = asyncio.Event()

    class Slow(EchoEngine):
        async def generate(self, request: Any) -> AsyncIterator[Any]:  # type: ignore[override]
            async for output in engine.generate(request):
                yield output
                await release.wait()

    settings = config(namespace, etcd_endpoint, nats_url, drain_seconds=30)
    stopping = asyncio.Event()
    ready: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        async with running(settings, Slow()) as worker:
            ready.set_result(worker)
            await stopping.wait()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(work())
        worker = await ready
        async with grpc.aio.insecure_channel(worker.endpoint) as channel:
            calls = Calls(channel)
            pieces = aiter(calls.generate(request([1, 2])))
            await anext(pieces)
            stopping.set()
            await eventually(lambda: worker.stats().draining)

            async def refused() -> bool:
                try:
                    await calls.generate(request([1])).read()
                except grpc.aio.AioRpcError as error:
                    return error.code() == grpc.StatusCode.UNAVAILABLE
                return False

            await eventually(refused)
            release.set()
            rest = [response.output async for response in pieces]
            assert rest[-1].finish_reason == FinishReason.FINISH_REASON_LENGTH


async def test_a_port_that_is_taken_is_a_clear_error(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    async with serving(EchoEngine(), namespace, etcd_endpoint, nats_url) as (worker, _calls, _channel):
        with pytest.raises(InvalidConfig, match="cannot listen"):
            async with running(config(namespace, etcd_endpoint, nats_url, bind=worker.endpoint), EchoEngine()):
                pass
