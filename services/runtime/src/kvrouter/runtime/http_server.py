"""Serves HTTP within limits, so clients that open connections and send nothing harm nobody else.

The headers of a request must arrive within a time limit. The number of connections of a port is limited, which leaves
file descriptors for gRPC. At that limit, a new connection replaces the oldest idle one. Where requests have
credentials, connections that have shown none are strangers: they are the first to be replaced, take turns
(``http_strangers``), and must neither idle between two requests nor leave a response unread for longer than headers
may take. The rest of a body whose request was answered is read and dropped at a limited rate.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from aiohttp import web
from aiohttp.typedefs import Handler
from kvrouter.net.budgets import TokenBucket
from kvrouter.net.rpc.loop_server import BindFailed
from kvrouter.net.tls import Tls, warn_if_exposed
from kvrouter.runtime.bounds import bounds_of
from kvrouter.runtime.http_connections import END_OF_HEADERS, MAX_HELD_BYTES, JsonRequestHandler, StrangerTurns, ending
from prometheus_client import CollectorRegistry, Counter, Gauge

MAX_CONNECTIONS = 16_384
"""Default limit of connections of one port, if there are enough file descriptors."""

_OF_SERVER = frozenset({"handler_cancellation", "shutdown_timeout"})
"""Options of the server its connections do not have."""
_SETTLED_SECONDS = 1.0
"""Time after a request in which its response is certainly written."""
_DROPPED_BYTES_PER_SECOND = 8 << 20
"""Bytes of bodies that all connections of a port drop in a second. A client that sends a body before it reads the
response learns from it why it was refused, unless the body takes longer than aiohttp waits for it (10 s)."""
_MOST_DROPPED_BYTES = 10 * _DROPPED_BYTES_PER_SECOND


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one HTTP port."""

    connections: int
    header_seconds: float
    """Maximum time until the end of the headers, from the first byte of a request or the opening of its connection."""


