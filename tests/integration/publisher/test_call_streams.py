"""Requests on call streams: what ordinary Generate calls do, and a message per engine step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from kvrouter.net.calls import SERVICE as CALL_STREAM_SERVICE, CallStreamClient, NotSent, OutcomeUnknown, RunningCall
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.publisher.serving.engine import Engine, StepEngine
from kvrouter.publisher.serving.outputs import RequestOutput
from kvrouter.publisher.worker_server import SERVICE, WorkerServer
from kvrouter.v1.calls_pb2 import CallStreamClientHello, OpenCallStreamRequest, OpenCallStreamResponse
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.errors_pb2 import ErrorReason
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.worker_pb2 import (
    AbortRequest,
    AbortResponse,
    FinishReason,
    GenerateOutput,
    GetLoadResponse,
    StopConditions,
    WorkerServiceGenerateRequest,
    WorkerServiceGenerateResponse,
)

from .worker_harness import EchoEngine, eventually

LENGTH = FinishReason.FINISH_REASON_LENGTH


class EmittingEngine:
    """Runs requests whose output the test emits."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.aborted: list[str] = []

    def submit(self, request: WorkerServiceGenerateRequest) -> None:
        self.running.append(request.request_id)

    async def abort(self, request_ids: Sequence[str]) -> int:
        self.aborted += request_ids
        return len(request_ids)

    def load(self) -> Mapping[int, LoadReport]:
        return {}


class Received:
    """What one call got."""

    def __init__(self) -> None:
        self.outputs: list[GenerateOutput] = []
        self.ended = False
        self.error: KvRouterError | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    def on_response(self, encoded: bytes) -> None:
        self.outputs.append(WorkerServiceGenerateResponse.FromString(encoded).output)

    def on_end(self) -> None:
        self.ended = True

    def on_error(self, error: KvRouterError) -> None:
        self.error = error


@asynccontextmanager
async def serving(engine: StepEngine | Engine) -> AsyncIterator[tuple[WorkerServer, int]]:
    rank = RankPublisher(subject="", worker_id=1, dp_rank=0, incarnation=1, block_size=16)
    server = WorkerServer(engine, {0: rank}, GetLoadResponse)
    port = await server.start("127.0.0.1:0")
    try:
        yield server, port
    finally:
        await server.refuse_requests()
        await server.stop(1)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[CallStreamClient]:
    client = CallStreamClient(f"127.0.0.1:{port}", client_name="test")
    running = asyncio.create_task(client.run())
    try:
        async with asyncio.timeout(30):
            await client.wait_ready()
        yield client
    finally:
        running.cancel()
        await asyncio.wait([running])


def start(client: CallStreamClient, request_id: str = "r", **fields: Any) -> tuple[Received, RunningCall]:
    known: dict[str, Any] = {"token_ids": [5, 6, 7], "stop_conditions": StopConditions(max_tokens=9)}
    request = WorkerServiceGenerateRequest(request_id=request_id, **(known | fields))
    received = Received()
    return received, client.start(f"{SERVICE}/Generate", request.SerializeToString(), received)


async def test_a_request_of_an_engine_that_streams_by_itself_is_served() -> None:
    async with serving(EchoEngine()) as (server, port), connected(port) as client:
        received, _ = start(client)
        await eventually(lambda: received.ended)
        assert received.tokens == [5, 6, 7]
        assert received.outputs[-1].finish_reason == LENGTH
        await eventually(lambda: server.requests == 0)


async def test_all_outputs_of_a_step_travel_in_one_message_to_each_caller() -> None:
    engine = EmittingEngine()
    async with serving(engine) as (server, port), connected(port) as client, connected(port) as other:
        received = [start(client, f"r{number}")[0] for number in range(64)]
        elsewhere, _ = start(other, "elsewhere")
        await eventually(lambda: len(engine.running) == 65)
        before = client.counts.messages_received
        server.emit([RequestOutput(request_id, [1], LENGTH) for request_id in engine.running])
        await eventually(lambda: all(each.ended for each in (*received, elsewhere)))
        # One more may be the answer to a ping.
        assert client.counts.messages_received - before <= 2
        assert all(each.tokens == [1] for each in (*received, elsewhere))


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"token_ids": []}, "INVALID_ARGUMENT", "BAD_REQUEST"),
        ({"stop_conditions": StopConditions()}, "INVALID_ARGUMENT", "BAD_REQUEST"),
        ({"dp_rank": 7}, "NOT_FOUND", "UNKNOWN_WORKER"),
    ],
)
async def test_a_bad_request_is_refused_as_over_ordinary_calls(fields: dict[str, Any], code: str, reason: str) -> None:
    async with serving(EmittingEngine()) as (_, port), connected(port) as client:
        received, _ = start(client, **fields)
        await eventually(lambda: received.error is not None)
        assert isinstance(received.error, KvRouterError)
        assert received.error.code is grpc.StatusCode[code]
        assert received.error.info.reason == ErrorReason.Value(f"ERROR_REASON_{reason}")
        assert start(client)[0].error is None, "the stream goes on"


