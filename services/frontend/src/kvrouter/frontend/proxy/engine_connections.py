"""Connections to the OpenAI APIs of engines, for requests that are forwarded. Redirects are for the client.

A connection serves one request at a time, and waits some seconds for the next one.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from functools import cache, lru_cache

from kvrouter.engines.openai_server import os_error_words
from kvrouter.frontend.edge.event_stream import encoded_head
from kvrouter.frontend.proxy.engine_exchange import EngineAnswer, EngineConnection, late
from kvrouter.frontend.proxy.engine_origin import Origin
from kvrouter.net.calls import NotSent
from kvrouter.net.http2.connecting import addresses_of, first_connection

_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 15.0
"""Time after which an idle connection is closed."""
_UNSAFE = "expected headers and a path without line breaks"


class EngineConnections:
    """The connections to all engines. ``close`` must follow."""

    def __init__(self) -> None:
        self._idle: dict[Origin, list[EngineConnection]] = {}
        """By server."""
        self._check: asyncio.TimerHandle | None = None

    async def post(
        self, url: str, path: str, *, data: bytes, headers: Mapping[str, str], seconds: float | None
    ) -> EngineAnswer:
        """Sends a request to an engine, and returns its response when the head has arrived. ``end`` must follow.

        Args:
            url: URL of the server.
            path: Path of its API, with the query.
            data: The body.
            headers: The headers but Host and Content-Length.
            seconds: Time until the end of the response; None for any.

        Raises:
            NotSent: the engine cannot be connected to.
            EngineFailed: the connection ended before the head of the response.
            DependencyAway: the response is not HTTP.
            DeadlineExceeded: the time is over.
            ValueError: a header or the path has a line break.
        """
        try:
            origin = Origin.of(url)
        except ValueError as error:
            raise NotSent(f"its OpenAI API cannot be reached: {error}") from None
        named = "\r\n".join([*map(": ".join, headers.items()), ""])
        lines = len(headers)
        if named.count("\n") != lines or named.count("\r") != lines or "\0" in named:
            raise ValueError(_UNSAFE)
        if origin.credential and "authorization" not in map(str.lower, headers):
            named += origin.credential
        head = f"{_first_lines(origin, path)}{named}Content-Length: {len(data)}\r\n\r\n"
        connection = self._take(origin) or await self._connect(origin, seconds)
        try:
            return await connection.exchange(encoded_head(head), data, seconds)
        except BaseException:
            self._release(connection)
            raise

    def end(self, answer: EngineAnswer) -> None:
        """Ends a response. Its connection can serve another request if all of the response has arrived.

        Raises:
            RuntimeError: it was ended before.
        """
        connection = answer.connection
        if not connection.holds(answer):
            raise RuntimeError(f"{answer} was ended before: expected one end of each response")
        self._release(connection)

    def _release(self, connection: EngineConnection) -> None:
        if not connection.end():
            return
        self._idle.setdefault(connection.server, []).append(connection)
        if self._check is None:
            self._check = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._close_old)

    def close(self) -> None:
        """Closes idle connections."""
        if self._check is not None:
            self._check.cancel()
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()

    def _take(self, origin: Origin) -> EngineConnection | None:
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection
        return None

    def _close_old(self) -> None:
        loop = asyncio.get_running_loop()
        for server, idle in list(self._idle.items()):
            kept = [each for each in idle if each.is_open and loop.time() - each.idle_since < _IDLE_SECONDS]
            for connection in set(idle).difference(kept):
                connection.close()
            self._idle[server] = kept
            if not kept:
                del self._idle[server]
        self._check = loop.call_later(_IDLE_SECONDS, self._close_old) if self._idle else None

    async def _connect(self, origin: Origin, seconds: float | None) -> EngineConnection:
        loop = asyncio.get_running_loop()

        async def connect(address: str) -> EngineConnection:
            _, protocol = await loop.create_connection(
                lambda: EngineConnection(origin),
                address,
                origin.port,
                ssl=_tls() if origin.is_encrypted else None,
                server_hostname=origin.host if origin.is_encrypted else None,
            )
            return protocol

        is_late = seconds is not None and seconds < _CONNECT_SECONDS
        limit = seconds if seconds is not None and is_late else _CONNECT_SECONDS
        try:
            async with asyncio.timeout(limit):
                addresses = await addresses_of(origin.host, origin.port)
                return await first_connection(addresses, connect, limit)
        except TimeoutError:
            if is_late:
                raise late() from None
            failure = "no answer in time"
        except OSError as error:
            failure = os_error_words(error)
        except ExceptionGroup as group:
            last = group.exceptions[-1]
            failure = os_error_words(last) if isinstance(last, OSError) else str(last)
        raise NotSent(f"its OpenAI API cannot be reached: {failure} at {origin.host}:{origin.port}")


@lru_cache(256)
def _first_lines(origin: Origin, path: str) -> str:
    """Returns the first lines of a request. Raises ValueError if another one may begin in its path."""
    if not (path.isascii() and path.isprintable()) or " " in path:
        raise ValueError(_UNSAFE)
    return f"POST {origin.path}{path} HTTP/1.1\r\nHost: {origin.authority}\r\n"


@cache
def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
