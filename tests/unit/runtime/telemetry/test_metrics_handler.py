"""Requests for metrics cost one exposition for many, and few unread responses are kept."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kvrouter.runtime.telemetry import metrics as metrics_handler
from kvrouter.runtime.telemetry.metrics import Exposition, MetricsHandler


def serving(handler: MetricsHandler) -> TestServer:
    application = web.Application()
    application.add_routes([web.get("/metrics", handler.send)])
    return TestServer(application)


async def test_a_flood_of_requests_shares_an_exposition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_handler, "_BURST_SECONDS", 0.0)
    made = 0

    async def exposition() -> Exposition:
        nonlocal made
        made += 1
        return b"metrics %d" % made, 0.001

    async with serving(MetricsHandler(exposition)) as server, aiohttp.ClientSession() as session:

        async def scrape() -> bytes:
            async with session.get(server.make_url("/metrics")) as response:
                return await response.read()

        assert set(await asyncio.gather(*(scrape() for _ in range(50)))) == {b"metrics 1"}
        assert made == 1


async def test_a_scraper_gets_what_is_new() -> None:
    made = 0

    async def exposition() -> Exposition:
        nonlocal made
        made += 1
        return b"metrics %d" % made, 0.001

    async with serving(MetricsHandler(exposition)) as server, aiohttp.ClientSession() as session:
        for number in range(1, 20):
            async with session.get(server.make_url("/metrics")) as response:
                assert await response.read() == b"metrics %d" % number


async def test_a_further_unread_response_ends_the_oldest() -> None:
    async def exposition() -> Exposition:
        return bytes(32 << 20), 0.0

    handler = MetricsHandler(exposition)
    async with serving(handler) as server, asyncio.timeout(60), AsyncExitStack() as stack:
        for _ in range(handler.sending.limit + 4):
            _, writer = await asyncio.open_connection(server.host, server.port)
            stack.callback(writer.close)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        while handler.sending.evicted < 4:
            await asyncio.sleep(0.01)
        assert len(handler.sending) <= handler.sending.limit
        async with aiohttp.ClientSession() as session, session.get(server.make_url("/metrics")) as response:
            assert len(await response.read()) == 32 << 20
