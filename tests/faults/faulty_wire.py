"""TCP connections to a gRPC server that go through the test, which can reset, silence or garble them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from enum import StrEnum

_PIECE_BYTES = 1 << 16
_FRAME_HEADER_BYTES = 9
_DATA_FRAME = 0
_MESSAGE_HEADER_BYTES = 5


class Garble(StrEnum):
    """What the server's answers become."""

    BYTES = "bytes"
    """Random bytes, which are no HTTP/2."""
    MESSAGES = "messages"
    """Valid HTTP/2 and gRPC, whose messages cannot be decoded."""


class FaultyWire:
    """Passes bytes to a port of this machine and back. Faults strike while the context of ``laid`` lasts."""

    def __init__(self, server_port: int, rng: random.Random) -> None:
        self.address = ""
        """Where to connect instead of the server, host:port."""
        self._server_port = server_port
        self._rng = rng
        self._connections: set[_Connection] = set()
        self._garble: Garble | None = None

    def reset(self) -> None:
        """Resets what is connected; new connections pass."""
        for connection in self._connections:
            connection.reset()

    def silence(self) -> None:
        """Loses all bytes of what is connected, which stays open on both sides; new connections pass."""
        for connection in self._connections:
            connection.is_silent = True

    def garble(self, how: Garble) -> None:
        """Garbles what the server sends, on all connections, until ``heal``."""
        self._garble = how

    def heal(self) -> None:
        """Resets what is connected; new connections have no fault."""
        self._garble = None
        self.reset()

    @asynccontextmanager
    async def laid(self) -> AsyncIterator[None]:
        """Listens while the context lasts."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()
            running = [connection.running for connection in self._connections]
            self.reset()
            if running:
                await asyncio.wait(running)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(writer, far_writer)
        self._connections.add(connection)
        passing = self._pass(connection, reader, far_writer), self._answer(connection, far_reader, writer)
        # As a task of its own: one that the server made and that is cancelled is logged as an error.
        connection.running = asyncio.create_task(connection.run(*passing))
        connection.running.add_done_callback(lambda _: self._connections.discard(connection))

    async def _pass(self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(_PIECE_BYTES):
            if not connection.is_silent:
                writer.write(piece)
                await writer.drain()

    async def _answer(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Passes frames of HTTP/2 on, which are garbled as wanted."""
        while True:
            header = await reader.readexactly(_FRAME_HEADER_BYTES)
            payload = await reader.readexactly(int.from_bytes(header[:3], "big"))
            if self._garble is Garble.BYTES:
                header, payload = self._rng.randbytes(len(header)), self._rng.randbytes(len(payload))
            elif self._garble is Garble.MESSAGES and header[3] == _DATA_FRAME:
                payload = payload[:_MESSAGE_HEADER_BYTES] + b"\xff" * len(payload[_MESSAGE_HEADER_BYTES:])
            if not connection.is_silent:
                writer.write(header + payload)
                await writer.drain()


class _Connection:
    """Two ends. ``run`` must be called, as the task ``running``."""

    running: asyncio.Task[None]

    def __init__(self, *ends: asyncio.StreamWriter) -> None:
        self.is_silent = False
        self._ends = ends
        self._was_reset = asyncio.Event()

    async def run(self, *ways: Awaitable[None]) -> None:
        """Passes bytes both ways until one side ends; the other one learns of it unless the connection is silent."""
        passing = [asyncio.ensure_future(_until_lost(way)) for way in ways]
        try:
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            if self.is_silent:
                await self._was_reset.wait()
        finally:
            for way in passing:
                way.cancel()
            await asyncio.wait(passing)
            self.reset()

    def reset(self) -> None:
        """Ends both ends at once."""
        self._was_reset.set()
        for end in self._ends:
            end.transport.abort()


async def _until_lost(way: Awaitable[None]) -> None:
    with suppress(OSError, asyncio.IncompleteReadError):
        await way
