"""Serves HTTP within limits, so that clients that open connections and send nothing harm nobody else.

The headers of a request must arrive within a time limit. The number of connections of a port is limited, which leaves
file descriptors for gRPC. At that limit, a new connection replaces the oldest idle one.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import web
from kvrouter.net.tls import Tls, warn_if_exposed
from kvrouter.runtime.bounds import bounds_of
from kvrouter.runtime.http_refusals import JsonRequestHandler, ending
from kvrouter.runtime.listening import BindFailed
from prometheus_client import CollectorRegistry, Counter, Gauge

MAX_CONNECTIONS = 16_384
"""Default limit of connections of one port, if there are enough file descriptors."""

_OF_SERVER = frozenset({"handler_cancellation", "shutdown_timeout"})
"""Options of the server that its connections do not have."""
_SETTLED_SECONDS = 1.0
"""Time after a request in which its response is certainly written."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one HTTP port."""

    connections: int
    header_seconds: float
    """Maximum time until the end of the headers, from the first byte of a request or the opening of its connection."""


def share_of_descriptors(share: float) -> int:
    """Returns that share of the file descriptors that the process may open, at most MAX_CONNECTIONS."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, int(soft * share)))


@asynccontextmanager
async def serving_http(
    application: web.Application,
    host: str | None,
    port: int,
    limits: HttpLimits,
    registry: CollectorRegistry,
    *,
    name: str,
    reuse_port: bool = False,
    tls: Tls | None = None,
    **options: Any,
) -> AsyncIterator[tuple[str, int]]:
    """Serves an application while the context lasts; yields the host and port that it listens on.

    Args:
        application: The application.
        host: Address to listen on; None for all addresses.
        port: Port to listen on; 0 chooses a free one.
        limits: Limits of the port.
        registry: Registry for the metrics.
        name: Part of the metrics' names.
        reuse_port: Whether processes share the port, which their parent holds (``shared_port``).
        tls: Encrypts connections; None for plain text.
        options: Options of ``aiohttp.web.AppRunner``.

    Raises:
        BindFailed: the port is in use or the address is not one of this machine's.
    """
    connections = _Connections(limits, registry, name)
    warn_if_exposed(f"{host or '*'}:{port}", tls)
    application.middlewares.insert(0, connections.follow_request)
    options["access_log"] = None
    runner = web.AppRunner(application, **options)
    await runner.setup()
    try:
        handlers = runner.server
        assert handlers is not None  # noqa: S101 - set up above
        loop = asyncio.get_running_loop()
        of_handlers = {name: value for name, value in options.items() if name not in _OF_SERVER}
        try:
            server = await loop.create_server(
                lambda: _Connection(JsonRequestHandler(handlers, loop=loop, **of_handlers), connections),
                host,
                port,
                reuse_port=reuse_port,
                backlog=1024,
                ssl=None if tls is None else tls.server_context(),
            )
        except OSError:
            raise BindFailed(f"{host or ''}:{port}") from None
        try:
            yield server.sockets[0].getsockname()[:2]
        finally:
            server.close()
    finally:
        await runner.cleanup()


class _Connections:
    """The open connections of one port."""

    def __init__(self, limits: HttpLimits, registry: CollectorRegistry, name: str) -> None:
        self.limits = limits
        self._by_handler: dict[asyncio.Protocol, _Connection] = {}
        # Idle connections, the longest idle first.
        self._waiting: dict[_Connection, None] = {}
        self._closed = Counter(
            f"kvrouter_{name}_http_connections_closed",
            "HTTP connections closed by the server: header_timeout; at the limit, replaced by a newer one or refused.",
            ["reason"],
            registry=registry,
        )
        open_now = Gauge(f"kvrouter_{name}_http_connections", "Open HTTP connections.", registry=registry)
        open_now.set_function(lambda: len(self._by_handler))
        bounds_of(registry).add(f"{name}_http_connections", lambda: len(self._by_handler), limits.connections)

    def closed(self, reason: str) -> None:
        self._closed.labels(reason=reason).inc()

    def add(self, connection: _Connection) -> bool:
        """Adds a connection. Returns False if the limit is reached and no idle connection could be closed."""
        if len(self._by_handler) >= self.limits.connections and not self._make_room():
            self.closed("refused")
            return False
        self._by_handler[connection.handler] = connection
        self._waiting[connection] = None
        return True

    def remove(self, connection: _Connection) -> None:
        self._by_handler.pop(connection.handler, None)
        self._waiting.pop(connection, None)

    def _make_room(self) -> bool:
        oldest = next(iter(self._waiting), None)
        if oldest is None or not oldest.is_settled():
            return False
        self.closed("replaced")
        oldest.abort()
        self.remove(oldest)
        return True

    @web.middleware
    async def follow_request(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Marks the connection as busy while it serves a request."""
        connection = self._by_handler.get(request.protocol)
        if connection is None:
            return await handler(request)
        self._waiting.pop(connection, None)
        connection.begin_request()
        try:
            return await handler(request)
        finally:
            connection.end_request()
            if request.protocol in self._by_handler:
                self._waiting[connection] = None


class _Connection(asyncio.Protocol):
    """A connection that passes its data on to aiohttp."""

    def __init__(self, handler: asyncio.Protocol, connections: _Connections) -> None:
        self.handler = handler
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._in_request = False
        self._ended_at: float | None = None
        self._headers_since: float | None = None
        """When the wait for the end of headers began; None while there is no such wait."""
        self._header_timer: asyncio.TimerHandle | None = None
        """Checks that wait. It outlives a request, because a timer for each would cost more than a check in vain."""

    def is_settled(self) -> bool:
        """Returns whether it is idle and its last response has been written."""
        return not self._in_request and (
            self._ended_at is None or self._loop.time() - self._ended_at > _SETTLED_SECONDS
        )

    def begin_request(self) -> None:
        """Records that the headers of a request have arrived."""
        self._in_request = True
        self._headers_since = None

    def end_request(self) -> None:
        """Records that the request was answered."""
        self._in_request = False
        self._ended_at = self._loop.time()

    def abort(self) -> None:
        """Closes the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._connections.add(self):
            self._refuse()
            return
        self._await_headers()
        self.handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        if not self._in_request and self._headers_since is None:
            self._await_headers()
        self.handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self.handler.eof_received() if self._transport is not None else None

    def pause_writing(self) -> None:
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        self.handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
        self._connections.remove(self)
        if self._transport is not None:
            self._transport = None
            self.handler.connection_lost(exc)

    def _await_headers(self) -> None:
        self._headers_since = self._loop.time()
        if self._header_timer is None:
            self._check_headers_after(self._connections.limits.header_seconds)

    def _check_headers_after(self, seconds: float) -> None:
        self._header_timer = self._loop.call_later(seconds, self._check_headers)

    def _check_headers(self) -> None:
        """Closes a connection whose headers are late."""
        self._header_timer = None
        if self._headers_since is None or self._transport is None:
            return
        left = self._headers_since + self._connections.limits.header_seconds - self._loop.time()
        if left > 0:
            self._check_headers_after(left)
            return
        self._connections.closed("header_timeout")
        cause = f"the headers did not arrive within {self._connections.limits.header_seconds:g} s"
        self._transport.write(ending(408, cause))
        self._transport.close()

    def _refuse(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.write(ending(503, "too many connections"))
            transport.close()
