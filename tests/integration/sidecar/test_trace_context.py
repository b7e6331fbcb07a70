"""The trace context of a request reaches the engine."""

from __future__ import annotations

import aiohttp
from aiohttp import web
from kvrouter.engines.servers.http import EngineHttp
from kvrouter.net import trace_context

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_requests_for_tokens_carry_the_trace_context_and_others_do_not() -> None:
    received: list[list[str | None]] = []

    async def receive(request: web.Request) -> web.Response:
        received.append([request.headers.get(name) for name in ("traceparent", "tracestate", "baggage")])
        return web.Response()

    application = web.Application()
    application.add_routes([web.post("/v1/completions", receive), web.get("/health", receive)])
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            engine = EngineHttp(session, url, key_headers=dict, answer_seconds=10)
            companions = trace_context.Companions("vendor=abc", "tenant=blue")
            with trace_context.entered(TRACEPARENT), trace_context.accompanied(companions):
                async with engine.generate("/v1/completions", b"{}", {}):
                    pass
            async with engine.generate("/v1/completions", b"{}", {}):
                pass
            await engine.get("/health")
    finally:
        await runner.cleanup()
    assert received == [[TRACEPARENT, "vendor=abc", "tenant=blue"], [None] * 3, [None] * 3]
