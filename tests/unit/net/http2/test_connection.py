"""One gRPC call on a connection of its own, over loopback, on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import cycle
from typing import Any
from unittest.mock import Mock

import grpc.aio
import pytest
import uvloop
from kvrouter.net.budgets import PASS_US
from kvrouter.net.http2 import ConnectionLost, GrpcConnection, Http2Violation, connection, endpoint
from kvrouter.net.http2.frames import Kind, frame

from .http2_server import data, ended, opened, prefixed

Run = Callable[[Coroutine[Any, Any, None]], None]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    chosen: Run = asyncio.run if request.param == "asyncio" else uvloop.run
    return chosen


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[str]:
    """A TCP server; yields its address. Its connections close when ``serve`` returns."""

    async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve_and_close, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def until_closed(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


async def connect(target: str) -> GrpcConnection:
    return await GrpcConnection.open(target, "/test.Service/Echo", max_message_bytes=1 << 20)


async def exchange_once(target: str) -> None:
    opened_to = await connect(target)
    try:
        await opened_to.exchange(b"hello")
    finally:
        opened_to.close()


@asynccontextmanager
async def echoing() -> AsyncIterator[str]:
    """A gRPC server that returns each message, and ends the call at an empty one."""

    async def echo(_requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        while message := await context.read():
            await context.write(message)
        await context.abort(grpc.StatusCode.ABORTED, "as you wish")

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def test_messages_of_any_size_travel_both_ways(run: Run) -> None:
    async def main() -> None:
        async with echoing() as target:
            opened_to = await connect(target)
            assert await opened_to.exchange(b"hello") == b"hello"
            sent = [bytes([size % 251]) * size for size in (1, 100_000, 16_384, 900_000, 7)]
            received: list[bytes] = []
            waiting = [*sent]
            opened_to.start(received.extend, lambda: waiting.pop(0) if waiting else None)
            async with asyncio.timeout(60):
                while len(received) < len(sent):
                    await asyncio.sleep(0.01)
                assert received == sent
                waiting.append(b"")
                opened_to.wake()
                with pytest.raises(ConnectionLost, match="ABORTED: as you wish"):
                    await opened_to.wait_ended()
            opened_to.close()

    run(main())


def test_nobody_listens(run: Run) -> None:
    async def main() -> None:
        with pytest.raises(ConnectionLost, match="cannot connect"):
            await connect("127.0.0.1:1")
        with pytest.raises(ConnectionLost, match="host:port"):
            await connect("127.0.0.1")

    run(main())


def test_messages_that_arrive_with_the_first_one_wait_for_their_receiver(run: Run) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(opened() + data(prefixed(b"first") + prefixed(b"second")) + data(prefixed(b"third")))
        await until_closed(reader)

    async def main() -> None:
        async with serving(serve) as target:
            opened_to = await connect(target)
            assert await opened_to.exchange(b"hello") == b"first"
            received: list[bytes] = []
            opened_to.start(received.extend, lambda: None)
            assert received == [b"second", b"third"]
            opened_to.close()

    run(main())


def test_messages_that_arrive_before_their_receiver_are_bounded(run: Run) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(opened() + data(prefixed(b"first") + prefixed(b"") * 1_000))
        await until_closed(reader)

    async def main() -> None:
        async with serving(serve) as target:
            with pytest.raises(Http2Violation, match="at most 16 messages"):
                await connect(target)

    run(main())


PEERS: dict[str, tuple[bytes, type[Exception], str]] = {
    "closes the connection": (b"", ConnectionLost, "UNAVAILABLE"),
    "closes it within a message": (opened() + data(prefixed(b"first")[:-1]), ConnectionLost, "UNAVAILABLE"),
    "speaks HTTP/1.1": (b"HTTP/1.1 400 Bad Request\r\n\r\n", Http2Violation, "frames of at most"),
    "refuses the call": (opened() + ended("7", "not you"), ConnectionLost, "PERMISSION_DENIED: not you"),
}


@pytest.mark.parametrize(("sent", "error", "match"), PEERS.values(), ids=PEERS)
def test_a_server_ends_the_call_before_its_first_message(
    run: Run, sent: bytes, error: type[Exception], match: str
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        writer.write_eof()
        # Closing a connection with unread bytes would reset it, and lose what was sent.
        await until_closed(reader)

    async def main() -> None:
        async with serving(serve) as target:
            with pytest.raises(error, match=match):
                await exchange_once(target)

    run(main())


@pytest.mark.parametrize("side", ["receiver", "sender"])
def test_an_error_of_the_user_ends_the_call(run: Run, side: str) -> None:
    waiting = [b"x"]

    def fail(*_message: bytes) -> bytes:
        raise ZeroDivisionError

    def next_message() -> bytes | None:
        return waiting.pop() if waiting else None

    def ignore(_messages: Sequence[bytes]) -> None:
        pass

    async def main() -> None:
        async with echoing() as target:
            opened_to = await connect(target)
            await opened_to.exchange(b"hello")
            if side == "receiver":
                opened_to.start(fail, next_message)  # type: ignore[arg-type]
            else:
                opened_to.start(ignore, fail)
            with pytest.raises(ZeroDivisionError):
                await opened_to.wait_ended()
            opened_to.close()

    run(main())


def test_a_server_that_answers_no_ping_is_given_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_CHECK_SECONDS", 0.01)
    pinged = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(opened() + data(prefixed(b"first")))
        while chunk := await reader.read(1 << 16):
            if frame(Kind.PING, bytes(8)) in chunk:
                pinged.set()

    async def main() -> None:
        async with serving(serve) as target:
            opened_to = await connect(target)
            await opened_to.exchange(b"hello")
            async with asyncio.timeout(60):
                await pinged.wait()
                with pytest.raises(ConnectionLost, match="pings"):
                    await opened_to.wait_ended()
            opened_to.close()

    run(main())


def test_a_server_that_reads_nothing_holds_back_messages_and_does_not_delay_the_end(run: Run) -> None:
    async def main() -> None:
        release = asyncio.Event()

        async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            window = frame(Kind.WINDOW_UPDATE, (1 << 30).to_bytes(4, "big"))
            window += frame(Kind.WINDOW_UPDATE, (1 << 30).to_bytes(4, "big"), stream=1)
            writer.write(opened() + window + data(prefixed(b"first")))
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await release.wait()

        taken = 0

        def next_message() -> bytes:
            nonlocal taken
            taken += 1
            return bytes(100_000)

        async with serving(serve) as target:
            opened_to = await connect(target)
            await opened_to.exchange(b"hello")
            opened_to.start(lambda _: None, next_message)
            before = -1
            while taken != before:
                before = taken
                await asyncio.sleep(0.05)
            assert 0 < taken < 1_000
            opened_to.close()
            with pytest.raises(ConnectionLost):
                await opened_to.wait_ended()
            release.set()

    run(main())


async def test_a_connect_that_is_cancelled_once_connected_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport may be handed over after whoever connected has given up."""
    closed = asyncio.Event()
    made: list[GrpcConnection] = []
    reports: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, report: reports.append(report))

    async def serve(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await until_closed(reader)
        closed.set()

    def connection_made(self: GrpcConnection, transport: asyncio.BaseTransport) -> None:
        made.append(self)
        original(self, transport)
        opening.cancel()

    original = GrpcConnection.connection_made
    monkeypatch.setattr(GrpcConnection, "connection_made", connection_made)
    async with serving(serve) as target:
        opening = asyncio.create_task(connect(target))
        await asyncio.wait([opening])
        assert opening.cancelled()
        (connection,) = made
        assert connection._check is None or connection._check.cancelled()
        connection.call.ping()
        async with asyncio.timeout(60):
            await closed.wait()
    assert not reports


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_nothing_is_written_to_a_transport_that_is_closed(loop: str) -> None:
    reports: list[dict[str, Any]] = []

    def report_of_connections(_: asyncio.AbstractEventLoop, report: dict[str, Any]) -> None:
        # gRPC's poller, which all loops of a process share, wakes up the closed loops of earlier tests too.
        if "PollerCompletionQueue" not in report["message"]:
            reports.append(report)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(report_of_connections)
        async with echoing() as target:
            opened_to = await connect(target)
            await opened_to.exchange(b"hello")
            assert opened_to._transport is not None
            opened_to._transport.abort()
            opened_to.wake()
            opened_to._check_heard()
            with pytest.raises(ConnectionLost):
                await opened_to.wait_ended()
            opened_to.close()
        assert opened_to._check is not None
        assert opened_to._check.cancelled()

    (asyncio.run if loop == "asyncio" else uvloop.run)(main())
    assert not reports


def test_a_peer_whose_input_waits_for_its_turn_is_not_silent(run: Run) -> None:
    async def main() -> None:
        async with echoing() as target:
            opened_to = await connect(target)
            opened_to._unread.append(b"")
            for _ in range(10):
                opened_to._check_heard()
            opened_to._unread.clear()
            assert await opened_to.exchange(b"hello") == b"hello"
            for _ in range(10):
                opened_to._check_heard()
            with pytest.raises(ConnectionLost, match="does not answer pings"):
                await opened_to.wait_ended()

    run(main())


@asynccontextmanager
async def silent_listener(address: str, port: int) -> AsyncIterator[None]:
    """Accepts connections and sends nothing, as a process does that is frozen."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await until_closed(reader)
        writer.close()

    async with await asyncio.start_server(serve, address, port):
        yield


@pytest.mark.parametrize("first", ["refuses", "is silent"])
def test_every_address_is_tried_within_the_time(run: Run, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with echoing() as target:
            port = int(target.rpartition(":")[2])

            async def resolved(_host: str, _port: int) -> list[str]:
                return ["127.0.0.2", "127.0.0.3", "127.0.0.1"]

            monkeypatch.setattr(connection, "addresses_of", resolved)
            async with silent_listener("127.0.0.2", port) if first == "is silent" else nothing():
                opened_to = await asyncio.wait_for(connect(f"worker:{port}"), 60)
                assert await opened_to.exchange(b"hello") == b"hello"
                opened_to.close()

    run(main())


def test_a_host_with_no_address_that_answers_names_every_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolved(_host: str, _port: int) -> list[str]:
        return ["127.0.0.2", "127.0.0.3"]

    monkeypatch.setattr(connection, "addresses_of", resolved)

    async def main() -> None:
        with pytest.raises(ConnectionLost, match=r"at 127\.0\.0\.2: .*; .* at 127\.0\.0\.3: "):
            await connect("worker:1")

    run(main())


@asynccontextmanager
async def nothing() -> AsyncIterator[None]:
    yield


async def test_what_is_read_at_once_is_processed_over_several_passes() -> None:
    call = Mock(ended=None, going_away=False, waiting=False)
    reading = GrpcConnection(call)
    transport = Mock(is_closing=Mock(return_value=False))
    reading._transport = transport
    received = bytes(1 << 20)
    reading.data_received(received)
    reading.data_received(b"last")
    reading.connection_lost(None)
    transport.pause_reading.assert_called_once()
    processed: list[int] = []
    while not reading._ended.done():
        before = sum(processed)
        processed = [len(each.args[0]) for each in call.receive.call_args_list]
        # A microsecond for 4 bytes; two counts may be up to two passes apart.
        assert sum(processed) - before <= 2 * PASS_US * 4
        await asyncio.sleep(0)
    assert b"".join(each.args[0] for each in call.receive.call_args_list) == received + b"last"


async def test_what_becomes_ready_during_a_read_is_written_at_its_end() -> None:
    call = Mock(blocked=True, ended=None, going_away=False, take=Mock(side_effect=cycle((b"a", b""))))
    writing = GrpcConnection(call)
    transport = writing._transport = Mock(is_closing=Mock(return_value=False))
    call.receive.side_effect = lambda _: writing.wake()
    writing.data_received(b"one")
    transport.write.assert_called_once_with(b"a")
    await asyncio.sleep(0)
    transport.write.assert_called_once()
    writing.wake()
    writing.data_received(b"two")
    transport.write.assert_called_once()
    await asyncio.sleep(0)
    assert transport.write.call_count == 2, "that of a flush which was scheduled before"
    writing.end(ConnectionLost("x"))
