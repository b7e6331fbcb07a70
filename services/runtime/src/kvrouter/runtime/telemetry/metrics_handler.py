"""Answers requests for metrics, so that floods of them cost little time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web
from kvrouter.net.evictable_calls import EvictableCalls
from prometheus_client import CONTENT_TYPE_LATEST

_MOST_UNREAD = 16
"""Responses that are sent at once. A further one ends the oldest."""
_SECONDS = 10.0
"""Time for a client to read a response, seconds."""
_LEAST_PAUSE = 10
"""Least time between two expositions, in multiples of what one takes: they use a tenth of a core at most."""


class MetricsHandler:
    """Handles requests for metrics with the newest exposition."""

    def __init__(self, exposition: Callable[[], Awaitable[bytes]]) -> None:
        """``exposition`` returns all metrics as Prometheus text."""
        self._exposition = exposition
        self._newest = b""
        self._fresh_until = 0.0
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
            clock = asyncio.get_running_loop().time
            began = clock()
            if began >= self._fresh_until:
                self._newest = await self._exposition()
                self._fresh_until = clock() + _LEAST_PAUSE * (clock() - began)
        return self._newest
