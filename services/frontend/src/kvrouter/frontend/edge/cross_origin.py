"""Lets pages of other origins call the HTTP API from a browser (CORS)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any

from aiohttp import web

ANY = "*"
"""Stands for every origin."""
_MAX_AGE_SECONDS = 600
"""Time for which browsers keep the answer to a preflight, seconds."""
_EXPOSED = (
    "x-request-id, retry-after, x-kvrouter-worker, x-kvrouter-overlap-blocks, x-kvrouter-prefill-worker, "
    "x-kvrouter-routed-on"
)
_HEADERS = web.RequestKey("cross_origin_headers", dict[str, str])


def cross_origin_headers(request: web.BaseRequest) -> dict[str, str]:
    """Returns the headers by which the response may be read at its origin; empty if it may not."""
    headers: dict[str, str] = request.get(_HEADERS, {})
    return headers


def allowing(origins: Collection[str]) -> Any:
    """Returns the middleware that answers preflights of these origins, before anything else sees them."""

    @web.middleware
    async def allow(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        origin = request.headers.get("Origin", "")
        if not origin or (ANY not in origins and origin not in origins):
            return await handler(request)
        request[_HEADERS] = {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": _EXPOSED,
            "Vary": "Origin",
        }
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            answer = {
                "Access-Control-Allow-Methods": "GET, POST",
                "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", ""),
                "Access-Control-Max-Age": str(_MAX_AGE_SECONDS),
            }
            return web.Response(status=204, headers=answer)
        return await handler(request)

    return allow


async def add_cross_origin_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Adds the headers to a response that is about to begin."""
    response.headers.update(cross_origin_headers(request))
