"""The gRPC server on the event loop, with gRPC's own client and with peers that break rules."""

from __future__ import annotations

import asyncio
import errno
import gzip
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc.aio
import pytest
from kvrouter.net.http2 import received_call, received_calls
from kvrouter.net.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    PREFACE,
    Kind,
    Setting,
    frame,
    settings,
    window_update,
)
from kvrouter.net.http2.side import Flood, Http2Violation
from kvrouter.net.rpc.call_gate import CallGate
from kvrouter.net.rpc.loop_server import LoopServer

from ...hostile_peer import HostilePeer, hostile_peer, message_head, request_headers
from ...waiting import until

ECHO = "/test.Service/Echo"
Context = grpc.aio.ServicerContext[bytes, bytes]


class Echo:
    """Answers each message with itself."""

    def __init__(self) -> None:
        self.running = 0
        self.cancelled = 0

    async def __call__(self, _incoming: object, context: Any) -> None:
        self.running += 1
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                if message == b"fail":
                    context.set_trailing_metadata((("reason", "a"), ("more-bin", b"\x00\xff")))
                    await context.abort(grpc.StatusCode.ABORTED, "as you wish: 100% ü", (("reason", "a"),))
                if message == b"break":
                    raise RuntimeError("broken")
                await context.write(message)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


class Serving:
    """A running server."""

    def __init__(self, server: LoopServer, gate: CallGate, echo: Echo, address: str) -> None:
        self.server = server
        self.gate = gate
        self.echo = echo
        self.address = address

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)])


@asynccontextmanager
async def serving() -> AsyncIterator[Serving]:
    gate, echo = CallGate(), Echo()
    server = LoopServer(gate)
    handlers = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_registered_method_handlers("test.Service", handlers)
    port = await server.start("127.0.0.1:0")
    try:
        yield Serving(server, gate, echo, f"127.0.0.1:{port}")
    finally:
        await server.stop(0.0)


def call(channel: grpc.aio.Channel, path: str = ECHO) -> Any:
    return channel.stream_stream(path)()


async def test_messages_of_every_size_are_answered() -> None:
    async with serving() as running, running.channel() as channel:
        echo = call(channel)
        for size in (0, 1, 5, 16_000, 20_000, 70_000, 400_000, 3_000_000):
            message = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
            await echo.write(message)
            assert await echo.read() == message
        await echo.done_writing()
        assert await echo.read() is grpc.aio.EOF
        assert await echo.code() is grpc.StatusCode.OK
        assert running.server.received.bytes == 0


async def test_many_calls_share_a_connection() -> None:
    async def one(channel: grpc.aio.Channel, number: int) -> None:
        echo = call(channel)
        for _ in range(20):
            await echo.write(b"%d" % number * number)
            assert await echo.read() == b"%d" % number * number
        await echo.done_writing()
        assert await echo.code() is grpc.StatusCode.OK

    async with serving() as running, running.channel() as channel:
        await asyncio.gather(*(one(channel, number) for number in range(1, 100)))
        assert running.echo.running == 0


async def test_a_status_reaches_the_client_with_its_details() -> None:
    async with serving() as running, running.channel() as channel:
        echo = call(channel)
        await echo.write(b"first")
        assert await echo.read() == b"first"
        await echo.write(b"fail")
        assert (await echo.code(), await echo.details()) == (grpc.StatusCode.ABORTED, "as you wish: 100% ü")
        assert ("reason", "a") in tuple(await echo.trailing_metadata())
        echo = call(channel)
        await echo.write(b"break")
        assert await echo.code() is grpc.StatusCode.UNKNOWN
        assert await call(channel, "/test.Service/Other").code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_call_that_its_client_leaves_is_cancelled() -> None:
    async with serving() as running, running.channel() as channel:
        echo = call(channel)
        await echo.write(b"first")
        await echo.read()
        echo.cancel()
        await until(lambda: running.echo.cancelled == 1)


