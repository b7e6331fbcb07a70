"""JSON responses and streams of server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web


def json_response(body: Any, status: int = 200) -> web.Response:
    """Returns a JSON response."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


async def open_stream(request: web.Request) -> web.StreamResponse:
    """Sends the head of a stream of server-sent events."""
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await stream.prepare(request)
    return stream


def event(data: Any) -> bytes:
    """Returns a server-sent event with JSON data."""
    return b"data: %b\n\n" % msgspec.json.encode(data)
