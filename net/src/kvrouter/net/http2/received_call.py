"""One gRPC call at its server. Does no I/O."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Final, Never

import grpc
import grpc.aio
import hpack
from kvrouter.core import PassedStream
from kvrouter.net.http2.compression import COMPRESSIONS, NOT_DECOMPRESSED, decompressed
from kvrouter.net.http2.frames import END_HEADERS, END_STREAM, LEAST_MAX_FRAME_BYTES, Kind, frame, window_update
from kvrouter.net.http2.metadata import AnyMetadata, encoded_status, metadata_of
from kvrouter.net.http2.options import MAX_MESSAGE_BYTES
from kvrouter.net.http2.side import Compressed, Http2Violation, MessageReader, MessageTooLong, prefix, widened

if TYPE_CHECKING:
    from kvrouter.net.http2.received_calls import ReceivedCalls

WINDOW_BYTES: Final = 256 << 10
"""Bytes a client may send on a call before they are read, unless the handler waits for the rest of a message."""
_WIDE_WINDOW_BYTES: Final = 1 << 20
"""The same of a call whose messages are processed as they arrive: a prompt of 128k tokens waits for no update."""
MESSAGE_BYTES: Final = 64
"""Memory of a message besides its content."""
MAX_RECEIVED_BYTES: Final = 256 << 20
"""Bytes of messages a server holds until their handlers read them. Beyond it, a call that receives more fails."""
_ITEMS_OF_FIRST_MESSAGE: Final = 256
"""Flood items that the first message of a call restores: about those of its headers, window updates and end."""
ITEMS_OF_MESSAGE: Final = 4
"""The same of further messages: each may have a read, a frame and two window updates of its own."""
_BEGINNING: Final = hpack.Encoder().encode(
    [
        hpack.NeverIndexedHeaderTuple(":status", "200"),
        hpack.NeverIndexedHeaderTuple("content-type", "application/grpc"),
        hpack.NeverIndexedHeaderTuple("grpc-accept-encoding", "identity,deflate,gzip"),
    ],
    huffman=False,  # Clients of this package decode Huffman codes slowly.
)
_MAX_DELIVERED_BYTES: Final = 1 << 20
"""Maximum size of a message decompressed on the event loop."""
_TIMEOUT: Final = re.compile(rb"(\d{1,8})([HMSmun])")
_UNIT_SECONDS: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


def _ignore() -> None:
    pass


class Received:
    """Counts the bytes of unread messages on all connections of a server."""

    def __init__(self) -> None:
        self.bytes = 0


class ReceivedCall:
    """One call, as its handler sees it. Implements a part of grpc.aio.ServicerContext."""

    __slots__ = (
        "_code",
        "_count_pieces",
        "_counted",
        "_deadline",
        "_details",
        "_half_closed",
        "_has_begun",
        "_has_message",
        "_header_items",
        "_messages",
        "_metadata",
        "_next_message",
        "_on_half_closed",
        "_on_message",
        "_reader",
        "_room",
        "_stream",
        "_timer",
        "_trailing",
        "_unallowed",
        "_waiter",
        "_window_bytes",
        "connection",
        "headers",
        "is_over",
        "is_served",
        "number",
        "on_cancelled",
        "parse",
        "path",
        "restored",
        "serialize",
        "unsent",
        "window",
    )

    def __init__(self, connection: ReceivedCalls, number: int, headers: dict[bytes, bytes], window: int) -> None:
        """``window``: bytes the client accepts at first."""
        self.connection = connection
        """The calls of its connection."""
        self.number = number
        self.headers = headers
        self.path = headers.get(b":path", b"").decode("ascii", "replace")
        self.parse: Callable[[bytes], Any] | None = None
        """Parses messages; None passes them as bytes."""
        self.serialize: Callable[[Any], bytes] | None = None
        self.on_cancelled: Callable[[], object] = lambda: None
        """Called when the client leaves the call."""
        self.is_over = False
        """Whether the call has ended, so that nothing is read or written any more."""
        self.is_served = False
        """Whether its handler has begun."""
        self.unsent: bytes | memoryview = b""
        """Data that waits for the client's windows, or for the socket."""
        self.window = window
        """Bytes the client accepts."""
        self._messages: deque[bytes] = deque()
        may_compress = headers.get(b"grpc-encoding") in COMPRESSIONS
        self._reader = MessageReader(MAX_MESSAGE_BYTES, may_compress=may_compress)
        self._metadata: AnyMetadata | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._window_bytes = WINDOW_BYTES
        self._unallowed = 0
        """Bytes received, or added to the window, since the client was last allowed more."""
        self._counted = 0
        """Its part of ``connection.received``: messages that are not read, and the one that has begun."""
        self._stream: PassedStream | None = None
        """Answers pieces in the place of the handler."""
        self._count_pieces: Callable[[], None] = _ignore
        self._on_message: Callable[[bytes], None] | None = None
        self._on_half_closed: Callable[[], None] = _ignore
        self._next_message: Callable[[], bytes | None] = _nothing
        self._has_message = False
        self._header_items = connection.header_items
        """Flood items the headers took."""
        self.restored = 0
        """Flood items that its messages restore, until its connection has counted them."""
        self._half_closed = False
        self._has_begun = False
        self._code = grpc.StatusCode.OK
        self._details = ""
        self._trailing: AnyMetadata = ()
        self._deadline: float | None = None
        """When the client gives up, by the loop's clock; None for never."""
        self._timer: asyncio.TimerHandle | None = None
        if timeout := _TIMEOUT.fullmatch(headers.get(b"grpc-timeout", b"")):
            self._deadline = connection.loop.time() + int(timeout[1]) * _UNIT_SECONDS[timeout[2]]
            self._timer = connection.loop.call_at(self._deadline, self._expire)

    @property
    def is_ready(self) -> bool:
        """Whether ``read`` returns a message at once."""
        return bool(self._messages) and not isinstance(self._messages[0], Compressed)

    async def read(self) -> Any:
        """Returns the next message; grpc.aio.EOF if the client sends no more."""
        assert self._waiter is None, "one task reads a call"  # noqa: S101
        while not self._messages:
            if self._half_closed:
                return grpc.aio.EOF
            self._waiter = self.connection.loop.create_future()
            self._allow()
            self._pass_pieces()
            try:
                await self._waiter
            finally:
                self._waiter = None
                self.settle()
        message = self._messages.popleft()
        self._count(-len(message) - MESSAGE_BYTES)
        self._allow()
        if isinstance(message, Compressed):
            message = await self._decompressed(message)
        return message if self.parse is None else self.parse(message)

    def answer_pieces(self, stream: PassedStream | None, count: Callable[[], None] = _ignore) -> None:
        """Answers the pieces of a stream in the step that reads them, while ``read`` waits for other messages.

        Args:
            stream: Answers them; None to read all further messages.
            count: Called when it is due, to take what it has taken. It must not block, and raise nothing.
        """
        self.settle()
        self._stream, self._count_pieces = stream, count

    def settle(self) -> None:
        """Counts the bytes of the answered pieces, and leaves further ones to ``read``."""
        stream = self.connection.streams.pop(self.number, None)
        if stream is not None:
            received, sent = stream.moved()
            self._unallowed += received
            self.window -= sent

    def widen(self, more: int) -> None:
        """Adds to the bytes the client accepts; ``more`` may be negative.

        Raises:
            Http2Violation: they become too many.
        """
        is_passing = self.number in self.connection.streams
        self.settle()
        self.window = widened(self.window, more)
        if is_passing:
            self._pass_pieces()

    def go_on(self) -> None:
        """Takes what its stream, which is due, has taken, and answers further pieces."""
        self.settle()
        self._count_pieces()
        self._allow()
        self._pass_pieces()

    def _pass_pieces(self) -> None:
        is_ready = self._has_begun and not (self.unsent or self._reader.begun or self.is_over)
        if self._stream is not None and is_ready:
            self._stream.begin(self._window_bytes // 2 - self._unallowed, self.window)
            self.connection.streams[self.number] = self._stream

    def limit(self, max_message_bytes: int) -> None:
        """Limits the size of further messages."""
        self._reader.max_bytes = max_message_bytes

    async def _decompressed(self, message: bytes) -> bytes:
        try:
            return await asyncio.to_thread(decompressed, message, self._reader.max_bytes)
        except NOT_DECOMPRESSED as error:
            self._fail_decompressing(error)
            raise asyncio.CancelledError from None  # As for a call that its client has left.

    def _fail_decompressing(self, error: Exception) -> None:
        is_long = isinstance(error, MessageTooLong)
        self._fail(grpc.StatusCode.RESOURCE_EXHAUSTED if is_long else grpc.StatusCode.INTERNAL, str(error))

    def _deliver(self, message: bytes, on_message: Callable[[bytes], None]) -> None:
        if self.is_over:
            return
        if isinstance(message, Compressed):
            try:
                message = decompressed(message, _MAX_DELIVERED_BYTES)
            except NOT_DECOMPRESSED as error:
                self._fail_decompressing(error)
                return
        on_message(message)

    def start(
        self,
        on_message: Callable[[bytes], None],
        on_half_closed: Callable[[], None],
        next_message: Callable[[], bytes | None],
    ) -> None:
        """Exchanges all further messages by functions in the place of ``read`` and ``write``.

        They are called from the event loop. They must not block, and raise nothing.

        Args:
            on_message: Called with each message of the client.
            on_half_closed: Called when the client sends no more.
            next_message: Returns the next message to send, when there is room for one; None if none waits. Call
                ``wake`` when there may be one again.
        """
        self._on_message, self._on_half_closed, self._next_message = on_message, on_half_closed, next_message
        self._unallowed += _WIDE_WINDOW_BYTES - self._window_bytes
        self._window_bytes = _WIDE_WINDOW_BYTES
        # Not the arguments: a message may make its receiver call ``stop``.
        while self._messages:
            message = self._messages.popleft()
            self._count(-len(message) - MESSAGE_BYTES)
            self._deliver(message, self._on_message)
        if self._half_closed:
            self._on_half_closed()
        self._allow()
        self.wake()

    def stop(self) -> None:
        """Drops all further messages, of the client and of ``next_message``."""
        self._on_message, self._on_half_closed, self._next_message = _drop, _ignore, _nothing

    def wake(self) -> None:
        """Sends the messages of ``next_message`` with the connection's next write."""
        self.connection.pulling[self] = None
        self.connection.wake()

    def pull(self) -> None:
        """Sends messages while there is room."""
        while not (self.unsent or self.is_over) and (message := self._next_message()) is not None:
            self.unsent = prefix(len(message)) + message
            if not self._has_begun:
                self._begin()
            self.connection.send(self)

    async def requests(self) -> AsyncIterator[Any]:
        """Yields the messages."""
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def write(self, message: Any) -> None:
        """Sends a message, and waits until the connection has room for it."""
        encoded = message if self.serialize is None else self.serialize(message)
        if self.is_over:
            return
        # What a cancelled write has left goes first.
        self.unsent = b"".join((self.unsent, prefix(len(encoded)), encoded))
        if not self._has_begun:
            self._begin()
        self.connection.send(self)
        self.connection.wake()
        while self.unsent and not self.is_over:
            self._room = self.connection.loop.create_future()
            try:
                await self._room
            finally:
                self._room = None

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: AnyMetadata = ()) -> Never:
        """Ends the handler, and the call with a status."""
        self._code, self._details, self._trailing = code, details, trailing_metadata
        raise grpc.aio.AbortError

    def set_code(self, code: grpc.StatusCode) -> None:
        """Sets the code of the status."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Sets the message of the status."""
        self._details = details

    def set_trailing_metadata(self, trailing_metadata: AnyMetadata) -> None:
        """Sets the metadata sent with the status."""
        self._trailing = trailing_metadata

    def invocation_metadata(self) -> AnyMetadata:
        """Returns the client's metadata. The values of an entry that it sent several times are joined with commas."""
        if self._metadata is None:
            self._metadata = metadata_of(self.headers)
        return self._metadata

    def time_remaining(self) -> float | None:
        """Returns the seconds until the client gives up; None if it never does."""
        return None if self._deadline is None else max(0.0, self._deadline - self.connection.loop.time())

    def finish(self) -> None:
        """Sends the status."""
        if self.is_over:
            return
        connection = self.connection
        connection.drop(self)
        connection.append(frame(Kind.HEADERS, self._status(), flags=END_HEADERS | END_STREAM, stream=self.number))
        if not self._half_closed:
            connection.append(frame(Kind.RST_STREAM, bytes(4), stream=self.number))

    def _status(self) -> bytes:
        encoded = encoded_status(self._code, self._details, self._trailing)
        return encoded if self._has_begun else _BEGINNING + encoded

    def take(self, payload: bytes, length: int, *, ends: bool) -> None:
        """Takes data of the client; ``length`` is its size with padding.

        Raises:
            Http2Violation: it is more than the client may send.
        """
        if self._stream is not None:
            self.settle()
        if self._half_closed or self._unallowed + length > self._window_bytes:
            raise Http2Violation("received data after the end of a call, or more than its window")
        self._unallowed += length
        reader = self._reader
        begun_bytes = len(reader.begun)
        self._half_closed = ends
        refused: Http2Violation | None = None
        try:
            reader.take(payload, self._queue)
        except Http2Violation as violation:
            refused = violation
        if self.is_over:
            return  # A message could not be decompressed.
        if len(reader.begun) != begun_bytes:
            self._count(len(reader.begun) - begun_bytes)
        if refused is not None:
            is_long = isinstance(refused, MessageTooLong)
            code = grpc.StatusCode.RESOURCE_EXHAUSTED if is_long else grpc.StatusCode.UNIMPLEMENTED
            self._fail(code, str(refused))
        elif self.connection.received.bytes > MAX_RECEIVED_BYTES:
            self._fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "the server holds too many messages")
        else:
            self._taken(ends=ends)

    def _taken(self, *, ends: bool = False) -> None:
        """Allows the client more, or wakes the reader, after messages were taken."""
        if self._on_message is not None:
            self._allow()
            if ends:
                self._on_half_closed()
        elif self._waiter is not None:
            if (self._messages or ends) and not self._waiter.done():
                self._waiter.set_result(None)
            else:
                self._allow()

    def take_messages(self, messages: list[bytes], length: int) -> int | None:
        """Takes the messages of ``length`` bytes of data that has nothing else.

        Returns:
            The flood items that they restore; None if ``take`` must take the data.
        """
        if self._stream is not None:
            self.settle()
        reader = self._reader
        if (
            self._half_closed
            or reader.begun
            or reader.max_bytes < LEAST_MAX_FRAME_BYTES
            or self._unallowed + length > self._window_bytes
            or self.connection.received.bytes + length + len(messages) * MESSAGE_BYTES > MAX_RECEIVED_BYTES
        ):
            return None
        self._unallowed += length
        for message in messages:
            self._queue(message)
        if not self.is_over:
            self._taken()
        restored, self.restored = self.restored, 0
        return restored

    def _fail(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details
        self.finish()
        self.on_cancelled()

    def _expire(self) -> None:
        self._fail(grpc.StatusCode.DEADLINE_EXCEEDED, "the time of the call is over")

    def cancelled(self) -> None:
        """Ends the call because the client left it, or the connection is lost."""
        self.connection.drop(self)
        self.on_cancelled()

    def closed(self) -> None:
        """Forgets the unread messages."""
        self.is_over = True
        self.settle()
        if self._timer is not None:
            self._timer.cancel()
        self._count(-self._counted)
        self._messages.clear()
        self._reader = MessageReader(MAX_MESSAGE_BYTES)
        self.unsent = b""
        self.written()

    def written(self) -> None:
        """Wakes the writer: nothing is unsent any more."""
        if self._on_message is not None:
            self.wake()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _queue(self, message: bytes) -> None:
        if self.is_over:
            return
        self.restored += ITEMS_OF_MESSAGE if self._has_message else _ITEMS_OF_FIRST_MESSAGE + self._header_items
        self._has_message = True
        if self._on_message is not None:
            self._deliver(message, self._on_message)
            return
        self._messages.append(message)
        self._count(len(message) + MESSAGE_BYTES)

    def _count(self, size: int) -> None:
        self._counted += size
        self.connection.received.bytes += size

    def _allow(self) -> None:
        if self._unallowed > self._window_bytes // 2 and not (self._half_closed or self.is_over):
            self.connection.append(window_update(self.number, self._unallowed))
            self._unallowed = 0

    def _begin(self) -> None:
        self._has_begun = True
        self.connection.append(frame(Kind.HEADERS, _BEGINNING, flags=END_HEADERS, stream=self.number))


def _drop(_message: bytes) -> None:
    pass


def _nothing() -> None:
    return None