async def test_messages_that_cannot_be_taken_end_their_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received_call, "MAX_RECEIVED_BYTES", 1 << 20)
    async with serving() as running, running.channel() as channel:
        good = call(channel)
        await good.write(b"first")
        assert await good.read() == b"first"
        async with hostile_peer(running.address) as peer:
            stream = peer.open(ECHO)
            peer.data(stream, message_head(1000)[:3])
            peer.data(stream, message_head(1000)[3:] + bytes(1000) + b"\1")
            peer.data(stream, bytes(4))
            await until(lambda: stream in peer.ended)
        large = call(channel)
        with suppress(grpc.aio.AioRpcError):
            await large.write(bytes(2 << 20))
        assert await large.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert running.server.received.bytes == 0
        await good.write(b"second")
        assert await good.read() == b"second"


async def test_a_call_waits_for_a_client_that_does_not_read() -> None:
    async with serving() as running, hostile_peer(running.address, reads=False) as peer:
        stream = peer.open(ECHO)
        for _ in range(15):
            peer.data(stream, message_head(16_000) + bytes(16_000))
            await asyncio.sleep(0)
        await until(lambda: running.server.received.bytes > 100_000)
        assert running.server.received.bytes < 1 << 20
        peer.writer.transport.abort()
        await until(lambda: running.server.received.bytes == 0 and running.echo.running == 0)


def rapid_resets(peer: HostilePeer) -> None:
    stream = peer.open(ECHO)
    peer.send(frame(Kind.RST_STREAM, struct.pack(">I", 8), stream=stream))


def parts(peer: HostilePeer) -> None:
    if not peer.sent or peer.sent < 200:
        peer.open(ECHO)
        peer.data(1, message_head(1 << 20))
    peer.data(1, b"x")


def continuations(peer: HostilePeer) -> None:
    if peer.sent < 100:
        peer.send(frame(Kind.HEADERS, request_headers(ECHO), stream=1))
    peer.send(frame(Kind.CONTINUATION, bytes(4000), stream=1))


@pytest.mark.parametrize(
    "attack",
    [
        rapid_resets,
        parts,
        continuations,
        lambda peer: peer.send(frame(Kind.PING, b"12345678")),
        lambda peer: peer.send(settings({Setting.INITIAL_WINDOW_SIZE: 70_000})),
        lambda peer: peer.send(frame(Kind.WINDOW_UPDATE, b"\0\0\0\x01")),
        lambda peer: peer.send(b"GET / HTTP/1.1\r\n\r\n"),
        lambda peer: peer.send(frame(Kind.HEADERS, request_headers(ECHO), stream=2)),
        lambda peer: peer.send(frame(Kind.DATA, b"x", stream=9)),
        lambda peer: peer.data(peer.open(ECHO, ends=True), b"after the end"),
    ],
)
async def test_a_peer_that_breaks_rules_loses_its_connection(attack: Callable[[HostilePeer], None]) -> None:
    async with serving() as running, running.channel() as channel:
        async with hostile_peer(running.address) as peer:
            with suppress(ConnectionError):
                while not peer.reader.at_eof():
                    attack(peer)
                    await peer.writer.drain()
                    await asyncio.sleep(0)
        await until(lambda: running.echo.running == 0)
        echo = call(channel)
        await echo.write(b"others are served")
        assert await echo.read() == b"others are served"


async def test_a_stopping_server_lets_its_calls_end() -> None:
    async with serving() as running, running.channel() as channel:
        echo = call(channel)
        await echo.write(b"first")
        await echo.read()
        stopping = asyncio.create_task(running.server.stop(20.0))
        await asyncio.sleep(0)
        await echo.write(b"last")
        assert await echo.read() == b"last"
        await echo.done_writing()
        assert await echo.code() is grpc.StatusCode.OK
        await stopping


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_messages_are_read(compression: grpc.Compression) -> None:
    async with serving() as running, running.channel() as channel:
        echo = channel.stream_stream(ECHO)(compression=compression)
        for message in (bytes(10_000), b"short", bytes(3_000_000)):
            await echo.write(message)
            assert await echo.read() == message
        await echo.done_writing()
        assert await echo.code() is grpc.StatusCode.OK


