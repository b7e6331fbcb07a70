"""The client behaves as grpc.aio's own client does when a server does the same to both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
from kvrouter.net.http2 import ConnectionLost, GrpcConnection, Http2Violation, connection, endpoint
from kvrouter.net.http2.frames import (
    END_HEADERS,
    END_STREAM,
    HEADER_BYTES,
    PREFACE,
    Kind,
    Setting,
    frame,
    read_frame_header,
    settings,
    window_update,
)

from .http2_server import data, ended, headers, prefixed

PATH = "/test.Service/Echo"
BROKEN = "broken"
"""The server broke a rule. gRPC has several codes for that."""


@dataclass
class Result:
    """What came of a call with one message."""

    received: list[bytes]
    code: str


async def call_with_kvrouter(target: str) -> Result:
    received: list[bytes] = []
    opened_to: GrpcConnection | None = None
    try:
        opened_to = await GrpcConnection.open(target, PATH, max_message_bytes=1 << 20)
        received.append(await opened_to.exchange(b"hello"))
        opened_to.start(received.extend, lambda: None)
        await opened_to.wait_ended()
    except ConnectionLost as lost:
        return Result(received, str(lost).partition(":")[0])
    except Http2Violation:
        return Result(received, BROKEN)
    finally:
        if opened_to is not None:
            opened_to.close()
    raise AssertionError


async def call_with_grpc(target: str, **options: Any) -> Result:
    received: list[bytes] = []
    async with grpc.aio.insecure_channel(target, options=tuple(options.items())) as channel:
        rpc: Any = channel.stream_stream(PATH)()
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await rpc.write(b"hello")
            while (message := await rpc.read()) is not grpc.aio.EOF:
                received.append(message)
        return Result(received, (await rpc.code()).name)


CLIENTS: dict[str, Callable[[str], Awaitable[Result]]] = {"kvrouter": call_with_kvrouter, "grpc": call_with_grpc}
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]


@asynccontextmanager
async def serving(serve: Serve, address: str = "127.0.0.1", port: int = 0) -> AsyncIterator[int]:
    """A server; ``serve`` gets the number of each connection. It is called once the client has sent its message."""
    connections = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        number = connections
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readexactly(len(PREFACE))
            writer.write(settings({}))
            kind = -1
            while kind != Kind.DATA:
                length, kind, _, _ = read_frame_header(await reader.readexactly(HEADER_BYTES), 0)
                await reader.readexactly(length)
            await serve(reader, writer, number)
        writer.close()

    server = await asyncio.start_server(accept, address, port)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def until_closed(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


def saying(sent: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _number: int) -> None:
        writer.write(sent)
        await until_closed(reader)

    return serve


ANSWER = data(prefixed(b"hi"))
RESPONSE = headers((":status", "200"), ("content-type", "application/grpc"))
SAID = {
    "a whole call": RESPONSE + ANSWER + ended("0"),
    "a status": RESPONSE + ANSWER + ended("7", "not you"),
    "a status alone": headers(
        (":status", "200"), ("content-type", "application/grpc"), ("grpc-status", "8"), flags=END_HEADERS | END_STREAM
    ),
    "an unknown status": RESPONSE + ended("99"),
    "no status": RESPONSE + headers(("x", "y"), flags=END_HEADERS | END_STREAM),
    "HTTP 503": headers((":status", "503"), flags=END_HEADERS | END_STREAM),
    "HTTP 404": headers((":status", "404"), flags=END_HEADERS | END_STREAM),
    "HTTP 401": headers((":status", "401"), flags=END_HEADERS | END_STREAM),
    "HTTP 418": headers((":status", "418"), flags=END_HEADERS | END_STREAM),
    "a reset: cancelled": RESPONSE + frame(Kind.RST_STREAM, (8).to_bytes(4, "big"), stream=1),
    "a reset: too much": RESPONSE + frame(Kind.RST_STREAM, (11).to_bytes(4, "big"), stream=1),
    "a reset: internal": RESPONSE + frame(Kind.RST_STREAM, (2).to_bytes(4, "big"), stream=1),
    "a message that is cut in frames": RESPONSE
    + b"".join(data(each) for each in (ANSWER[9:12], ANSWER[12:15], b"", ANSWER[15:]))
    + ended("0"),
    "unknown frames and priorities": RESPONSE
    + frame(Kind.PRIORITY, bytes(5), stream=1)
    + bytes([0, 0, 1, 0x77, 0, 0, 0, 0, 1, 9])
    + ANSWER
    + ended("0"),
    "a goodbye after the answer": RESPONSE
    + ANSWER
    + frame(Kind.GOAWAY, (1).to_bytes(4, "big") + bytes(4))
    + ended("0"),
    "a goodbye before the answer": frame(Kind.GOAWAY, ((1 << 31) - 1).to_bytes(4, "big") + bytes(4))
    + RESPONSE
    + ANSWER
    + ended("5"),
}
NO_STATUS = {
    "a status of 5,000 digits": RESPONSE + ANSWER + ended("1" * 5_000),
    "a status that is no number": RESPONSE + ANSWER + ended("no"),
    "a negative status": RESPONSE + ANSWER + ended("-1"),
}
BREAKING = {
    "a frame that is too long": RESPONSE + bytes([0, 0x40, 1, 0, 0, 0, 0, 0, 1]) + bytes(16_385),
    "a window update of nothing": RESPONSE + window_update(0, 0),
    "a ping of nine bytes": RESPONSE + frame(Kind.PING, bytes(9)),
    "settings of a stream": RESPONSE + frame(Kind.SETTINGS, stream=1),
    "a window that is too large": RESPONSE + settings({Setting.INITIAL_WINDOW_SIZE: 1 << 31}),
    "a continuation of nothing": RESPONSE + frame(Kind.CONTINUATION, b"", stream=1),
    "headers that cannot be decoded": RESPONSE + frame(Kind.HEADERS, b"\xff" * 40, flags=END_HEADERS, stream=1),
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20,
}


async def test_a_compressed_message_without_an_encoding_is_refused() -> None:
    """gRPC passes it on as it is."""
    sent = RESPONSE + data(prefixed(b"x", compressed=1)) + ended("0")
    async with asyncio.timeout(60), serving(saying(sent)) as port:
        assert (await call_with_kvrouter(f"127.0.0.1:{port}")).code == BROKEN


@pytest.mark.parametrize("sent", SAID.values(), ids=SAID)
async def test_both_understand_the_same(sent: bytes) -> None:
    async with asyncio.timeout(60), serving(saying(sent)) as port:
        assert await call_with_kvrouter(f"127.0.0.1:{port}") == await call_with_grpc(f"127.0.0.1:{port}")


@pytest.mark.parametrize("sent", NO_STATUS.values(), ids=NO_STATUS)
async def test_both_fail_a_call_without_a_proper_status(sent: bytes) -> None:
    async with asyncio.timeout(60), serving(saying(sent)) as port:
        assert await call_with_kvrouter(f"127.0.0.1:{port}") == Result([b"hi"], "UNKNOWN")
        assert (await call_with_grpc(f"127.0.0.1:{port}")).code != "OK"


@pytest.mark.parametrize("sent", BREAKING.values(), ids=BREAKING)
async def test_both_refuse_the_same(sent: bytes) -> None:
    async with asyncio.timeout(60), serving(saying(sent)) as port:
        assert (await call_with_kvrouter(f"127.0.0.1:{port}")).code == BROKEN
        assert (await call_with_grpc(f"127.0.0.1:{port}")).code != "OK"


@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
async def test_slow_headers_are_waited_for(client: Callable[[str], Awaitable[Result]]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _number: int) -> None:
        sent = RESPONSE + ANSWER + ended("0", "slowly")
        for position in range(len(sent)):
            writer.write(sent[position : position + 1])
            await asyncio.sleep(0.001)
        await until_closed(reader)

    async with asyncio.timeout(60), serving(serve) as port:
        assert await client(f"127.0.0.1:{port}") == Result([b"hi"], "OK")


async def test_both_give_a_server_up_that_answers_no_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_CHECK_SECONDS", 0.05)
    keepalive = {
        "grpc.keepalive_time_ms": 500,
        "grpc.keepalive_timeout_ms": 200,
        "grpc.http2.ping_timeout_ms": 700,
        "grpc.http2.max_pings_without_data": 0,
    }
    async with asyncio.timeout(60), serving(saying(RESPONSE + ANSWER)) as port:
        expected = Result([b"hi"], "UNAVAILABLE")
        assert await call_with_kvrouter(f"127.0.0.1:{port}") == expected
        assert await call_with_grpc(f"127.0.0.1:{port}", **keepalive) == expected


@pytest.mark.parametrize("first", ["refuses", "is silent"])
async def test_both_use_the_second_address(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolved(_host: str, _port: int) -> list[str]:
        return ["127.0.0.2", "127.0.0.1"]

    monkeypatch.setattr(connection, "addresses_of", resolved)
    async with asyncio.timeout(60), serving(saying(SAID["a whole call"])) as port:
        silent = await asyncio.start_server(lambda *_: None, "127.0.0.2", port) if first == "is silent" else None
        expected = Result([b"hi"], "OK")
        assert await call_with_kvrouter(f"worker:{port}") == expected
        assert await call_with_grpc(f"ipv4:127.0.0.2:{port},127.0.0.1:{port}") == expected
        if silent is not None:
            silent.close()


async def test_both_know_a_call_that_was_never_processed() -> None:
    """gRPC repeats it by itself; here the caller does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(frame(Kind.GOAWAY, bytes(8)) if number == 1 else SAID["a whole call"])
        await until_closed(reader)

    async with asyncio.timeout(60), serving(serve) as port:
        assert await call_with_grpc(f"127.0.0.1:{port}") == Result([b"hi"], "OK")
    async with asyncio.timeout(60), serving(serve) as port:
        opened_to = await GrpcConnection.open(f"127.0.0.1:{port}", PATH, max_message_bytes=100)
        with pytest.raises(ConnectionLost) as lost:
            await opened_to.exchange(b"hello")
        assert lost.value.never_processed
        opened_to.close()
        assert await call_with_kvrouter(f"127.0.0.1:{port}") == Result([b"hi"], "OK")


async def test_both_keep_a_call_over_a_maximum_connection_age() -> None:
    async def echo(_requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.write(await context.read())
        await asyncio.sleep(1.0)
        await context.write(b"later")

    options = (("grpc.max_connection_age_ms", 200), ("grpc.max_connection_age_grace_ms", 60_000))
    server = grpc.aio.server(options=options)
    handlers: dict[str, Any] = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(60):
        results = await asyncio.gather(*(client(f"127.0.0.1:{port}") for client in CLIENTS.values()))
    assert results == [Result([b"hello", b"later"], "OK")] * 2
    await server.stop(0)
