"""Authenticates the requests of the HTTP API before their bodies are read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from kvrouter.frontend.access.access import Access

_OPEN_PATHS = frozenset({"/health"})
"""Paths that need no credential."""


def authenticated(access: Access) -> Any:
    """Returns the middleware."""

    @web.middleware
    async def authenticate(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path in _OPEN_PATHS:
            return await handler(request)
        with access.admit_http(request.method, request.path, request.headers.items()):
            return await handler(request)

    return authenticate