async def test_a_compressed_message_that_is_too_long_or_none_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received_call, "MAX_MESSAGE_BYTES", 1 << 20)
    async with serving() as running, running.channel() as channel:
        long = channel.stream_stream(ECHO)(compression=grpc.Compression.Gzip)
        await long.write(bytes(2 << 20))
        assert await long.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with hostile_peer(running.address) as peer:
            for body in (b"no gzip", gzip.compress(b"cut off")[:-9]):
                stream = peer.open(ECHO, (("grpc-encoding", "gzip"),))
                peer.data(stream, b"\1" + len(body).to_bytes(4, "big") + body)
                await until(lambda stream=stream: stream in peer.ended)
        await until(lambda: running.echo.cancelled == 3)
        assert running.server.received.bytes == 0


async def test_a_call_ends_when_its_time_is_over() -> None:
    async with serving() as running, running.channel() as channel:
        echo = channel.stream_stream(ECHO)(timeout=0.2)
        await echo.write(b"first")
        await echo.read()
        assert await echo.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: running.echo.cancelled == 1)


async def test_handlers_see_metadata_and_time() -> None:
    seen: list[Any] = []

    async def see(context: Any) -> None:
        seen.append((dict(context.invocation_metadata()), context.time_remaining(), context.connection.names))

    async with serving() as running, running.channel() as channel:
        running.server.add_registered_method_handlers(
            "test.Seen", {"See": grpc.stream_stream_rpc_method_handler(lambda _, context: see(context))}
        )
        metadata = (("one", "1"), ("many", "a"), ("many", "b"), ("raw-bin", b"\x00\xff"))
        assert await channel.stream_stream("/test.Seen/See")(metadata=metadata, timeout=60).code() is grpc.StatusCode.OK
        assert await channel.stream_stream("/test.Seen/See")().code() is grpc.StatusCode.OK
    (metadata_seen, remaining, names), (_, without, _) = seen
    assert metadata_seen["one"] == "1"
    assert metadata_seen["many"] == "a, b"
    assert metadata_seen["raw-bin"] == b"\x00\xff"
    assert not any(name.startswith(":") for name in metadata_seen)
    assert 50 < remaining < 70
    assert without is None
    assert names == ()


async def test_one_port_serves_both_families() -> None:
    server = LoopServer(CallGate())
    server.add_registered_method_handlers("test.Service", {"Echo": grpc.stream_stream_rpc_method_handler(Echo())})
    port = await server.start("0.0.0.0:0")
    try:
        for host in ("127.0.0.1", "[::1]") if socket.has_dualstack_ipv6() else ("127.0.0.1",):
            async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
                echo = call(channel)
                await echo.write(b"first")
                assert await echo.read() == b"first"
        peers = {connection.calls.peer.partition(":")[0] for connection in server.connections}
        assert peers <= {"ipv4", "ipv6"}
        assert "ipv4" in peers
    finally:
        await server.stop(0.0)


async def test_answers_to_streamed_messages_are_no_flood() -> None:
    begun: list[received_call.ReceivedCall] = []
    calls = received_calls.ReceivedCalls(received_call.Received(), begun.append)
    opening = frame(Kind.HEADERS, request_headers(ECHO, ()), flags=END_HEADERS | END_STREAM, stream=1)
    calls.receive(PREFACE + settings({}) + opening)
    answers = window_update(1, 10) + window_update(0, 10) + frame(Kind.PING, bytes(8))
    for _ in range(2_000):
        await begun[0].write(b"token")
        calls.take()
        calls.receive(answers)
    with pytest.raises(Flood):
        calls.receive(answers * 2_000)


