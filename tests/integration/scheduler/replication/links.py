"""A TCP link between one service and NATS that can be cut, in every way in which networks do it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from enum import Enum

_CHUNK_BYTES = 1 << 16


class Cut(Enum):
    """What is lost. As long as a link is cut, whoever connects anew is turned away."""

    REFUSED = "refused"
    """The connection is closed at once: both ends know."""
    SILENT = "silent"
    """Drops everything, and neither end notices."""
    DEAF = "deaf"
    """The service hears nothing, what it says arrives."""
    MUTE = "mute"
    """The service hears everything, what it says is lost."""


class Link:
    """Forwards connections to a port. Pure forwarding until it is cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._cut: Cut | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._lost: dict[bool, frozenset[Cut]] = {
            True: frozenset((Cut.SILENT, Cut.DEAF)),
            False: frozenset((Cut.SILENT, Cut.MUTE)),
        }

    def cut(self, how: Cut) -> None:
        """Cuts it."""
        self._cut = how
        if how is Cut.REFUSED:
            self._close_all()

    def heal(self) -> None:
        """Makes it whole. Connections that lost something end, as they do when TCP gives up: they come anew."""
        self._cut = None
        self._close_all()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either end closes it."""
        if self._cut is not None:
            writer.close()
            return
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        both = {writer, to_server}
        self._open |= both
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(from_server, writer, to_service=True))
                group.create_task(self._pump(reader, to_server, to_service=False))
        finally:
            self._open -= both

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, to_service: bool) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                if self._cut not in self._lost[to_service]:
                    writer.write(data)
                    await writer.drain()
        writer.close()

    def _close_all(self) -> None:
        for writer in self._open:
            writer.transport.abort()


@asynccontextmanager
async def links(nats_url: str, count: int) -> AsyncIterator[list[tuple[Link, str]]]:
    """So many links, each with the URL of its end."""
    port = int(nats_url.rsplit(":", 1)[1])
    async with AsyncExitStack() as exits:
        made: list[tuple[Link, str]] = []
        for _ in range(count):
            link = Link(port)
            server = await asyncio.start_server(link.serve, "127.0.0.1", 0)
            exits.callback(link.heal)
            exits.callback(server.close)
            made.append((link, f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        yield made
