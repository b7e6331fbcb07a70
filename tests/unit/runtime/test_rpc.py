"""Objects of a contract behind a real gRPC server, called through a real channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kvrouter.runtime import errors
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import BindFailed, RpcServer, add_service, open_channel, open_server, remote
from kvrouter.v1 import indexer_pb2, scheduler_pb2, worker_pb2
from kvrouter.v1.errors_pb2 import ErrorReason
from kvrouter.v1.indexer_pb2 import FindMatchesRequest, FindMatchesResponse, LoadRequest, LoadResponse
from kvrouter.v1.scheduler_pb2 import SessionRequest, SessionResponse
from kvrouter.v1.worker_pb2 import (
    AbortRequest,
    AbortResponse,
    WorkerServiceGenerateRequest,
    WorkerServiceGenerateResponse,
)

INDEXER = indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"]
SCHEDULER = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
WORKER = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]


class Worker:
    """Generates as many pieces as asked for; says what it saw."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()
        self.deadlines: list[Deadline] = []
        self.failure: Exception | None = None
        self.endless = False

    async def generate(
        self, request: WorkerServiceGenerateRequest, *, deadline: Deadline
    ) -> AsyncGenerator[WorkerServiceGenerateResponse, None]:
        self.deadlines.append(deadline)
        try:
            produced = 0
            while self.endless or produced < request.stop_conditions.max_tokens:
                yield WorkerServiceGenerateResponse(output=worker_pb2.GenerateOutput(token_ids=[produced]))
                produced += 1
                self.entered.set()
            if self.failure is not None:
                raise self.failure
            if not request.stop_conditions.max_tokens:
                await self.go_on.wait()
        finally:
            self.closed.set()

    async def abort(self, request: AbortRequest, *, deadline: Deadline) -> AbortResponse:
        self.deadlines.append(deadline)
        self.entered.set()
        try:
            if self.failure is not None:
                raise self.failure
            if not request.request_ids:
                await self.go_on.wait()
            return AbortResponse(aborted=len(request.request_ids))
        finally:
            self.closed.set()


@asynccontextmanager
async def serving(
    descriptor: Any, implementation: object, **options: Any
) -> AsyncIterator[tuple[RpcServer, grpc.aio.Channel]]:
    server = open_server("127.0.0.1:0", **options)
    add_service(server, descriptor, implementation)
    await server.start()
    channel = open_channel(server.endpoint())
    try:
        yield server, channel
    finally:
        await channel.close()
        await server.drain(0)


def soon() -> Deadline:
    return Deadline.after(10)


TYPED_ERRORS: list[errors.KvRouterError] = [
    errors.BadRequest("bad", field="a.b", advice="Do this."),
    errors.UnknownModel("m", ["x", "y"]),
    errors.BlockSizeMismatch(32, 16),
    errors.PromptTooLong(11, 10),
    errors.UnknownWorker(7, [1, 2]),
    errors.NoWorkers("none"),
    errors.AllBusy(250),
    errors.NotReady("restoring"),
    errors.WorkerLost(3, "gone"),
    errors.RequestIdReused("r"),
    errors.SessionLost("s"),
    errors.DeadlineExceeded(),
    errors.Draining(),
    errors.DependencyAway("no etcd"),
    errors.NotFound("no such thing"),
    errors.OutOfRange("too old"),
    errors.Unimplemented("not offered"),
    errors.TooLarge("too large"),
]


@pytest.mark.parametrize("error", TYPED_ERRORS, ids=lambda error: type(error).__name__)
async def test_a_typed_error_comes_out_of_the_stub_as_it_went_in(error: errors.KvRouterError) -> None:
    worker = Worker()
    worker.failure = error
    async with serving(WORKER, worker) as (_, channel):
        stub = remote(WORKER, channel)
        with pytest.raises(type(error)) as unary:
            await stub.abort(AbortRequest(), deadline=soon())
        with pytest.raises(type(error)) as stream:
            async for _ in stub.generate(WorkerServiceGenerateRequest(), deadline=soon()):
                pass
    for caught in (unary.value, stream.value):
        assert caught.code == error.code
        assert caught.info == error.info
        assert str(caught) == str(error)


