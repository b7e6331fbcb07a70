"""Responses that are written here, without a coroutine for each event.

aiohttp writes a part of a response in a coroutine. Events come from the reader of a worker's connection, which calls
and does not wait. So ``EventStream`` writes the response to the transport itself, with the other events of the step,
and aiohttp takes it as already written.

A message of a worker has tokens for many clients. Each write is a system call, and wakes its client up. Writes cost
less back to back than between the work making the events. All that one client gets in a step is one write. A
``ChunkWriter`` writes at once, and relies on uvloop, which collects the writes of a step as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from email.utils import formatdate
from functools import lru_cache
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web
from kvrouter.core import ChunkWriter, TokenWriter
from kvrouter.net.calls.limits import MAX_UNREAD_BYTES
from kvrouter.runtime.http_connections import WrittenResponse
from kvrouter.v1.errors import TooLarge

STREAM_TYPE = "text/event-stream"
_EVENT_HEADERS = {"Content-Type": STREAM_TYPE, "Cache-Control": "no-cache"}
_JSON_TYPE = "application/json; charset=utf-8"
_END_OF_BODY = b"0\r\n\r\n"
_BEFORE_DATA, _AFTER_DATA = b"data: ", b"\n\n"


def event_of(data: bytes) -> bytes:
    """Returns an event with this data, which must not contain a line break."""
    return _BEFORE_DATA + data + _AFTER_DATA


def named_event(name: str, fields: Mapping[str, Any]) -> bytes:
    """Returns an event, whose data repeats its name as its type."""
    return b"event: %b\n%b" % (name.encode(), event_of(msgspec.json.encode({"type": name, **fields})))


def too_much_unread(unread_bytes: int) -> TooLarge:
    """Returns the error of a client leaving more than ``MAX_UNREAD_BYTES`` of output unread."""
    return TooLarge(
        f"the client has not read {unread_bytes} bytes of output; the limit is {MAX_UNREAD_BYTES}",
        advice="Read the output as it arrives.",
    )


class StepWriter:
    """Collects the writes of a step of the event loop. Each client gets them in order."""

    def __init__(self) -> None:
        self.pending: dict[asyncio.Transport, list[bytes]] = {}
        """What is collected, by client. Token writers add to the same dict, so it is never replaced."""

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """Writes data to a client when this step ends, or with the next ``flush``."""
        if not self.pending:
            self.wake()
        self.pending.setdefault(transport, []).append(data)

    def wake(self) -> None:
        """Schedules a flush for the end of this step. To be called before the first write of a step."""
        asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Writes everything collected at once. Output of departed clients is dropped."""
        pending = list(self.pending.items())
        self.pending.clear()
        for transport, data in pending:
            if not transport.is_closing():  # Otherwise aiohttp cancels the handler.
                transport.write(b"".join(data))


class JsonResponse(WrittenResponse):
    """A whole response of JSON. aiohttp takes three times as long to write one."""

    def __init__(self, request: web.Request, body: bytes, headers: Mapping[str, str]) -> None:
        """Writes it, unless the client has left.

        Args:
            request: The request.
            body: The body.
            headers: Headers besides the type and length of the body.

        Raises:
            ValueError: one has a line break, and so would begin another one.
        """
        super().__init__()
        self._keeps_connection = request.keep_alive
        _check_lines(headers)
        transport = request.protocol.transport
        if transport is not None and not transport.is_closing():  # Otherwise aiohttp cancels the handler.
            named = {**headers, "Content-Type": _JSON_TYPE, "Content-Length": str(len(body))}
            head = _head("200 OK", named, request.version >= HttpVersion11, self._keeps_connection)
            transport.write(head + body)


