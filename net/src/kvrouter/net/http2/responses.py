"""The responses of a call with one request, on a connection of its own."""

from __future__ import annotations

import asyncio
from collections import deque

import grpc
from kvrouter.net.http2.connection import GrpcConnection
from kvrouter.net.http2.side import CONNECTION_WINDOW_BYTES


class CallFailed(Exception):
    """The server ended the call with a status other than OK."""

    def __init__(self, code: grpc.StatusCode, details: str, trailers: dict[bytes, bytes]) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details
        self.trailers = trailers


class Responses:
    """Reads the responses. The server may send about two windows of bytes that are not read."""

    def __init__(self, connection: GrpcConnection, request: bytes) -> None:
        """Sends the request on a connection of ``GrpcConnection.open``."""
        self._connection = connection
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._has_ended = False
        self._changed = asyncio.Event()
        connection.on_end(self._end)
        connection.call.send(request, last=True)
        connection.start(self._take, lambda: None)

    def _take(self, message: bytes) -> None:
        self._waiting.append(message)
        self._waiting_bytes += len(message)
        if self._waiting_bytes > CONNECTION_WINDOW_BYTES:
            self._connection.call.withhold()
        self._changed.set()

    def _end(self) -> None:
        self._has_ended = True
        self._changed.set()

    async def read(self) -> bytes | None:
        """Returns the next response; None after the last one.

        Raises:
            CallFailed: the call has ended with an error.
            ConnectionLost: the connection has ended.
            Http2Violation: the server broke a rule of HTTP/2.
        """
        call = self._connection.call
        while not (self._waiting or self._has_ended):
            self._changed.clear()
            await self._changed.wait()
        if not self._waiting:
            if call.ended is None:
                await self._connection.wait_ended()
            elif call.ended[0] is not grpc.StatusCode.OK:
                raise CallFailed(*call.ended, call.trailers)
            return None
        message = self._waiting.popleft()
        self._waiting_bytes -= len(message)
        if not self._waiting:
            call.allow_withheld()
        return message