def test_every_error_class_with_a_reason_is_among_those_tested() -> None:
    tested = {type(error).reason for error in TYPED_ERRORS}
    assert tested == set(ErrorReason.values())


async def test_a_retry_time_is_also_sent_as_googles_retry_info() -> None:
    worker = Worker()
    worker.failure = errors.AllBusy(1250)
    async with serving(WORKER, worker) as (_, channel):
        call: Any = channel.unary_unary("/kvrouter.v1.WorkerService/Abort")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    status = status_pb2.Status.FromString(dict(caught.value.trailing_metadata())[errors.STATUS_KEY])
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert retry.retry_delay.ToMilliseconds() == 1250


def test_errors_survive_being_carried_in_another_message() -> None:
    for error in TYPED_ERRORS:
        restored = errors.from_parts(*errors.to_parts(error))
        assert type(restored) is type(error)
        assert restored.info == error.info
    assert errors.from_parts(4711, "odd").code == grpc.StatusCode.UNKNOWN


async def test_a_huge_message_in_an_error_does_not_break_the_call() -> None:
    worker = Worker()
    worker.failure = errors.BadRequest("x" * 100_000, advice="y" * 100_000, known=["z" * 9000] * 99)
    async with serving(WORKER, worker) as (_, channel):
        with pytest.raises(errors.BadRequest):
            await remote(WORKER, channel).abort(AbortRequest(), deadline=soon())


async def test_an_unexpected_exception_is_internal_and_tells_nothing() -> None:
    worker = Worker()
    worker.failure = KeyError("secret")
    async with serving(WORKER, worker) as (_, channel):
        stub = remote(WORKER, channel)
        with pytest.raises(errors.Internal) as caught:
            await stub.abort(AbortRequest(), deadline=soon())
        assert "secret" not in str(caught.value)
        assert "secret" not in str(caught.value.info)
        worker.failure = None
        assert (await stub.abort(AbortRequest(request_ids=["a"]), deadline=soon())).aborted == 1


async def test_the_clients_deadline_reaches_the_method() -> None:
    worker = Worker()
    async with serving(WORKER, worker) as (_, channel):
        stub = remote(WORKER, channel)
        await stub.abort(AbortRequest(request_ids=["a"]), deadline=Deadline.after(100))
        await stub.abort(AbortRequest(request_ids=["a"]), deadline=Deadline.never())
        async for _ in stub.generate(_tokens(1), deadline=Deadline.never()):
            pass
    first, default, stream = (deadline.remaining() for deadline in worker.deadlines)
    assert first is not None
    assert 30 < first < 110  # gRPC rounds a timeout up on the wire
    assert default is not None
    assert default <= 30
    assert stream is None


async def test_a_call_that_outlives_its_deadline_is_ended_on_both_sides() -> None:
    worker = Worker()
    async with serving(WORKER, worker) as (server, channel):
        stub = remote(WORKER, channel)
        with pytest.raises(errors.DeadlineExceeded):
            await stub.abort(AbortRequest(), deadline=Deadline.after(0.05))
        await worker.closed.wait()
        worker.closed.clear()
        with pytest.raises(errors.DeadlineExceeded):
            async for _ in stub.generate(_tokens(0), deadline=Deadline.after(0.05)):
                pass
        await worker.closed.wait()
        with pytest.raises(errors.DeadlineExceeded):
            await stub.abort(AbortRequest(request_ids=["a"]), deadline=Deadline.after(-1))
        await _until_idle(server)


async def test_closing_a_stream_early_closes_the_generator_behind_it() -> None:
    worker = Worker()
    worker.endless = True
    async with serving(WORKER, worker) as (server, channel):
        async with aclosing(remote(WORKER, channel).generate(_tokens(1), deadline=Deadline.never())) as pieces:
            await anext(pieces)
        await worker.closed.wait()
        await _until_idle(server)


async def test_cancelling_a_caller_cancels_the_method() -> None:
    worker = Worker()
    async with serving(WORKER, worker) as (server, channel):
        call = asyncio.ensure_future(remote(WORKER, channel).abort(AbortRequest(), deadline=soon()))
        await worker.entered.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await worker.closed.wait()
        await _until_idle(server)