async def test_only_answers_count_as_answers_that_the_client_does_not_read() -> None:
    begun: list[received_call.ReceivedCall] = []
    calls = received_calls.ReceivedCalls(received_call.Received(), begun.append)
    opening = frame(Kind.HEADERS, request_headers(ECHO, ()), flags=END_HEADERS | END_STREAM, stream=1)
    calls.receive(PREFACE + settings({Setting.INITIAL_WINDOW_SIZE: 1 << 20}) + opening + window_update(0, 1 << 20))
    calls.take()
    for _ in range(5_000):
        await begun[0].write(b"token")

    def ping() -> None:
        calls.flood.earn(4)  # It does not flood.
        calls.receive(frame(Kind.PING, bytes(8)))

    for _ in range(3_000):
        ping()
    with pytest.raises(Http2Violation, match="does not read their answers"):  # noqa: PT012 - one of them raises
        while True:
            ping()


async def never(_incoming: object, _context: Context) -> None:
    await asyncio.Event().wait()


def serve(running: Serving, service: str, handler: Any) -> None:
    handlers = {"Call": grpc.stream_stream_rpc_method_handler(handler)}
    running.server.add_registered_method_handlers(service, handlers)


async def test_a_client_sends_no_more_than_the_window_of_a_call() -> None:
    async with serving() as running, hostile_peer(running.address) as peer:
        serve(running, "test.Never", never)
        stream = peer.open("/test.Never/Call")
        for _ in range(15):
            peer.data(stream, message_head(16_000) + bytes(16_000))
        await until(lambda: running.server.received.bytes > 15 * 16_000)
        for _ in range(3):
            peer.data(stream, message_head(16_000) + bytes(16_000))
        await until(lambda: not running.server.connections)
        assert running.server.received.bytes == 0


async def test_empty_messages_count_too() -> None:
    async with serving() as running, hostile_peer(running.address) as peer:
        serve(running, "test.Never", never)
        peer.data(peer.open("/test.Never/Call"), message_head(0) * 1000)
        await until(lambda: running.server.received.bytes >= 64_000)


async def test_calls_for_everybody_have_short_messages() -> None:
    async with serving() as running, running.channel() as channel:
        serve(running, "grpc.health.Test", running.echo)
        short, long = (channel.stream_stream("/grpc.health.Test/Call")() for _ in range(2))
        await short.write(bytes(60_000))
        assert await short.read() == bytes(60_000)
        await long.write(bytes(100_000))
        assert await long.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_call_may_end_within_a_block_of_headers() -> None:
    begun: list[received_call.ReceivedCall] = []
    calls = received_calls.ReceivedCalls(received_call.Received(), begun.append)
    calls.receive(PREFACE + frame(Kind.HEADERS, request_headers(ECHO), flags=END_HEADERS, stream=1))
    calls.receive(frame(Kind.HEADERS, request_headers(ECHO), stream=1))
    begun[0].finish()
    calls.receive(frame(Kind.CONTINUATION, b"", flags=END_HEADERS, stream=1))
    calls.receive(frame(Kind.HEADERS, request_headers(ECHO), flags=END_HEADERS, stream=3))
    assert [call.number for call in begun] == [1, 3]


async def test_calls_left_before_they_are_checked_count_as_refused() -> None:
    async with serving() as running, hostile_peer(running.address) as peer:
        conduct = running.gate.conduct
        counted: list[received_call.ReceivedCall] = []
        conduct.without_credential = lambda call: bool(counted.append(call))  # type: ignore[method-assign]
        stream = peer.open(ECHO)
        peer.data(stream, message_head(0))
        peer.send(frame(Kind.RST_STREAM, struct.pack(">I", 8), stream=stream))
        await until(lambda: len(counted) == 1)


