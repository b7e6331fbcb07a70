"""Requests for metrics cost one exposition for many, and few unread responses are kept."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer
from kvrouter.runtime.telemetry.metrics_handler import MetricsHandler


def serving(handler: MetricsHandler) -> TestServer:
    application = web.Application()
    application.add_routes([web.get("/metrics", handler.send)])
    return TestServer(application)


async def test_many_requests_share_an_exposition() -> None:
    made = 0
    go_on = asyncio.Event()

    async def exposition() -> bytes:
        nonlocal made
        made += 1
        await go_on.wait()
        return b"metrics %d" % made

    async with serving(MetricsHandler(exposition)) as server, aiohttp.ClientSession() as session:

        async def scrape() -> bytes:
            async with session.get(server.make_url("/metrics")) as response:
                return await response.read()

        scraping = [asyncio.create_task(scrape()) for _ in range(50)]
        while not made:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)  # The exposition takes so long that no further one is due.
        go_on.set()
        assert set(await asyncio.gather(*scraping)) == {b"metrics 1"}
        assert made == 1


async def test_a_further_unread_response_ends_the_oldest() -> None:
    async def exposition() -> bytes:
        return bytes(32 << 20)

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
