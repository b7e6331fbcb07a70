"""Responses that handlers write themselves, on connections of every kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import MappingProxyType

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler
from kvrouter.frontend.edge.event_stream import EventStream, JsonResponse, StepWriter
from kvrouter.runtime.http_server import HttpLimits, serving_http
from prometheus_client import CollectorRegistry

JSON, EVENTS, KEPT, CLOSED = b"{}", b"data: x\n\ndata: y\n\n", "Connection: keep-alive\r\n", "Connection: close\r\n"
CHUNKS = b"9\r\ndata: x\n\n\r\n9\r\ndata: y\n\n\r\n0\r\n\r\n"


async def whole(request: web.Request) -> web.StreamResponse:
    await request.read()
    return JsonResponse(request, JSON, {"x-query": request.query_string})


async def sized(request: web.Request) -> web.StreamResponse:
    stream = EventStream(request, StepWriter(), headers=MappingProxyType({"Content-Length": "5"}))
    stream.write_bytes(b"hello")
    stream.end()
    return stream


async def streamed(request: web.Request) -> web.StreamResponse:
    stream = EventStream(request, StepWriter())
    stream.write_event(b"x")
    await asyncio.sleep(0)
    stream.write_event(b"y")
    stream.end()
    return stream


HANDLERS: dict[str, Handler] = {"/whole": whole, "/sized": sized, "/stream": streamed}


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A server whose application has none of the handlers of POST requests."""
    limits = HttpLimits(10, 60)
    application = web.Application()
    async with (
        asyncio.timeout(30),
        serving_http(
            application, "127.0.0.1", 0, limits, CollectorRegistry(), name="test", posted=HANDLERS, shutdown_timeout=1.0
        ) as (_, port),
    ):
        yield port


def post(path: str, version: str = "1.1", headers: str = "", body: str = "") -> bytes:
    return f"POST {path} HTTP/{version}\r\nHost: x\r\n{headers}Content-Length: {len(body)}\r\n\r\n{body}".encode()


async def answers(port: int, *requests: bytes) -> list[bytes]:
    """Sends requests at once, of which the last one closes the connection. Returns what follows each head."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"".join(requests))
    received = await reader.read()
    writer.close()
    parts = received.split(b"HTTP/1.")
    assert parts[0] == b""
    assert all(part[2:].startswith(b"200 OK\r\n") for part in parts[1:]), received
    return [part.partition(b"\r\n\r\n")[2] for part in parts[1:]]


async def test_pipelined_requests_are_answered_in_order(port: int) -> None:
    sent = [post("/sized"), post("/stream"), post("/whole", body="[]"), post("/sized", headers=CLOSED)]
    assert await answers(port, *sent) == [b"hello", CHUNKS, JSON, b"hello"]


async def test_old_clients_keep_a_connection_until_a_response_without_a_length(port: int) -> None:
    kept = [post(path, "1.0", KEPT) for path in ("/sized", "/whole", "/stream", "/sized")]
    assert await answers(port, *kept) == [b"hello", JSON, EVENTS]
    assert await answers(port, post("/sized", "1.0")) == [b"hello"]


async def test_requests_that_follow_a_declined_upgrade_are_answered(port: int) -> None:
    upgrade = post("/sized", headers="Connection: Upgrade\r\nUpgrade: websocket\r\n")
    sent = [post("/stream"), upgrade, post("/whole"), post("/sized", headers=CLOSED)]
    assert await answers(port, *sent) == [CHUNKS, b"hello", JSON, b"hello"]


async def test_requests_with_a_query_reach_their_handlers(port: int) -> None:
    assert await answers(port, post("/whole?a=1", headers=CLOSED)) == [JSON]