class EventStream(WrittenResponse):
    """A response beginning with its first event, or other bytes. The handler ends it, and returns it to aiohttp."""

    def __init__(
        self,
        request: web.Request,
        writer: StepWriter,
        *,
        status: int = 200,
        reason: str = "OK",
        headers: Mapping[str, str] = _EVENT_HEADERS,
    ) -> None:
        """Creates it.

        Args:
            request: The request.
            writer: Writes the events.
            status: HTTP status of the response.
            reason: Its phrase.
            headers: Headers of the response. Without Content-Length it is sent in chunks.
        """
        _check_lines(headers)
        super().__init__(status=status, reason=reason, headers=headers)
        self._writer = writer
        self.begun = False
        """Whether the head of the response is written."""
        self._has_length = has_length = "Content-Length" in self.headers
        self._request = request
        self._protocol = protocol = request.protocol
        self._transport = protocol.transport
        self._is_new = request.version >= HttpVersion11
        self._chunked = self._is_new and not has_length
        # Without chunks and length, the end of the connection is the end of the body.
        self._keeps_connection = request.keep_alive and (self._chunked or has_length)

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Adds headers to the response, unless its head is written.

        Raises:
            ValueError: one has a line break, and so would begin another one.
        """
        _check_lines(headers)
        self.headers.update(headers)

    @property
    def is_events(self) -> bool:
        """Whether it is a stream of events without a fixed length."""
        named = self.headers
        return named.get("Content-Type", "").startswith(STREAM_TYPE) and "Content-Length" not in named

    @property
    def prepared(self) -> bool:
        """Whether the head of the response is written."""
        return self.begun

    @property
    def is_full(self) -> bool:
        """Whether the client leaves output unread. More should be kept until ``drain`` returns."""
        return self._protocol.writing_paused

    def write_event(self, data: bytes) -> None:
        """Writes an event with this data, which must not contain a line break."""
        self.write_bytes(event_of(data))

    def write_bytes(self, data: bytes) -> None:
        """Writes bytes of any kind."""
        if data:
            self._send(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def _send(self, text: bytes) -> None:
        if self._transport is None:
            return  # aiohttp cancels the handler.
        if not self.begun:
            self.begun = True
            status, keeps_connection, chunked = f"{self.status} {self.reason}", self._keeps_connection, self._chunked
            text = _head(status, self.headers, self._is_new, keeps_connection, chunked) + text
        if not self._has_length:
            self._writer.write(self._transport, text)
        elif not self._transport.is_closing():
            self._transport.write(text)

    def token_writer(self, before: bytes, after: bytes) -> TokenWriter:
        """Returns a writer of events that differ only in a token.

        Args:
            before: The data before the token, without a line break.
            after: The data after it.

        Raises:
            RuntimeError: the response has not begun.
        """
        if not self.begun or self._transport is None:
            raise RuntimeError("expected a response that has begun: events of a token writer follow its head")
        return TokenWriter(
            self._writer.pending,
            self._writer.wake,
            self._transport,
            self._protocol,
            _BEFORE_DATA + before,
            after + _AFTER_DATA,
            are_chunks=self._chunked,
        )

    def chunk_writer(self) -> ChunkWriter | None:
        """Returns a writer of chunks that are framed already; None if the response has not begun, or has no chunks."""
        if not (self.begun and self._chunked) or self._transport is None:
            return None
        return ChunkWriter(self._writer.pending, self._transport, self._protocol)

    def end(self, *, close: bool = False) -> None:
        """Ends the response; with ``close`` also the connection, once the client has read the rest."""
        self._keeps_connection = self._keeps_connection and not close
        if self._chunked or not self.begun:
            self._send(_END_OF_BODY if self._chunked else b"")
        if self._writer.pending and not self._has_length:
            self._writer.flush()  # What follows on this connection is written by aiohttp.

    async def drain(self) -> None:
        """Returns when the client has read most of the response so far.

        Raises:
            ConnectionError: it disconnected.
        """
        await self._request.writer.drain()


def _check_lines(headers: Mapping[str, str]) -> None:
    values = "".join(headers.values())
    if "\r" in values or "\n" in values:
        raise ValueError("expected headers without line breaks")


def _head(
    status: str, headers: Mapping[str, str], is_new: bool, keeps_connection: bool, chunked: bool = False
) -> bytes:
    """Returns the head of a response, of HTTP/1.1 if ``is_new``."""
    lines = [f"HTTP/1.{is_new:d} {status}", *map(": ".join, headers.items()), _date(int(time.time()))]
    if chunked:
        lines.append("Transfer-Encoding: chunked")
    if not keeps_connection or not is_new:
        lines.append(f"Connection: {'keep-alive' if keeps_connection else 'close'}")
    lines += "", ""
    return encoded_head("\r\n".join(lines))


def encoded_head(head: str) -> bytes:
    """Returns a head as it is sent. Bytes of headers that are not UTF-8, which cannot be sent, are replaced."""
    try:
        return head.encode()
    except UnicodeEncodeError:
        return head.encode("utf-8", "surrogateescape").decode("utf-8", "replace").encode()


@lru_cache(maxsize=1)
def _date(unix_seconds: int) -> str:
    return f"Date: {formatdate(unix_seconds, usegmt=True)}"