async def test_data_that_a_wider_initial_window_permits_follows_its_acknowledgement() -> None:
    begun: list[received_call.ReceivedCall] = []
    calls = received_calls.ReceivedCalls(received_call.Received(), begun.append)
    opening = frame(Kind.HEADERS, request_headers(ECHO), flags=END_HEADERS | END_STREAM, stream=1)
    calls.receive(PREFACE + settings({Setting.INITIAL_WINDOW_SIZE: 0}) + opening)
    answer = asyncio.create_task(begun[0].write(b"token"))
    await asyncio.sleep(0)
    assert b"token" not in calls.take()
    calls.receive(settings({Setting.INITIAL_WINDOW_SIZE: 100}))
    assert calls.take().startswith(frame(Kind.SETTINGS, flags=ACK))
    await answer


async def test_a_short_answer_does_not_wait_for_all_of_a_long_one() -> None:
    begun: list[received_call.ReceivedCall] = []
    calls = received_calls.ReceivedCalls(received_call.Received(), begun.append)
    calls.receive(PREFACE + settings({Setting.INITIAL_WINDOW_SIZE: 1 << 30}) + window_update(0, 1 << 30))
    for stream in (1, 3):
        calls.receive(frame(Kind.HEADERS, request_headers(ECHO), flags=END_HEADERS | END_STREAM, stream=stream))
    answers = [
        asyncio.create_task(call.write(message))
        for call, message in zip(begun, (bytes(8 << 20), b"short"), strict=True)
    ]
    await asyncio.sleep(0)
    before, sent = 0, b""
    while b"short" not in sent:
        before += len(sent)
        sent = calls.take()
    assert before < 1 << 20
    while calls.take():
        pass
    await asyncio.gather(*answers)


@pytest.mark.parametrize("in_use", [0, 1], ids=["free", "in use in one family"])
async def test_all_addresses_of_a_host_are_served(monkeypatch: pytest.MonkeyPatch, in_use: int) -> None:
    families = [socket.AF_INET, *([socket.AF_INET6] if socket.has_dualstack_ipv6() else [])]
    hosts = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}

    async def found(*_: object, **__: object) -> list[Any]:
        return [(family, socket.SOCK_STREAM, 6, "", (hosts[family], 0)) for family in reversed(families)]

    create, tried = socket.create_server, list[int]()

    def listen(address: tuple[str, int], **options: Any) -> socket.socket:
        if address[1] and len(tried) < in_use:
            tried.append(address[1])
            raise OSError(errno.EADDRINUSE, "in use")
        return create(address, **options)

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
    monkeypatch.setattr(socket, "create_server", listen)
    server = LoopServer(CallGate())
    port = await server.start("both.test:0")
    monkeypatch.undo()
    assert port not in tried
    try:
        for family in families:
            _, writer = await asyncio.open_connection(hosts[family], port)
            writer.close()
    finally:
        await server.stop(0.0)


async def test_what_a_call_held_is_no_longer_counted_once_it_has_failed() -> None:
    begun: list[received_call.ReceivedCall] = []
    received, delivered = received_call.Received(), list[bytes]()
    calls = received_calls.ReceivedCalls(received, begun.append)
    headers = request_headers(ECHO, (("grpc-encoding", "gzip"),))
    calls.receive(PREFACE + frame(Kind.HEADERS, headers, flags=END_HEADERS, stream=1))
    begun[0].start(delivered.append, lambda: None, lambda: None)
    packed = gzip.compress(b"packed")
    good, bad = (b"\1" + len(body).to_bytes(4, "big") + body for body in (packed, b"no gzip"))
    calls.receive(frame(Kind.DATA, good + bad[:3], stream=1))
    assert (delivered, received.bytes) == ([b"packed"], 3)
    calls.receive(frame(Kind.DATA, bad[3:] + good + b"rest", stream=1))
    assert begun[0].is_over
    assert (delivered, received.bytes) == ([b"packed"], 0)
