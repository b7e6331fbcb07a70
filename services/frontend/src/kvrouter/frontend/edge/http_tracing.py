"""The trace of a request of the HTTP API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from kvrouter.net import trace_context
from kvrouter.runtime.tracing import is_recording, request_span


@web.middleware
async def traced(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Traces requests for tokens, in the trace of the client if it has sent its context."""
    headers = request.headers
    received = headers.get(trace_context.HEADER, "")
    is_traced = received or is_recording() or trace_context.BAGGAGE_HEADER in headers
    if not is_traced or request.method != "POST" or not request.path.startswith("/v1/"):
        return await handler(request)
    route = request.match_info.route.resource
    name = "POST" if route is None else f"POST {route.canonical}"
    traceparent = trace_context.checked(received)
    companions = trace_context.checked_companions(
        traceparent,
        headers.getall(trace_context.STATE_HEADER, ()),
        headers.getall(trace_context.BAGGAGE_HEADER, ()),
    )
    with trace_context.accompanied(companions), trace_context.entered(traceparent), request_span(name) as http_span:
        response = await handler(request)
        if http_span.recording:
            http_span.set({"http.request.method": "POST", "http.response.status_code": response.status})
        return response
