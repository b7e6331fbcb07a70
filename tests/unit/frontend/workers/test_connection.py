"""What an ordinary call to a worker says of its request: never sent, or perhaps processed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio
import pytest
from kvrouter.frontend.workers.connection import Probe, WorkerConnection
from kvrouter.net.calls import CallStreamCounts, NotSent, OutcomeUnknown
from kvrouter.net.rpc.call_gate import EvictableCalls
from kvrouter.net.rpc.server import GrpcServer
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.error_encoding import set_error
from kvrouter.v1.errors import DependencyAway


class Failed:
    """Records how a call failed."""

    def __init__(self) -> None:
        self.error: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def on_response(self, encoded: bytes) -> None:
        raise AssertionError(encoded)

    def on_end(self) -> None:
        raise AssertionError

    def on_error(self, error: Exception) -> None:
        self.error.set_result(error)


async def test_a_request_is_not_sent_to_a_worker_that_cannot_be_connected_to() -> None:
    connection = WorkerConnection("127.0.0.1:1", "tester", CallStreamCounts())
    receiver = Failed()
    connection.generate(b"", receiver, deadline=Deadline.after(60))
    assert isinstance(await asyncio.wait_for(receiver.error, 60), NotSent)
    await connection.close()


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """The port of a worker that fails requests with their text as the message, with or without a reason."""

    async def generate(request: bytes, context: Any) -> None:
        if request == b"with a reason":
            set_error(context, DependencyAway("the engine starts"))
        else:
            context.set_code(grpc.StatusCode.UNAVAILABLE)

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvrouter.v1.WorkerService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield port
    await server.stop(0)


@pytest.mark.parametrize("request_bytes", [b"with a reason", b"without"])
async def test_a_worker_that_answers_that_it_is_away_has_answered(port: int, request_bytes: bytes) -> None:
    connection = WorkerConnection(f"127.0.0.1:{port}", "tester", CallStreamCounts())
    receiver = Failed()
    connection.generate(request_bytes, receiver, deadline=Deadline.after(60))
    error = await asyncio.wait_for(receiver.error, 60)
    assert isinstance(error, DependencyAway)
    assert not isinstance(error, OutcomeUnknown)
    await connection.close()


async def test_a_connection_reported_lost_after_its_call_is_lost(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = WorkerConnection(f"127.0.0.1:{port}", "tester", CallStreamCounts())
    asked: list[grpc.ChannelConnectivity] = []

    async def report_change(state: grpc.ChannelConnectivity) -> None:
        asked.append(state)

    await connection.probe()
    assert connection._is_channel_ready
    monkeypatch.setattr(connection._channel, "wait_for_state_change", report_change)
    receiver = Failed()
    connection.generate(b"without", receiver, deadline=Deadline.after(60))
    assert isinstance(await asyncio.wait_for(receiver.error, 60), OutcomeUnknown)
    assert asked == [grpc.ChannelConnectivity.READY]
    await connection.close()


async def test_a_request_that_its_worker_has_read_was_sent_even_if_the_worker_can_no_longer_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading = asyncio.Event()

    async def generate(_request: bytes, _context: object) -> None:
        reading.set()
        await asyncio.Event().wait()

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvrouter.v1.WorkerService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    connection = WorkerConnection(f"127.0.0.1:{port}", "tester", CallStreamCounts())
    receiver = Failed()
    connection.generate(b"", receiver, deadline=Deadline.after(60))
    await asyncio.wait_for(reading.wait(), 60)
    unreachable = grpc.ChannelConnectivity.TRANSIENT_FAILURE
    monkeypatch.setattr(connection._channel, "get_state", lambda try_to_connect=False: unreachable)  # noqa: ARG005
    await server.stop(0)
    assert isinstance(await asyncio.wait_for(receiver.error, 60), OutcomeUnknown)
    await connection.close()


@pytest.mark.parametrize("is_earlier", [False, True])
async def test_a_worker_is_probed_on_its_call_stream_if_it_answers_pings(
    monkeypatch: pytest.MonkeyPatch, is_earlier: bool
) -> None:
    if is_earlier:
        monkeypatch.setattr("kvrouter.net.calls.server_stream.SPARSE_PINGS", "unknown")
    server = GrpcServer()
    server.health.set("kvrouter.v1.WorkerService", True)
    checks: list[str] = []
    monkeypatch.setattr(server.gate, "for_everybody", NotedCalls(checks))
    port = await server.start("127.0.0.1:0")
    connection = WorkerConnection(f"127.0.0.1:{port}", "tester", CallStreamCounts())
    connection.open_stream()
    assert await connection.probe() is Probe.ANSWERED
    assert await connection.probe() is Probe.ANSWERED
    assert len(checks) == (2 if is_earlier else 0)
    await server.stop(0)
    assert await connection.probe() is Probe.UNREACHABLE
    await connection.close()


async def refuses_connections(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return True
    writer.close()
    return False


async def test_a_worker_that_stops_is_probed_on_the_stream_of_its_last_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    server, receiver, started = GrpcServer(), Failed(), asyncio.Event()
    server.call_streams.add_streaming("kvrouter.v1.WorkerService/Generate", lambda *_: started.set())
    port = await server.start("127.0.0.1:0")
    connection = WorkerConnection(f"127.0.0.1:{port}", "tester", CallStreamCounts())
    connection.open_stream()
    assert await connection.probe() is Probe.ANSWERED
    connection.generate(b"", receiver, deadline=Deadline.never())
    await started.wait()
    draining, stopping = asyncio.create_task(server.call_streams.drain()), asyncio.create_task(server.stop(60))
    async with asyncio.timeout(60):
        while not await refuses_connections(port):
            await asyncio.sleep(0.01)
    assert await connection.probe() is Probe.ANSWERED
    monkeypatch.setattr("kvrouter.frontend.workers.connection._PING_SECONDS", 0.01)
    monkeypatch.setattr(connection, "ping", asyncio.get_running_loop().create_future)
    assert await connection.probe() is Probe.SILENT, "as if it were frozen"
    assert not receiver.error.done()
    await connection.close()
    await asyncio.wait_for(asyncio.gather(draining, stopping), 60)


class NotedCalls(EvictableCalls):
    """Notes the calls which everybody may make, as those of grpc.health."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__(256)
        self._calls = calls

    @contextmanager
    def running(self, timeout: asyncio.Timeout) -> Iterator[None]:
        self._calls.append("call")
        with super().running(timeout):
            yield
