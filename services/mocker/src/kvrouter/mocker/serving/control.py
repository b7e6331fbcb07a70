"""What tests ask of a simulated server: the requests that it received, and faults of the next ones."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web
from kvrouter.mocker.serving.errors import ApiError
from kvrouter.mocker.serving.http_responses import json_response

CONTROL_PREFIX = "/mock/"
"""Beginning of the paths for tests."""
_KEPT = 100
"""Requests that are kept, the newest ones."""
_MAX_KEPT_BYTES = 64 << 10
"""Size of a body above which it is not kept."""
FAULTS = ("error_body", "server_error", "silence")
"""error_body: an error with status 200. server_error: status 500. silence: no answer until the client disconnects."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Control:
    """Observes and disturbs the POST requests of a server."""

    def __init__(self, error_body: Callable[[str, ApiError], Mapping[str, Any]]) -> None:
        self._error_body = error_body
        self._received: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._faults: Counter[str] = Counter()

    def routes(self) -> Sequence[web.RouteDef]:
        """Returns the routes."""
        return [
            web.get(f"{CONTROL_PREFIX}requests", self.received),
            web.post(f"{CONTROL_PREFIX}faults", self.set_faults),
        ]

    async def received(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Lists the requests: path, headers in lower case, and body, which is null if it is long or no JSON."""
        return json_response(list(self._received))

    async def set_faults(self, request: web.Request) -> web.Response:
        """Sets how many of the next requests have a fault, by its name.

        Raises:
            ApiError: the body is not an object of known faults and numbers.
        """
        try:
            faults = msgspec.json.decode(await request.read(), type=dict[str, int])
        except msgspec.MsgspecError as error:
            raise ApiError(400, f"faults: {error}") from None
        unknown = faults.keys() - set(FAULTS)
        if unknown:
            raise ApiError(400, f"faults: expected {', '.join(FAULTS)}, received {', '.join(sorted(unknown))}")
        self._faults = Counter(faults)
        return json_response(faults)

    async def observe(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handles a request, or lets it fail."""
        if request.method != "POST" or request.path.startswith(CONTROL_PREFIX):
            return await handler(request)
        self._received.append(
            {
                "path": request.path,
                "headers": {name.lower(): value for name, value in request.headers.items()},
                "body": _decoded(await request.read()),
            }
        )
        fault = next((name for name in FAULTS if self._faults[name] > 0), None)
        if fault is None:
            return await handler(request)
        self._faults[fault] -= 1
        error = ApiError(500, "fault requested by a test")
        match fault:
            case "error_body":
                return json_response(self._error_body(request.path, error))
            case "server_error":
                raise error
            case _:
                await asyncio.Event().wait()
                raise error  # Never reached: aiohttp cancels the handler of a client that disconnects.


def _decoded(body: bytes) -> Any:
    if len(body) > _MAX_KEPT_BYTES:
        return None
    try:
        return msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return None
