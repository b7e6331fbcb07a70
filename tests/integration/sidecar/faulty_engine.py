"""A server that describes itself as vLLM or SGLang does, and answers requests with whatever a test chooses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]

METRICS = """\
vllm:cache_config_info{block_size="4",num_gpu_blocks="64",engine="0"} 1
vllm:num_requests_running{engine="0"} 1
vllm:num_requests_waiting{engine="0"} 0
vllm:kv_cache_usage_perc{engine="0"} 0.5
"""


def chunk(*tokens: int, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": "x", "token_ids": list(tokens), "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


class FaultyEngine:
    """A server without KV events."""

    def __init__(self, *, is_sglang: bool = False) -> None:
        self.url = ""
        self.metrics = METRICS
        self.health = 200
        self.answer: Answer | None = None
        """Answers a request for tokens."""
        self.bodies: list[dict[str, Any]] = []
        """Requests for tokens."""
        self.aborted: list[str] = []
        """Ids that were to be aborted."""
        self.headers: list[str] = []
        """Authorization of each request for tokens."""
        self._is_sglang = is_sglang

    @asynccontextmanager
    async def started(self) -> AsyncIterator[FaultyEngine]:
        application = web.Application()
        application.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.post("/v1/completions", self._generate),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
            ]
        )
        if self._is_sglang:
            application.add_routes([web.get("/server_info", self._server_info)])
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    def answers(self, *parts: bytes, kind: str = "text/event-stream", status: int = 200, breaks: bool = False) -> None:
        """Answers with these parts; ``breaks`` closes the connection instead of ending the answer."""

        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(status=status, headers={"Content-Type": kind})
            await response.prepare(request)
            for part in parts:
                await response.write(part)
            if breaks and request.transport is not None:
                request.transport.abort()
            return response

        self.answer = answer

    def hangs(self, *parts: bytes) -> None:
        """Answers with these parts, and then with nothing more."""

        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for part in parts:
                await response.write(part)
            await asyncio.Event().wait()
            return response

        self.answer = answer

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "root": "m", "max_model_len": 256}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics, status=self.health)

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": "m", "page_size": 4, "max_total_num_tokens": 256})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(request.headers.get("Authorization", ""))
        assert self.answer is not None
        return await self.answer(request)

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()