async def test_closing_the_channel_fails_its_calls_instead_of_cancelling_their_callers() -> None:
    worker = Worker()
    async with serving(WORKER, worker) as (server, _):
        channel = open_channel(server.endpoint())
        call = asyncio.ensure_future(remote(WORKER, channel).abort(AbortRequest(), deadline=soon()))
        await worker.entered.wait()
        await channel.close()
        with pytest.raises(errors.DependencyAway):
            await call


async def test_encoded_responses_pass_through_unparsed() -> None:
    class Encoded:
        async def generate_encoded(self, request: Any, *, deadline: Deadline) -> AsyncGenerator[bytes, None]:
            yield b"\xff not protobuf"
            yield b""

        def generate(self, request: Any, *, deadline: Deadline) -> Any:
            raise AssertionError

        async def abort(self, request: AbortRequest, *, deadline: Deadline) -> bytes:
            return AbortResponse(aborted=5).SerializeToString()

    async with serving(WORKER, Encoded()) as (_, channel):
        raw = remote(WORKER, channel, raw_responses=frozenset({"Generate"}))
        pieces = [piece async for piece in raw.generate(_tokens(1), deadline=soon())]
        assert pieces == [b"\xff not protobuf", b""]
        assert (await raw.abort(AbortRequest(), deadline=soon())).aborted == 5
        with pytest.raises(errors.Internal):
            async for _ in remote(WORKER, channel).generate(_tokens(1), deadline=soon()):
                pass


