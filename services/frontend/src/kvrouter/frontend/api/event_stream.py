"""A response of server-sent events that is written at once, without a coroutine for each event.

aiohttp writes a part of a response in a coroutine. Events come from the reader of a worker's connection, which calls
and does not wait. So this class writes the response to the transport itself, and aiohttp takes it as already written.
"""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import formatdate

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

_END_OF_BODY = b"0\r\n\r\n"
_FRAMING_BYTES = len(b"data: \n\n")
"""What an event adds to its data."""
_SHORT = 1024
"""Bytes of data below which the head of a chunk is not formatted anew: nearly every event of a stream."""


def _chunk_head(size: int) -> bytes:
    """Returns what precedes the data of an event in a chunk of its own."""
    return b"%x\r\ndata: " % (size + _FRAMING_BYTES)


_HEADS = [_chunk_head(size) for size in range(_SHORT)]


class EventStream(web.StreamResponse):
    """A response with status 200 that begins with its first event. The handler ends it, and returns it to aiohttp."""

    def __init__(self, request: web.Request) -> None:
        super().__init__()
        self.begun = False
        """Whether the head of the response is written."""
        self._added: dict[str, str] = {}
        self._request = request
        self._protocol = request.protocol
        self._transport = request.transport
        self._chunked = request.version >= HttpVersion11
        # Without chunks, the end of the connection is the end of the body.
        self._keeps_connection = request.keep_alive and self._chunked

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Adds headers to the response, unless its head is written."""
        self._added.update(headers)

    @property
    def prepared(self) -> bool:
        """Whether the head of the response is written."""
        return self.begun

    @property
    def keep_alive(self) -> bool:
        """Whether the connection can serve another request."""
        return self._keeps_connection

    @property
    def is_full(self) -> bool:
        """Whether the client has not read what was written. More should be kept until ``drain`` returns."""
        return self._protocol.writing_paused

    def write_event(self, data: bytes) -> None:
        """Writes an event with this data, which must not contain a line break."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # aiohttp cancels the handler.
        if self._chunked:
            size = len(data)
            text = (_HEADS[size] if size < _SHORT else _chunk_head(size)) + data + b"\n\n\r\n"
        else:
            text = b"data: %b\n\n" % data
        if not self.begun:
            self.begun = True
            text = self._head() + text
        transport.write(text)

    def end(self, *, close: bool = False) -> None:
        """Ends the response; with ``close`` also the connection, once the client has read the rest."""
        self._keeps_connection = self._keeps_connection and not close
        transport = self._transport
        if self._chunked and transport is not None and not transport.is_closing():
            transport.write(_END_OF_BODY)

    async def drain(self) -> None:
        """Returns when the client has read most of what was written.

        Raises:
            ConnectionError: it disconnected.
        """
        await self._request.writer.drain()

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:  # noqa: ARG002
        """Does nothing: the response is written already."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Does nothing: the response is written already."""

    def _head(self) -> bytes:
        lines = [
            "HTTP/1.1 200 OK" if self._chunked else "HTTP/1.0 200 OK",
            "Content-Type: text/event-stream",
            "Cache-Control: no-cache",
            f"Date: {formatdate(usegmt=True)}",
            *(f"{name}: {value}" for name, value in self._added.items()),
        ]
        if self._chunked:
            lines.append("Transfer-Encoding: chunked")
        if not self._keeps_connection:
            lines.append("Connection: close")
        return "\r\n".join([*lines, "", ""]).encode()
