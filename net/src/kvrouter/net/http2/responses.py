"""The responses of a call with one request, on a connection of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import grpc
from kvrouter.net.budgets import loop_budget
from kvrouter.net.http2.connection import GrpcConnection
from kvrouter.net.http2.side import CONNECTION_WINDOW_BYTES

_MESSAGE_US = 30
"""CPU time to read and parse a small message, microseconds."""
_PARSED_BYTES_PER_US = 100


class ResponseConnection(GrpcConnection):
    """A connection whose input costs little when it arrives. Each response takes a turn when it is read."""

    bytes_per_us: ClassVar[int] = 50
    slice_bytes: ClassVar[int] = 128 << 10


class CallFailed(Exception):
    """The server ended the call with a status other than OK."""

    def __init__(self, code: grpc.StatusCode, details: str, trailers: dict[bytes, bytes]) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details
        self.trailers = trailers


class Responses:
    """Reads the responses. The server may send about two windows of bytes that are not read."""

    def __init__(self, connection: ResponseConnection, request: bytes) -> None:
        """Sends the request on a connection of ``ResponseConnection.open``."""
        self._connection = connection
        self._budget = loop_budget()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._has_ended = False
        self._changed = asyncio.Event()
        connection.on_end(self._end)
        connection.call.send(request, last=True)
        connection.start(self._take, lambda: None)

    def _take(self, messages: Sequence[bytes]) -> None:
        self._waiting.extend(messages)
        self._waiting_bytes += sum(map(len, messages))
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
        # Many small ones may wait, and reading the next one does not return to the event loop.
        await self._budget.turn(_MESSAGE_US + len(message) // _PARSED_BYTES_PER_US)
        self._waiting_bytes -= len(message)
        if not self._waiting:
            call.allow_withheld()
        return message
