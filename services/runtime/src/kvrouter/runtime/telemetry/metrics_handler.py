"""Answers requests for metrics, so that floods of them cost little time and memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from kvrouter.net.rpc.peer_conduct import EvictableCalls
from kvrouter.net.token_bucket import TokenBucket
from prometheus_client import CONTENT_TYPE_LATEST

_MOST_UNREAD = 16
"""Responses that are sent at once. A further one ends the oldest."""
_SECONDS = 10.0
"""Time for a client to read a response, seconds."""
_SHARE = 0.05
"""Share of a core that expositions may use for good. Beyond it, requests get the newest one."""
_BURST_SECONDS = 1.0
"""CPU time that they may use at once, seconds."""


class MetricsHandler:
    """Handles requests for metrics with the newest exposition."""

    def __init__(self, exposition: Callable[[], Awaitable[bytes]]) -> None:
        """``exposition`` returns all metrics as Prometheus text."""
        self._exposition = exposition
        self._newest = b""
        self._time = TokenBucket(_SHARE, _BURST_SECONDS)
        self._exposing = asyncio.Lock()
        self.sending = EvictableCalls(_MOST_UNREAD)
        """Responses that are being sent."""

    async def send(self, request: web.Request) -> web.StreamResponse:
        """Sends the metrics."""
        body = await self._current()
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE_LATEST})
        response.content_length = len(body)
        try:
            async with asyncio.timeout(_SECONDS) as timeout:
                with self.sending.running(timeout):
                    await response.prepare(request)
                    await response.write(body)
                    await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _current(self) -> bytes:
        async with self._exposing:
            if self._time.level() > 0 or not self._newest:
                began = time.thread_time()
                self._newest = await self._exposition()
                self._time.take(time.thread_time() - began)
            return self._newest
