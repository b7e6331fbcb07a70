"""One request to an engine and its response, on a connection of HTTP/1.1.

The body of a response is taken as it arrives; more than some 256 KiB that nobody takes stay in the socket.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias, cast

import httptools
from kvrouter.engines.openai_server import os_error_words
from kvrouter.frontend.edge.event_stream import EventStream
from kvrouter.frontend.proxy.engine_origin import Origin
from kvrouter.net.budgets import LoopBudget, loop_budget
from kvrouter.v1.errors import DeadlineExceeded, DependencyAway
from msgspec import Struct
from multidict import CIMultiDict

_MAX_HEAD_BYTES = 64 << 10
_MAX_UNREAD_BYTES = 256 << 10
"""Bytes of a body that wait to be taken. No more are read meanwhile."""
_PART_US = 60
"""CPU time to pass a part of a response on, microseconds."""
_CHUNKS_US = 30
"""CPU time to pass chunks on as they are, microseconds."""
_BYTES_PER_US = 50
_TIMER_SECONDS = 0.001
"""Resolution of timers: those of uvloop count whole milliseconds."""
_END_OF_EVENTS = b"\n\n"
_END_OF_CHUNK = b"\r\n"
_FIRST_FINAL = 200
_NO_BODY = frozenset({204, 304})


Offer: TypeAlias = Callable[[bytes], bool]
"""Takes chunks as the engine framed them. Returns False if the parser must get them."""


class EngineFailed(Exception):
    """An engine failed a request it had received: it broke the connection, or answered with an error."""


class EngineAnswer(Struct, eq=False):
    """The response of an engine: its head, and its body in parts."""

    status: int
    reason: str
    """The phrase of the status."""
    headers: CIMultiDict[str]
    unread: list[bytes]
    """Parts of the body that were not taken yet. The connection appends to them."""
    connection: EngineConnection
    """The connection on which it arrives."""
    _budget: LoopBudget
    """The work that the event loop does at a time."""
    is_read: bool = False
    """Whether the body was taken to its end."""
    _unread_bytes: int = 0
    """Size of the reads with these parts, bytes. It includes the framing of chunks."""
    _is_complete: bool = False
    _error: Exception | None = None
    _waiting: asyncio.Future[None] | None = None
    _pass: Callable[[bytes], Offer | None] | None = None
    """Passes on a part in the step in which it arrives."""
    _client: EventStream | None = None

    def __repr__(self) -> str:
        """Returns the status only, without the body."""
        return f"EngineAnswer({self.status})"

    @property
    def content_type(self) -> str:
        """The media type, in lower case and without parameters; empty if there is none."""
        return _media_type(self.headers.get("Content-Type", ""))

    async def part(self) -> bytes:
        """Returns the next bytes of the body, in their turn on the event loop; empty at its end.

        Raises:
            EngineFailed: the connection broke.
            DependencyAway: the body is not HTTP.
            DeadlineExceeded: the time is over.
        """
        while not self.unread:
            if self._error is not None:
                raise self._error
            if self._is_complete:
                return b""
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if self._unread_bytes > _MAX_UNREAD_BYTES:
            self.connection.read_on()
        cost_us = _PART_US + self._unread_bytes // _BYTES_PER_US
        part = self._taken()
        if not self._budget.take(cost_us):
            await self._budget.turn(cost_us)
        return part

    async def read(self, most: int) -> bytes:
        """Returns the body, or its first ``most`` bytes. Raises as ``part``."""
        body = bytearray()
        while len(body) < most and (part := await self.part()):
            body += part
        return bytes(body[:most])

    async def pass_on(self, take: Callable[[bytes], Offer | None], client: EventStream | None) -> None:
        """Passes on the parts of the body until its end, each in the step in which it arrives while the client reads.

        Args:
            take: Takes a part. May return an offer for the chunks after it, if it ends with a whole event.
            client: The client; None for one that always reads.

        Raises:
            EngineFailed, DependencyAway, DeadlineExceeded: as for ``part``.
            Exception: raised by ``take``, or by ``drain`` of the client.
        """
        while part := await self.part():
            take(part)
            if client is not None and client.is_full:
                await client.drain()
            self._pass, self._client = take, client

    def arrived(self, size: int, spent_us: int = 0) -> bool:
        """Takes the parts that a read added. Passes them on at once if ``pass_on`` waits for them.

        Returns False if too much is unread.

        Args:
            size: Size of the read, bytes.
            spent_us: What was taken of the budget for it already, microseconds.
        """
        self._unread_bytes = unread_bytes = self._unread_bytes + size
        waiting, client = self._waiting, self._client
        if waiting is None or not self.unread or waiting.done():
            return not self.unread or unread_bytes <= _MAX_UNREAD_BYTES
        is_full = client is not None and client.is_full
        cost_us = _PART_US + unread_bytes // _BYTES_PER_US - spent_us
        if self._pass is None or is_full or not self._budget.take(cost_us):
            waiting.set_result(None)  # A task must take them.
            return unread_bytes <= _MAX_UNREAD_BYTES
        part = self._taken()
        try:
            offer = self._pass(part)
        except Exception as error:
            if not waiting.done():
                waiting.set_exception(error)
        else:
            if offer is not None and part.endswith(_END_OF_EVENTS):
                self.connection.offer_chunks(offer)
        return True

    def _taken(self) -> bytes:
        """Returns what is unread, which is taken then."""
        part = b"".join(self.unread)  # A single part is not copied.
        self.unread.clear()
        self._unread_bytes = 0
        self.is_read = self._is_complete
        return part

    def end(self, error: Exception | None = None) -> None:
        """Takes the end of the body, or the error that ended it."""
        self.unread = self.unread.copy()  # What follows on the connection is not of this body.
        self._is_complete = error is None
        self.is_read = error is None and not self.unread
        self._error = error
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


@lru_cache(256)
def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


class EngineConnection(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self, server: Origin) -> None:
        """Creates a connection to a server."""
        self.server = server
        self.idle_since = 0.0
        """When it became idle, seconds of the loop's clock."""
        self._loop = asyncio.get_running_loop()
        self._budget = loop_budget()
        self._body: list[bytes] = []
        """Parts of the body that were not taken yet."""
        self.on_body = self._body.append
        """Takes a part of the body."""
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[EngineAnswer] | None = None
        """Done when the head of the response has arrived; None while the connection is idle."""
        self._answer: EngineAnswer | None = None
        self._late_at: float | None = None
        """Deadline of the response, seconds of the loop's clock; None for none."""
        self._timer: asyncio.TimerHandle | None = None
        """Calls ``_check_time``. It stays set between exchanges: a timer for each costs more than a call in vain."""
        self._checks_at = math.inf
        """When the timer is due, seconds of the loop's clock. The timer itself rounds that."""
        self._reason = b""
        self._headers: CIMultiDict[str] = CIMultiDict()
        self._head_bytes = 0
        self._is_interim = False
        self._ends_with_connection = False
        self._is_complete = False
        self._keeps_connection = False
        """Whether the engine keeps the connection after this response."""
        self._is_paused = False
        self._is_between_chunks = False
        """Whether the latest read of the body ended with a chunk.

        The parser says that a chunk begins when it has the whole line with the size, not when that line begins.
        """
        self._offer: Offer | None = None
        """Is offered each read before the parser; None while the parser must get it."""

    @property
    def is_open(self) -> bool:
        """Whether it can serve a request."""
        return self._transport is not None and not self._transport.is_closing()

    def exchange(self, head: bytes, body: bytes, seconds: float | None) -> asyncio.Future[EngineAnswer]:
        """Sends a request and returns the future response, done when its head has arrived. ``end`` must follow.

        Args:
            head: The head of the request.
            body: Its body.
            seconds: Time until the end of the response; None for any.

        Otherwise it fails with EngineFailed (the connection ended), DependencyAway (the response is not HTTP) or
        DeadlineExceeded.
        """
        self._answered = answered = self._loop.create_future()
        self._answer, self._head_bytes, self._is_complete, self._ends_with_connection = None, 0, False, False
        self._is_between_chunks = False
        if self._transport is None:
            self._fail(EngineFailed("its OpenAI API broke the connection: closed without a response"))
            return answered
        self._transport.writelines((head, body))
        if seconds is not None:
            self._late_at = late_at = self._loop.time() + seconds
            if self._checks_at > late_at:
                self._check_time()
        return answered

    def holds(self, answer: EngineAnswer) -> bool:
        """Returns whether a response belongs to the exchange that is under way."""
        return self._answer is answer

    def end(self) -> bool:
        """Ends the exchange. Returns whether the connection can serve another request; otherwise it is closed."""
        self._answered = self._answer = self._offer = None
        self._body.clear()
        self._late_at = None
        if self._is_complete and self._keeps_connection and self._transport is not None:
            if self._is_paused:
                self.read_on()
            self.idle_since = self._loop.time()
            return True
        self.close()
        return False

    def close(self) -> None:
        """Closes the connection."""
        if self._transport is not None:
            self._transport.abort()

    def read_on(self) -> None:
        """Reads on after a body of which too much was unread has been taken."""
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    def offer_chunks(self, offer: Offer) -> None:
        """Offers the following chunks until one is not taken, if the parser is between two chunks."""
        if self._is_between_chunks:
            self._offer = offer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Takes bytes of the response."""
        if self._answered is None or self._is_complete:
            self.close()  # Nobody has asked.
            return
        spent_us = 0
        if self._offer is not None:
            cost_us = _CHUNKS_US + len(data) // _BYTES_PER_US
            if self._budget.take(cost_us):
                if self._offer(data):
                    return
                spent_us = cost_us
            self._offer = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, UnicodeDecodeError) as error:
            self._fail(DependencyAway(f"its OpenAI API does not answer: {error}"))
        if not data.endswith(_END_OF_CHUNK):
            self._is_between_chunks = False
        if self._answer is None:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._fail(DependencyAway(f"its OpenAI API sends headers of more than {_MAX_HEAD_BYTES} bytes"))
        elif not self._answer.arrived(len(data), spent_us) and self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Takes the end of the connection, and why it broke."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        if self._answered is None or self._is_complete:
            return
        if self._answer is not None and self._ends_with_connection and exc is None:
            self.on_message_complete()
            return
        within = "closed without a response" if self._answer is None else "closed within a response"
        cause = os_error_words(exc) if isinstance(exc, OSError) else within
        self._fail(EngineFailed(f"its OpenAI API broke the connection: {cause}"))

    def on_message_begin(self) -> None:
        """Takes the beginning of a response. Nobody has asked for a second one."""
        if self._is_complete:
            self._keeps_connection = False

    def on_status(self, status: bytes) -> None:
        """Takes the phrase of a status."""
        self._reason = status

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header, or a trailer, which nobody gets."""
        if self._answer is None:
            self._headers.add(name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))

    def on_headers_complete(self) -> None:
        """Takes the end of the head."""
        status, headers = self._parser.get_status_code(), self._headers
        self._headers = CIMultiDict()
        self._is_interim = status < _FIRST_FINAL
        if self._is_interim or self._is_complete or self._answered is None or self._answered.done():
            return
        is_sized = "Content-Length" in headers or "Transfer-Encoding" in headers or status in _NO_BODY
        self._ends_with_connection = not is_sized
        reason = self._reason.decode("utf-8", "replace")
        self._answer = EngineAnswer(status, reason, headers, self._body, self, self._budget)
        self._reason = b""
        self._answered.set_result(self._answer)

    def on_chunk_header(self) -> None:
        """Takes the beginning of a chunk."""
        self._is_between_chunks = False

    def on_chunk_complete(self) -> None:
        """Takes the end of a chunk."""
        self._is_between_chunks = True

    def on_message_complete(self) -> None:
        """Takes the end of the body."""
        if self._answer is not None and not (self._is_interim or self._is_complete):
            self._is_complete, self._keeps_connection = True, self._parser.should_keep_alive()
            self._answer.end()

    def _fail(self, error: Exception) -> None:
        """Ends the exchange with an error."""
        if self._answer is not None:
            if not self._is_complete:
                self._answer.end(error)
        elif self._answered is not None and not self._answered.done():
            self._answered.set_exception(error)
        self._is_complete = False
        self.close()

    def _check_time(self) -> None:
        """Fails the exchange if its deadline has passed, and otherwise sets the timer to it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._checks_at = math.inf
        if self._late_at is None:
            return
        left = self._late_at - self._loop.time()
        if left < _TIMER_SECONDS:  # A timer for less would be due at once, again and again.
            self._fail(late())
            return
        self._timer = self._loop.call_later(left, self._check_time)
        self._checks_at = self._late_at


def late() -> DeadlineExceeded:
    """Returns the error of an engine that takes too long."""
    return DeadlineExceeded("its OpenAI API has not answered in time")
