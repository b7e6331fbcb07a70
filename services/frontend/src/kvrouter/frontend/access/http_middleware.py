"""Authenticates the requests of the HTTP API, and holds them to their callers' limits, before their bodies are read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Set
from typing import Any

from aiohttp import web
from kvrouter.frontend.access.access import Access
from kvrouter.runtime.http_server import note_admitted


def authenticated(access: Access, open_paths: Set[str]) -> Any:
    """Returns the middleware; requests of ``open_paths`` need no credential."""

    @web.middleware
    async def authenticate(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path in open_paths:
            return await handler(request)
        with access.admit_http(request.method, request.path, request.headers):
            note_admitted(request)
            return await handler(request)

    return authenticate
