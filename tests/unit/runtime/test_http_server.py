"""Connections that send nothing, or too little, are cut off; those with a request are not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.web_protocol import MAX_MSG_QUEUE_SIZE
from kvrouter.devtools.system.certificates import DevelopmentAuthority
from kvrouter.net.tls import Tls, TlsOptions
from kvrouter.runtime import http_connections as http_strangers, http_server
from kvrouter.runtime.http_connections import JsonRequestHandler
from kvrouter.runtime.http_server import HttpLimits, note_admitted, serving_http, share_of_descriptors
from prometheus_client import CollectorRegistry

SECONDS = 1.0
"""Time limit for headers, long enough for a client on a busy machine."""
HALF = b"GET /quick HTTP/1.1\r\nHost: x\r\nX-Slow: "
WHOLE = b"GET /quick HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass
class Served:
    """A server, and clients of it that speak HTTP by hand."""

    port: int
    registry: CollectorRegistry
    stack: AsyncExitStack
    refused: int = 0
    refusal_bytes: int = 0
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    began: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    async def connect(self, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.stack.callback(writer.close)
        writer.write(sent)
        return reader, writer

    async def answer(self, sent: bytes = WHOLE) -> bytes:
        reader, _ = await self.connect(sent)
        return await reader.readline()

    def closed(self, reason: str) -> float:
        return self.registry.get_sample_value("kvrouter_test_http_connections_closed_total", {"reason": reason}) or 0

    async def until_open(self, connections: int) -> None:
        while self.registry.get_sample_value("kvrouter_test_http_connections") != connections:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(
    connections: int = 100, header_seconds: float = SECONDS, *, middlewares: Any = (), **options: Any
) -> AsyncIterator[Served]:
    async def quick(_: web.Request) -> web.Response:
        return web.Response(text="quick")

    async def upload(request: web.Request) -> web.Response:
        return web.Response(text=str(len(await request.read())))

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first")
        served.began.release()
        await served.go_on.wait()
        await response.write(b"last")
        return response

    application = web.Application(middlewares=middlewares)
    routes = [web.get("/quick", quick), web.post("/upload", upload), web.get("/stream", stream)]
    application.add_routes(routes)
    registry = CollectorRegistry()
    limits = HttpLimits(connections, header_seconds)
    async with (
        asyncio.timeout(30),
        AsyncExitStack() as stack,
        serving_http(
            application,
            *("127.0.0.1", 0, limits, registry),
            name="test",
            **options,
            shutdown_timeout=1.0,
        ) as (_, port),
    ):
        served = Served(port, registry, stack)
        yield served
        await stack.aclose()


@pytest.mark.parametrize("sent", [b"", b"G", HALF])
async def test_a_connection_without_whole_headers_is_cut_off(sent: bytes) -> None:
    async with serving() as served:
        reader, _ = await served.connect(sent)
        assert b"408" in await reader.readline()
        await reader.read()
        await served.until_open(0)
        assert served.closed("header_timeout") == 1


async def test_headers_that_trickle_in_are_cut_off_too() -> None:
    async with serving() as served:
        reader, writer = await served.connect(HALF)

        async def trickle() -> None:
            while True:
                writer.write(b"x")
                await asyncio.sleep(SECONDS / 10)

        trickling = asyncio.create_task(trickle())
        assert b"408" in await reader.readline()
        trickling.cancel()


async def test_streams_uploads_and_idle_connections_may_take_longer() -> None:
    async with (
        serving() as served,
        aiohttp.ClientSession(f"http://127.0.0.1:{served.port}") as session,
        session.get("/stream") as streaming,
    ):

        async def slowly() -> AsyncIterator[bytes]:
            for _ in range(5):
                yield b"x" * 10
                await asyncio.sleep(SECONDS / 4)

        async with session.get("/quick") as response:
            assert await response.text() == "quick"
        async with session.post("/upload", data=slowly()) as response:
            assert await response.text() == "50"
        served.go_on.set()
        assert await streaming.read() == b"firstlast"
        assert served.closed("header_timeout") == 0
        async with session.get("/quick") as response:
            assert await response.text() == "quick"


async def test_the_next_headers_on_a_connection_must_come_in_time_too() -> None:
    async with serving() as served:
        reader, writer = await served.connect(WHOLE)
        await reader.readuntil(b"quick")
        await asyncio.sleep(1.2 * SECONDS)
        writer.write(WHOLE)
        await reader.readuntil(b"quick")
        writer.write(HALF)
        assert b"408" in await reader.readline()


async def test_a_new_connection_takes_the_place_of_the_oldest_without_a_request() -> None:
    async with serving(3, header_seconds=60) as served:
        reader, _ = await served.connect(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
        await served.began.acquire()
        half = [await served.connect(HALF) for _ in range(2)]
        await served.until_open(3)
        for _ in range(2):
            assert b"200" in await served.answer()
        assert served.closed("refused") == 0
        with suppress(ConnectionResetError):
            assert await half[0][0].read() == b""
        served.go_on.set()
        assert (await reader.readuntil(b"last")).startswith(b"HTTP/1.1 200")


async def test_a_new_connection_is_refused_while_all_others_have_requests() -> None:
    async with serving(2, header_seconds=60) as served:
        readers = [(await served.connect(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"))[0] for _ in range(2)]
        for _ in readers:
            await served.began.acquire()
        assert b"503" in await served.answer()
        assert served.closed("refused") == 1
        served.go_on.set()
        for reader in readers:
            assert (await reader.readuntil(b"last")).startswith(b"HTTP/1.1 200")


def test_a_share_of_the_descriptors_is_one_at_least() -> None:
    assert share_of_descriptors(1e-12) == 1
    assert share_of_descriptors(1 / 8) <= share_of_descriptors(1 / 2) <= 16_384


KEYED = b"GET /quick HTTP/1.1\r\nHost: x\r\nX-Key: known\r\n\r\n"


@asynccontextmanager
async def serving_strangers(connections: int = 100, header_seconds: float = 60) -> AsyncIterator[Served]:
    """A server whose requests need a key."""

    @web.middleware
    async def authenticate(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("X-Key") != "known":
            served.refused += 1
            return web.Response(status=401, body=b"refused" + bytes(served.refusal_bytes))
        note_admitted(request)
        return await handler(request)  # type: ignore[no-any-return]

    async with serving(
        connections, header_seconds, middlewares=[authenticate], recognizes=lambda head: b"X-Key: known" in head
    ) as served:
        yield served


async def test_a_flood_of_strangers_delays_nobody_with_a_credential(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_strangers, "_TURNS_PER_SECOND", 0.001)
    monkeypatch.setattr(http_strangers, "_BURST", 5)
    async with serving_strangers() as served:
        known, writer = await served.connect(KEYED)
        await known.readuntil(b"quick")
        for _ in range(20):
            await served.connect(30 * WHOLE)
        while served.refused < 4:
            await asyncio.sleep(0.01)
        for _ in range(20):
            writer.write(KEYED)
            await known.readuntil(b"quick")
            assert b"200" in await served.answer(KEYED)
        assert served.refused == 4


async def test_strangers_take_turns_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_strangers, "_BURST", 1)
    async with serving_strangers() as served:
        flooding, _ = await served.connect(1000 * WHOLE)
        assert b"401" in await served.answer()
        assert served.refused < 500
        assert b"401" in await flooding.readline()


async def test_what_waits_for_turns_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_strangers, "_TURNS_PER_SECOND", 0.001)
    monkeypatch.setattr(http_strangers, "_BURST", 1)
    monkeypatch.setattr(http_strangers, "MAX_HELD_BYTES", 100_000)
    async with serving_strangers() as served:
        small, _ = await served.connect(3 * WHOLE)
        assert b"401" in await small.readline()
        large, _ = await served.connect(b"x" * 200_000)
        with suppress(ConnectionError):
            await large.read()
        await served.until_open(1)


async def test_a_client_that_is_refused_takes_turns_with_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_strangers, "_TURNS_PER_SECOND", 0.001)
    monkeypatch.setattr(http_strangers, "_BURST", 1)
    async with serving_strangers() as served:
        client, writer = await served.connect(KEYED)
        await client.readuntil(b"quick")
        writer.write(WHOLE)
        await client.readuntil(b"refused")
        writer.write(3 * WHOLE)
        assert b"200" in await served.answer(KEYED)
        assert served.refused == 1


async def test_the_rest_of_a_refused_body_is_dropped_at_a_limited_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_DROPPED_BYTES_PER_SECOND", 1 << 20)
    fed: list[int] = []
    feed = JsonRequestHandler.data_received

    def record(handler: JsonRequestHandler, data: bytes) -> None:
        fed.append(len(data))
        feed(handler, data)

    monkeypatch.setattr(JsonRequestHandler, "data_received", record)
    async with serving(header_seconds=60) as served:
        head = b"POST /quick HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        first, _ = await served.connect(head % (1 << 30) + bytes(1 << 10))
        assert b"405" in await first.readline()
        uploads = [await served.connect(head % (1 << 30) + bytes(8 << 20)) for _ in range(4)]
        for reader, _ in uploads:
            assert b"405" in await reader.readline()
        assert sum(fed) < 12 << 20
        assert b"200" in await served.answer()


async def test_an_idle_stranger_is_closed_and_others_are_not() -> None:
    async with serving_strangers(header_seconds=SECONDS) as served:
        known, writer = await served.connect(KEYED)
        await known.readuntil(b"quick")
        stranger, _ = await served.connect(WHOLE)
        assert (await stranger.read()).endswith(b"refused")
        assert served.closed("idle") == 1
        writer.write(KEYED)
        await known.readuntil(b"quick")


async def test_a_stranger_that_reads_no_response_is_closed() -> None:
    async with serving_strangers(header_seconds=SECONDS) as served:
        served.refusal_bytes = 64 << 20
        _, writer = await served.connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(WHOLE)
        while not served.closed("unread"):
            await asyncio.sleep(0.01)
        await served.until_open(0)


async def test_strangers_are_replaced_first() -> None:
    async with serving_strangers(3) as served:
        known, writer = await served.connect(KEYED)
        await known.readuntil(b"quick")
        await asyncio.sleep(0)
        for _ in range(5):
            stranger, _ = await served.connect(WHOLE)
            await stranger.readuntil(b"refused")
        assert served.closed("replaced") == 3
        writer.write(KEYED)
        await known.readuntil(b"quick")


async def test_half_a_handshake_is_cut_off(tmp_path: Path) -> None:
    paths = DevelopmentAuthority(tmp_path).issue("server")
    tls = Tls(TlsOptions(str(paths.cert), str(paths.key), str(paths.authority)))
    async with serving(tls=tls) as served:
        reader, _ = await served.connect(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100))
        with suppress(ConnectionError):
            assert await reader.read() == b""


async def test_all_requests_of_a_pipelining_client_are_answered() -> None:
    """The parser of aiohttp holds requests back, one fewer after a body that came apart from its head."""
    head, answer = b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n", b"\r\n\r\n2"
    begun = asyncio.Event()

    @web.middleware
    async def note(request: web.Request, handler: Any) -> web.StreamResponse:
        begun.set()
        return await handler(request)

    async with serving(middlewares=[note]) as served, asyncio.timeout(30):
        reader, writer = await served.connect(head)
        await begun.wait()
        writer.write(b"ab")
        await reader.readuntil(answer)
        writer.write((head + b"ab") * (MAX_MSG_QUEUE_SIZE + 8))
        for _ in range(MAX_MSG_QUEUE_SIZE + 8):
            await reader.readuntil(answer)
