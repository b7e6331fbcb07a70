"""A call stream server whose frames a test writes one by one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from kvrouter.net.http2.frames import HEADER_BYTES, PREFACE, Kind, frame, read_frame_header, settings, window_update
from kvrouter.v1.calls_pb2 import (
    CallRequest,
    CallResponse,
    CallResponseKind,
    OpenCallStreamRequest,
    OpenCallStreamResponse,
)

from ..http2.http2_server import data, headers, prefixed
from .linked import SERVER_HELLO

_LAST = CallResponseKind.CALL_RESPONSE_KIND_LAST


class Accepted:
    """A connection that was accepted."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._payload = bytearray()
        self._calls: deque[CallRequest] = deque()

    def send(self, sent: bytes) -> None:
        self._writer.write(sent)

    async def flush(self) -> None:
        await self._writer.drain()

    def send_message(self, message: bytes) -> None:
        self.send(data(prefixed(message)))

    async def open(self, hello: bytes = SERVER_HELLO) -> None:
        """Reads the client's hello and answers it."""
        await self._reader.readexactly(len(PREFACE))
        self.send(settings({}))
        await self.message()
        self.send(headers((":status", "200"), ("content-type", "application/grpc")))
        self.send_message(hello)

    async def message(self) -> bytes:
        """Returns the next message of the client."""
        payload = self._payload
        while len(payload) < 5 or len(payload) < 5 + int.from_bytes(payload[1:5], "big"):
            header = await self._reader.readexactly(HEADER_BYTES)
            length, kind, _, stream = read_frame_header(header, 0)
            content = await self._reader.readexactly(length)
            if kind == Kind.DATA and length:
                payload += content
                self.send(window_update(0, length) + window_update(stream, length))
        end = 5 + int.from_bytes(payload[1:5], "big")
        message = bytes(payload[5:end])
        del payload[:end]
        return message

    async def call(self) -> CallRequest:
        """Returns the next call of the client."""
        while not self._calls:
            self._calls.extend(OpenCallStreamRequest.FromString(await self.message()).calls)
        return self._calls.popleft()

    def answer(self, call: CallRequest) -> None:
        """Answers a call with its own request."""
        item = CallResponse(number=call.number, kind=_LAST, response=call.request)
        self.send_message(OpenCallStreamResponse(responses=[item]).SerializeToString())

    async def answer_all(self) -> None:
        """Answers every call until the client leaves."""
        while True:
            self.answer(await self.call())

    def go_away(self, last_stream: int) -> None:
        self.send(frame(Kind.GOAWAY, last_stream.to_bytes(4, "big") + bytes(4)))

    async def closed(self) -> None:
        """Waits until the client has left."""
        while await self._reader.read(1 << 16):
            pass


Script = Callable[[Accepted, int], Awaitable[None]]
"""Serves a connection with a number: 1 for the first."""


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[int]:
    """Yields the port of a server."""
    accepted = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await script(Accepted(reader, writer), accepted)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