async def test_a_repeated_attempt_is_refused_and_the_first_goes_on() -> None:
    engine = EmittingEngine()
    async with serving(engine) as (server, port), connected(port) as client:
        first, _ = start(client)
        second, _ = start(client)
        await eventually(lambda: second.error is not None)
        assert isinstance(second.error, KvRouterError)
        assert second.error.code is grpc.StatusCode.ALREADY_EXISTS
        server.emit([RequestOutput("r", [1], LENGTH)])
        await eventually(lambda: first.ended)
        assert first.tokens == [1]


async def test_a_cancelled_call_aborts_its_request_alone() -> None:
    engine = EmittingEngine()
    async with serving(engine) as (server, port), connected(port) as client:
        _, call = start(client, "a")
        other, _ = start(client, "b")
        await eventually(lambda: engine.running == ["a", "b"])
        call.cancel()
        await eventually(lambda: engine.aborted == ["a"])
        server.emit([RequestOutput("a", [1]), RequestOutput("b", [2], LENGTH)])
        await eventually(lambda: other.ended)
        assert other.tokens == [2]


async def test_a_lost_stream_aborts_its_requests_and_their_outcome_is_unknown() -> None:
    engine = EmittingEngine()
    async with serving(engine) as (server, port), connected(port) as other:
        kept, _ = start(other, "kept")
        async with connected(port) as client:
            received = [start(client, request_id)[0] for request_id in "ab"]
            await eventually(lambda: len(engine.running) == 3)
        await eventually(lambda: sorted(engine.aborted) == ["a", "b"])
        assert all(isinstance(each.error, OutcomeUnknown) for each in received)
        server.emit([RequestOutput("kept", [1], LENGTH)])
        await eventually(lambda: kept.ended)


async def test_an_abort_by_id_is_the_finish_reason_of_the_request() -> None:
    engine = EmittingEngine()
    async with serving(engine) as (_, port), connected(port) as client:
        received, _ = start(client)
        await eventually(lambda: engine.running == ["r"])
        abort = AbortRequest(request_ids=["r"]).SerializeToString()
        response = await client.call(f"{SERVICE}/Abort", abort, time_left=30)
        assert AbortResponse.FromString(response).aborted == 1
        await eventually(lambda: received.ended)
        assert received.outputs[-1].finish_reason == FinishReason.FINISH_REASON_ABORT


async def test_a_worker_that_stops_takes_no_more_requests_and_lets_running_ones_finish() -> None:
    engine = EmittingEngine()
    async with serving(engine) as (server, port), connected(port) as client:
        received, _ = start(client)
        await eventually(lambda: engine.running == ["r"])
        await server.refuse_requests()
        stopping = asyncio.create_task(server.stop(30))
        await eventually(lambda: not client.ready)
        with pytest.raises(NotSent):
            start(client, "late")
        server.emit([RequestOutput("r", [1], LENGTH)])
        await stopping
        assert received.ended
        assert received.tokens == [1]


async def test_a_gateway_that_does_not_read_loses_its_request_and_delays_nobody() -> None:
    engine = EmittingEngine()
    large = GenerateOutput(text="x" * (256 << 10))
    async with (
        serving(engine) as (server, port),
        connected(port) as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel,
    ):
        rpc: Any = channel.stream_stream(f"/{CALL_STREAM_SERVICE}/OpenCallStream")()
        hello = OpenCallStreamRequest(client_hello=CallStreamClientHello(version=1, client_name="stalled"))
        await rpc.write(hello.SerializeToString())
        methods = list(OpenCallStreamResponse.FromString(await rpc.read()).server_hello.methods)
        call = OpenCallStreamRequest()
        request = WorkerServiceGenerateRequest(
            request_id="stalled", token_ids=[1], stop_conditions=StopConditions(max_tokens=9)
        )
        call.calls.add(number=1, method=methods.index(f"{SERVICE}/Generate"), request=request.SerializeToString())
        await rpc.write(call.SerializeToString())
        kept, _ = start(client, "kept")
        await eventually(lambda: sorted(engine.running) == ["kept", "stalled"])
        for _ in range(128):  # 32 MiB
            server.emit([RequestOutput("stalled", [1], details=large), RequestOutput("kept", [1])])
            await asyncio.sleep(0)
        await eventually(lambda: engine.aborted == ["stalled"])
        await eventually(lambda: len(kept.tokens) == 128)
        rpc.cancel()
