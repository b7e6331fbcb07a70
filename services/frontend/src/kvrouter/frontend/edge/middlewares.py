"""The middlewares of the HTTP API: pages of other origins (CORS), authentication, and traces."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Sequence, Set

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from kvrouter.frontend.access.access import Access
from kvrouter.net import trace_context
from kvrouter.runtime.http_server import note_admitted
from kvrouter.runtime.tracing import is_recording, request_span

ANY = "*"
"""Stands for every origin."""
_MAX_AGE_SECONDS = 600
"""Time for which browsers keep the answer to a preflight, seconds."""
_EXPOSED = (
    "x-request-id, retry-after, x-kvrouter-worker, x-kvrouter-overlap-blocks, x-kvrouter-prefill-worker, "
    "x-kvrouter-routed-on, x-kvrouter-model-choice, x-kvrouter-kv-source"
)
_HEADERS = web.RequestKey("cross_origin_headers", dict[str, str])


def cross_origin_headers(request: web.BaseRequest) -> dict[str, str]:
    """Returns the headers by which the response may be read at its origin; empty if it may not."""
    if "Origin" not in request.headers:
        return {}
    headers: dict[str, str] = request.get(_HEADERS, {})
    return headers


def within(middlewares: Sequence[Middleware], handler: Handler) -> Handler:
    """Returns a handler within middlewares, of which the first one gets a request first."""
    for middleware in reversed(middlewares):
        handler = _within(middleware, handler)
    return handler


def _within(middleware: Middleware, handler: Handler) -> Handler:
    return lambda request: middleware(request, handler)  # A partial object takes longer to pass keywords on.


def allowing(origins: Collection[str]) -> Middleware:
    """Returns the middleware answering preflights of these origins, before anything else sees them."""

    @web.middleware
    async def allow(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin", "")
        if not origin or (ANY not in origins and origin not in origins):
            return await handler(request)
        request[_HEADERS] = headers = {
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
            return web.Response(status=204, headers=answer | headers)
        response = await handler(request)
        response.headers.update(headers)
        return response

    return allow


def traced(models: Collection[str]) -> Middleware:
    """Returns the middleware tracing requests for tokens, in the trace of the client if it has sent its context.

    ``models`` are the paths of requests to models.
    """

    @web.middleware
    def trace(request: web.Request, handler: Handler) -> Awaitable[web.StreamResponse]:
        headers = request.headers
        is_traced = trace_context.HEADER in headers or is_recording() or trace_context.BAGGAGE_HEADER in headers
        if not is_traced or request.method != "POST" or not request.path.startswith("/v1/"):
            return handler(request)
        return _traced(request, handler, f"POST {request.path}" if request.path in models else "POST")

    return trace


async def _traced(request: web.Request, handler: Handler, name: str) -> web.StreamResponse:
    headers = request.headers
    traceparent = trace_context.checked(headers.get(trace_context.HEADER, ""))
    companions = trace_context.checked_companions(
        traceparent, headers.getall(trace_context.STATE_HEADER, ()), headers.getall(trace_context.BAGGAGE_HEADER, ())
    )
    with trace_context.accompanied(companions), trace_context.entered(traceparent), request_span(name) as http_span:
        response = await handler(request)
        if http_span.recording:
            http_span.set({"http.request.method": "POST", "http.response.status_code": response.status})
        return response


def authenticated(access: Access, open_paths: Set[str]) -> Middleware:
    """Returns the middleware; requests of ``open_paths`` need no credential."""

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in open_paths:
            return await handler(request)
        with access.admit_http(request.method, request.path, request.headers):
            note_admitted(request)
            return await handler(request)

    return authenticate