def share_of_descriptors(share: float) -> int:
    """Returns that share of the file descriptors the process may open, at most MAX_CONNECTIONS."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, int(soft * share)))


def note_admitted(request: web.Request) -> None:
    """Notes a request within the limits of its credential, so its connection is no stranger."""
    if isinstance(request.protocol, JsonRequestHandler):
        request.protocol.is_stranger = False


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
    recognizes: Callable[[bytes], bool] | None = None,
    posted: Mapping[str, Handler] = MappingProxyType({}),
    **options: Any,
) -> AsyncIterator[tuple[str, int]]:
    """Serves an application while the context lasts; yields the host and port it listens on.

    Args:
        application: The application.
        host: Address to listen on; None for all addresses.
        port: Port to listen on; 0 chooses a free one.
        limits: Limits of the port.
        registry: Registry for the metrics.
        name: Part of the metrics' names.
        reuse_port: Whether processes share the port, which their parent holds (``shared_port``).
        tls: Encrypts connections; None for plain text.
        recognizes: Returns whether the beginning of a request shows a valid credential, whose limits leave room for
            it. Connections are strangers then, until a request is admitted (``note_admitted``); None if there are no
            strangers.
        posted: Handlers of POST requests by path. They get them past the application's router and middlewares.
        options: Options of ``aiohttp.web.AppRunner``.

    Raises:
        BindFailed: the port is in use or the address is not one of this machine's.
    """
    connections = _Connections(limits, registry, name, recognizes)
    warn_if_exposed(f"{host or '*'}:{port}", tls)
    options["access_log"] = None
    runner = web.AppRunner(application, **options)
    await runner.setup()
    try:
        handlers = runner.server
        assert handlers is not None  # noqa: S101 - set up above
        handlers.request_handler = cast(Any, connections.following(handlers.request_handler, posted))
        loop = asyncio.get_running_loop()
        of_handlers = {name: value for name, value in options.items() if name not in _OF_SERVER}
        try:
            server = await loop.create_server(
                lambda: _Connection(JsonRequestHandler(handlers, loop=loop, **of_handlers), connections),
                host,
                port,
                reuse_port=reuse_port,
                backlog=1024,
                **({} if tls is None else _encrypted(tls, limits)),
            )
        except OSError:
            raise BindFailed(f"{host or ''}:{port}") from None
        try:
            yield server.sockets[0].getsockname()[:2]
        finally:
            server.close()
    finally:
        await runner.cleanup()


def _encrypted(tls: Tls, limits: HttpLimits) -> dict[str, Any]:
    return {"ssl": tls.server_context(), "ssl_handshake_timeout": limits.header_seconds}


class _Connections:
    """The open connections of one port."""

    def __init__(
        self,
        limits: HttpLimits,
        registry: CollectorRegistry,
        name: str,
        recognizes: Callable[[bytes], bool] | None = None,
    ) -> None:
        self.limits = limits
        self.turns = None if recognizes is None else StrangerTurns(recognizes)
        """Turns of strangers; None if there are no strangers."""
        self.dropped = TokenBucket(_DROPPED_BYTES_PER_SECOND, _DROPPED_BYTES_PER_SECOND, _MOST_DROPPED_BYTES)
        """Bytes of bodies permitted to be dropped."""
        self._by_handler: dict[asyncio.Protocol, _Connection] = {}
        # Idle connections, the longest idle first.
        self._waiting: dict[_Connection, None] = {}
        self._waiting_strangers: dict[_Connection, None] = {}
        self._closed = Counter(
            f"kvrouter_{name}_http_connections_closed",
            "HTTP connections closed by the server: header_timeout; without a credential, idle or unread; at the "
            "limit, replaced by a newer one or refused.",
            ["reason"],
            registry=registry,
        )
        open_now = Gauge(f"kvrouter_{name}_http_connections", "Open HTTP connections.", registry=registry)
        open_now.set_function(lambda: len(self._by_handler))
        bounds = bounds_of(registry)
        bounds.add(f"{name}_http_connections", lambda: len(self._by_handler), limits.connections)
        if (turns := self.turns) is not None:
            bounds.add(f"{name}_http_waiting_bytes", lambda: turns.held, MAX_HELD_BYTES, when_full="evicts")

    def closed(self, reason: str) -> None:
        self._closed.labels(reason=reason).inc()

    def add(self, connection: _Connection) -> bool:
        """Adds a connection. Returns False if the limit is reached and no idle connection could be closed."""
        if len(self._by_handler) >= self.limits.connections and not self._make_room():
            self.closed("refused")
            return False
        self._by_handler[connection.handler] = connection
        (self._waiting if self.turns is None else self._waiting_strangers)[connection] = None
        return True

    def remove(self, connection: _Connection) -> None:
        self._by_handler.pop(connection.handler, None)
        self._waiting.pop(connection, None)
        self._waiting_strangers.pop(connection, None)
        if self.turns is not None:
            self.turns.forget(connection)

    def _make_room(self) -> bool:
        oldest = next(iter(self._waiting_strangers), None)
        if oldest is None:
            oldest = next(iter(self._waiting), None)
            if oldest is None or not oldest.is_settled():
                return False
        self.closed("replaced")
        oldest.abort()
        self.remove(oldest)
        return True

    def following(self, handles: Handler, posted: Mapping[str, Handler]) -> Handler:
        """Returns the handler of all requests. It marks a connection as busy while it serves one.

        Args:
            handles: The application.
            posted: Handlers of POST requests by path.
        """

        async def follow(request: web.Request) -> web.StreamResponse:
            protocol, handler = request.protocol, handles
            # The application decides about an expectation of the client before its body is read.
            if request.method == "POST" and "Expect" not in request.headers:
                # The application's router parses the URL, which takes longer than everything else it does.
                handler = posted.get(request.raw_path.partition("?")[0], handles)
            connection = self._by_handler.get(protocol)
            if connection is None:
                return await handler(request)
            self._waiting.pop(connection, None)
            self._waiting_strangers.pop(connection, None)
            connection.begin_request()
            try:
                return await handler(request)
            except web.HTTPExpectationFailed as refusal:
                # No middleware sees it, so it becomes an error as all others here.
                cause = "the header Expect may only be 100-continue"
                return connection.handler.handle_error(request, refusal.status, message=cause)
            finally:
                connection.end_request(drops_body=not request.content.is_eof())
                if protocol in self._by_handler:
                    idle = self._waiting_strangers if connection.handler.is_stranger else self._waiting
                    idle[connection] = None

        return follow


class _Connection(asyncio.Protocol):
    """A connection that passes its data on to aiohttp."""

    def __init__(self, handler: JsonRequestHandler, connections: _Connections) -> None:
        self.handler = handler
        self._connections = connections
        self.handler.is_stranger = connections.turns is not None
        self.handler.writing_paused = False
        self._held = bytearray()
        self._unread_timer: asyncio.TimerHandle | None = None
        self._drop_timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._in_request = False
        self._drops_body = False
        self._is_idle = False
        """Whether nothing has arrived since the last request."""
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
        """Records the arrival of a request's headers."""
        self.handler.is_stranger = self._connections.turns is not None
        self._in_request = True
        self._drops_body = False
        self._headers_since = None

    def end_request(self, *, drops_body: bool) -> None:
        """Records the response; with ``drops_body`` before its body had arrived."""
        self._in_request = False
        self._drops_body = drops_body
        self._ended_at = self._loop.time()
        if self.handler.is_stranger:
            self._is_idle = not self._held
            self._await_headers()

    @property
    def held(self) -> int:
        """Number of bytes waiting for the connection's turn."""
        return len(self._held)

    def hold(self, data: bytes) -> None:
        """Stores data until the connection's turn, and reads no more meanwhile."""
        self._held += data
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def pass_on(self) -> None:
        """Processes the next request of the held bytes."""
        end = self._held.find(END_OF_HEADERS)
        size = len(self._held) if end < 0 else end + len(END_OF_HEADERS)
        data = bytes(memoryview(self._held)[:size])
        del self._held[:size]
        if self._transport is not None:
            self.handler.data_received(data)
            self._read_on()

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
        if not self._in_request:
            self._is_idle = False
            if self._headers_since is None:
                self._await_headers()
        turns = self._connections.turns
        if self._drop_timer is not None or (self._drops_body and not self._held):
            seconds = self._connections.dropped.take(len(data))
            self.hold(data)
            if self._drop_timer is None:
                self._drop_timer = self._loop.call_later(seconds, self._drop)
        elif not (self.handler.is_stranger and turns is not None and turns.must_wait(self, data)):
            self.handler.data_received(data)

    def eof_received(self) -> None:
        if self._transport is not None:
            self.handler.eof_received()

    def pause_writing(self) -> None:
        if self.handler.is_stranger and self._unread_timer is None:
            self._unread_timer = self._loop.call_later(self._connections.limits.header_seconds, self._give_up_unread)
        self.handler.writing_paused = True
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        self._end_unread()
        self.handler.writing_paused = False
        self.handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._drop_timer):
            if timer is not None:
                timer.cancel()
        self._end_unread()
        self._connections.remove(self)
        self._held = bytearray()
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
        if self._is_idle:
            self._connections.closed("idle")
            self._transport.close()
            return
        self._connections.closed("header_timeout")
        cause = f"the headers did not arrive within {self._connections.limits.header_seconds:g} s"
        self._transport.write(ending(408, cause))
        self._transport.close()

    def _drop(self) -> None:
        """Passes on the held rest of a body, which aiohttp drops."""
        self._drop_timer = None
        data = bytes(self._held)
        self._held.clear()
        self.handler.data_received(data)
        self._read_on()

    def _read_on(self) -> None:
        if not (self._held or self._transport is None or self._transport.is_closing()):
            self._transport.resume_reading()

    def _give_up_unread(self) -> None:
        self._connections.closed("unread")
        self.abort()

    def _end_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _refuse(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.write(ending(503, "too many connections"))
            transport.close()