class Sessions:
    """Answers each call; ends badly when told to."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def session(
        self, requests: AsyncIterator[SessionRequest], *, deadline: Deadline
    ) -> AsyncGenerator[SessionResponse, None]:
        try:
            async for request in requests:
                if request.call_id == 99:
                    raise errors.SessionLost("s")
                yield SessionResponse(call_id=request.call_id)
        finally:
            self.closed.set()


async def test_both_sides_of_a_session_are_streams() -> None:
    turns: asyncio.Queue[int] = asyncio.Queue()

    async def requests() -> AsyncIterator[SessionRequest]:
        while (call_id := await turns.get()) != 0:
            yield SessionRequest(call_id=call_id)

    sessions = Sessions()
    async with serving(SCHEDULER, sessions) as (_, channel):
        async with aclosing(remote(SCHEDULER, channel).session(requests(), deadline=Deadline.never())) as responses:
            for call_id in (1, 2, 3):
                turns.put_nowait(call_id)
                assert (await anext(responses)).call_id == call_id
            turns.put_nowait(0)
            with pytest.raises(StopAsyncIteration):
                await anext(responses)
        await sessions.closed.wait()


async def test_a_session_that_fails_raises_at_its_client_and_stops_its_requests() -> None:
    stopped = asyncio.Event()

    async def requests() -> AsyncIterator[SessionRequest]:
        try:
            yield SessionRequest(call_id=99)
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with serving(SCHEDULER, Sessions()) as (_, channel):
        async with aclosing(remote(SCHEDULER, channel).session(requests(), deadline=Deadline.never())) as responses:
            with pytest.raises(errors.SessionLost):
                await anext(responses)
        await stopped.wait()


async def test_an_error_in_the_requests_of_a_session_is_the_callers_own() -> None:
    async def requests() -> AsyncIterator[SessionRequest]:
        yield SessionRequest(call_id=1)
        raise ZeroDivisionError

    sessions = Sessions()
    async with serving(SCHEDULER, sessions) as (_, channel):
        with pytest.raises(ZeroDivisionError):
            async for _ in remote(SCHEDULER, channel).session(requests(), deadline=Deadline.never()):
                pass
        await sessions.closed.wait()


async def test_a_client_stream_gets_one_answer_even_before_it_has_sent_all() -> None:
    class Indexer:
        async def load(self, requests: AsyncIterator[LoadRequest], *, deadline: Deadline) -> LoadResponse:
            count = 0
            async for _ in requests:
                count += 1
                if count == 3:
                    break
            return LoadResponse(ranks=count)

    async def requests(count: int | None) -> AsyncIterator[LoadRequest]:
        for _ in range(count or 3):
            yield LoadRequest()
        if count is None:
            await asyncio.Event().wait()

    async with serving(INDEXER, Indexer()) as (_, channel):
        stub = remote(INDEXER, channel)
        assert (await stub.load(requests(2), deadline=soon())).ranks == 2
        assert (await stub.load(requests(None), deadline=soon())).ranks == 3


async def test_methods_that_the_object_lacks_are_unimplemented() -> None:
    async with serving(WORKER, Worker()) as (_, channel):
        stub = remote(WORKER, channel)
        with pytest.raises(errors.Unimplemented):
            await stub.get_load(worker_pb2.GetLoadRequest(), deadline=soon())
        with pytest.raises(errors.Unimplemented):
            await remote(INDEXER, channel).find_matches(FindMatchesRequest(), deadline=soon())
        with pytest.raises(AttributeError):
            _ = stub.no_such_method


async def test_a_malformed_request_is_refused_and_harms_nothing() -> None:
    async with serving(WORKER, Worker()) as (_, channel):
        unary: Any = channel.unary_unary("/kvrouter.v1.WorkerService/Abort")
        stream: Any = channel.unary_stream("/kvrouter.v1.WorkerService/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await unary(b"\xff\xff\xff")
        assert isinstance(errors.from_rpc_error(refused.value), errors.BadRequest)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stream(b"\xff\xff\xff"):
                pass
        assert isinstance(errors.from_rpc_error(refused.value), errors.BadRequest)
        answer = await remote(WORKER, channel).abort(AbortRequest(request_ids=["a"]), deadline=soon())
        assert answer.aborted == 1


async def test_a_malformed_message_in_a_session_ends_it_as_a_bad_request() -> None:
    sessions = Sessions()
    async with serving(SCHEDULER, sessions) as (_, channel):
        session: Any = channel.stream_stream("/kvrouter.v1.SchedulerService/Session")
        rpc = session(iter([b"\xff\xff"]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in rpc:
                pass
        assert isinstance(errors.from_rpc_error(refused.value), errors.BadRequest)
        await sessions.closed.wait()


async def test_a_hundred_megabytes_are_refused_and_harm_nothing() -> None:
    async with serving(WORKER, Worker()) as (server, channel):
        with pytest.raises(errors.TooLarge) as caught:
            await remote(WORKER, channel).abort(AbortRequest(request_ids=["x" * 100_000_000]), deadline=soon())
        assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        answer = await remote(WORKER, channel).abort(AbortRequest(request_ids=["a"]), deadline=soon())
        assert answer.aborted == 1
        await _until_idle(server)


async def test_calls_beyond_the_bound_are_refused_at_once() -> None:
    worker = Worker()
    async with serving(WORKER, worker, max_calls=1) as (_, channel):
        stub = remote(WORKER, channel)
        held = asyncio.ensure_future(stub.abort(AbortRequest(), deadline=soon()))
        await worker.entered.wait()
        with pytest.raises(errors.TooLarge):
            await stub.abort(AbortRequest(request_ids=["a"]), deadline=soon())
        worker.go_on.set()
        await held


async def test_draining_finishes_calls_under_way_and_refuses_new_ones() -> None:
    worker = Worker()
    async with serving(WORKER, worker) as (server, channel):
        await server.health.set_ready(WORKER.full_name)
        stub = remote(WORKER, channel)
        unary = asyncio.ensure_future(stub.abort(AbortRequest(), deadline=soon()))
        await worker.entered.wait()
        drained = asyncio.ensure_future(server.drain(10))
        while server.health.ready:
            await asyncio.sleep(0)
        with pytest.raises(errors.Draining) as refused:
            await stub.abort(AbortRequest(request_ids=["a"]), deadline=soon())
        assert refused.value.info.retry_elsewhere
        assert not drained.done()
        worker.go_on.set()
        assert (await unary).aborted == 0
        await drained
        with pytest.raises(errors.DependencyAway):
            await stub.abort(AbortRequest(request_ids=["a"]), deadline=soon())


async def test_draining_ends_sessions_at_once_and_tells_their_clients() -> None:
    async def requests() -> AsyncIterator[SessionRequest]:
        yield SessionRequest(call_id=1)
        await asyncio.Event().wait()

    async with serving(SCHEDULER, Sessions()) as (server, channel):
        async with aclosing(remote(SCHEDULER, channel).session(requests(), deadline=Deadline.never())) as responses:
            await anext(responses)
            drained = asyncio.ensure_future(server.drain(3600))
            with pytest.raises(errors.Draining):
                await anext(responses)
        await drained


async def test_draining_cuts_off_calls_that_take_too_long() -> None:
    worker = Worker()
    async with serving(WORKER, worker) as (server, channel):
        call = asyncio.ensure_future(remote(WORKER, channel).abort(AbortRequest(), deadline=soon()))
        await worker.entered.wait()
        await server.drain(0)
        with pytest.raises(errors.KvRouterError):
            await call
        await worker.closed.wait()


async def test_a_service_out_of_reach_is_a_dependency_away() -> None:
    async with serving(WORKER, Worker()) as (server, _):
        endpoint = server.endpoint()
    channel = open_channel(endpoint)
    with pytest.raises(errors.DependencyAway):
        await remote(WORKER, channel).abort(AbortRequest(), deadline=soon())
    await channel.close()


async def test_two_servers_do_not_share_a_port() -> None:
    async with serving(WORKER, Worker()) as (server, _):
        second = open_server(server.endpoint())
        with pytest.raises(BindFailed, match="cannot listen on"):
            await second.start()


async def test_health_follows_each_service_and_all_of_them() -> None:
    server = open_server("127.0.0.1:0")
    add_service(server, WORKER, Worker())
    add_service(server, INDEXER, object())
    await server.start()
    serving_status = health_pb2.HealthCheckResponse.ServingStatus
    async with open_channel(server.endpoint()) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def status(name: str) -> str:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            return str(serving_status.Name(answer.status))

        assert await status(WORKER.full_name) == "NOT_SERVING"
        await server.health.set_ready(WORKER.full_name)
        assert await status(WORKER.full_name) == "SERVING"
        assert await status("") == "NOT_SERVING"
        await server.health.set_ready(INDEXER.full_name)
        assert await status("") == "SERVING"
        await server.health.set_ready(INDEXER.full_name, False)
        assert await status("") == "NOT_SERVING"
        assert not server.health.ready
    await server.drain(0)


async def test_reflection_lists_services_by_their_full_names() -> None:
    async with serving(WORKER, Worker()) as (_, channel):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([request])):
            names = {service.name for service in answer.list_services_response.service}
            assert {"kvrouter.v1.WorkerService", "grpc.health.v1.Health"} <= names
            return
    raise AssertionError("reflection did not answer")


async def test_an_endpoint_can_be_advertised_under_another_name() -> None:
    async with serving(WORKER, Worker()) as (server, _):
        assert server.endpoint() == f"127.0.0.1:{server.port}"
        assert server.endpoint("node-7") == f"node-7:{server.port}"
        assert server.endpoint("node-7:9000") == "node-7:9000"
        assert server.endpoint("[::1]") == f"[::1]:{server.port}"
        assert server.endpoint("[::1]:9000") == "[::1]:9000"


async def test_a_response_can_be_any_message_of_the_contract() -> None:
    class Indexer:
        async def find_matches(self, request: FindMatchesRequest, *, deadline: Deadline) -> FindMatchesResponse:
            return FindMatchesResponse()

    async with serving(INDEXER, Indexer()) as (_, channel):
        answer = await remote(INDEXER, channel).find_matches(FindMatchesRequest(), deadline=soon())
        assert answer == FindMatchesResponse()


def _tokens(count: int) -> WorkerServiceGenerateRequest:
    return WorkerServiceGenerateRequest(stop_conditions=worker_pb2.StopConditions(max_tokens=count))


async def _until_idle(server: RpcServer) -> None:
    async with asyncio.timeout(10):
        while server.calls:
            await asyncio.sleep(0.005)
