"""The frames of either side of an HTTP/2 connection with gRPC calls, without I/O.

Sources: RFC 9113 (HTTP/2), RFC 7541 (HPACK, by the library hpack) and gRPC's "gRPC over HTTP2". Only the parts calls
need are here: messages not compressed, no priorities, no push.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import hpack
from kvrouter.core import PassedStream, read_messages
from kvrouter.net.budgets import FloodBudget
from kvrouter.net.http2.frames import (
    ACK,
    DATA,
    END_HEADERS,
    HEADER_BYTES,
    INITIAL_WINDOW_BYTES,
    KIND_AT,
    LEAST_MAX_FRAME_BYTES,
    MAX_31_BITS,
    MOST_MAX_FRAME_BYTES,
    PADDED,
    PRIORITY,
    WINDOW_UPDATE,
    Kind,
    Setting,
    frame,
    frame_header,
    read_frame_header,
    read_settings,
)

CONNECTION_WINDOW_BYTES: Final = 4 << 20
"""Bytes a peer may send before they are read. They are read at once, so this covers what is on its way."""
MAX_HEADER_BYTES: Final = 16 << 10
"""Size of a header block, encoded and decoded, as gRPC limits it."""
_MOST_KNOWN_BLOCKS: Final = 8
_MAX_REPLY_BYTES: Final = 64 << 10
"""Size of unsent answers to settings and pings at which the peer is flooding."""
_FLOOD_ITEMS: Final = 1_000
_FLOOD_SECONDS: Final = 10.0
"""Frames without a message a peer may send in this time. They take some 20 ms of a core to read."""
ITEMS_OF_SENT_FRAME: Final = 4
"""Flood items that sent data restore, for the answers of a peer: window updates of stream and connection, a measuring
ping, settings."""
_HEADER_ITEM_BYTES: Final = 16
"""Bytes of a header block per item of a flood: HPACK takes about 1 µs a byte."""
_FRAME_ITEM_BYTES: Final = 64
"""The same for other frames without a message."""
LEAST_USEFUL_BYTES: Final = 256
"""Frames with data, and reads, below this size count as items of a flood, unless they complete a message."""
_PREFIX: Final = struct.Struct(">BI")
"""Prefix of a gRPC message: compression and length."""
_PREFIX_BYTES: Final = _PREFIX.size

_OF_CONNECTION: Final = frozenset({Kind.SETTINGS, Kind.PING, Kind.GOAWAY})
"""Kinds of frames outside of streams."""
_OF_STREAMS: Final = frozenset({Kind.HEADERS, Kind.PRIORITY, Kind.RST_STREAM, Kind.PUSH_PROMISE, Kind.CONTINUATION})
_SIZES: Final[Mapping[int, int]] = {Kind.PRIORITY: 5, Kind.RST_STREAM: 4, Kind.PING: 8, Kind.WINDOW_UPDATE: 4}


class Http2Violation(Exception):
    """The peer broke a rule of HTTP/2 or of gRPC."""

    reason = "http2"
    """Label for metrics."""


class MessageTooLong(Http2Violation):
    """A message of the peer is longer than is accepted."""

    reason = "too_long"


class Flood(Http2Violation):
    """The peer floods with frames without a message."""

    reason = "flood"

    def __init__(self, cause: str = "the peer sends many frames that carry no message") -> None:
        super().__init__(cause)


class UnexpectedData(Http2Violation):
    """The peer sent data on a stream on which it may not."""

    def __init__(self, stream: int) -> None:
        super().__init__(f"received data on stream {stream}, where none was expected")


prefix: Final[Callable[[int], bytes]] = partial(_PREFIX.pack, 0)
"""Returns the bytes before a gRPC message of a length."""


class Compressed(bytes):
    """A compressed message."""


class MessageReader:
    """Splits the data of one call into messages."""

    __slots__ = ("_may_compress", "begun", "max_bytes")

    def __init__(self, max_bytes: int, *, may_compress: bool = False) -> None:
        """``max_bytes`` is the maximum size of a message as sent; ``may_compress``: it may be compressed."""
        self.begun = bytearray()
        """The message that has begun."""
        self.max_bytes = max_bytes
        """Maximum size of further messages."""
        self._may_compress = may_compress

    def take(self, payload: bytes, deliver: Callable[[bytes], None]) -> int:
        """Calls ``deliver`` with each message ending in further data. Returns their number.

        Raises:
            Http2Violation: a message is compressed, or too long.
        """
        begun = self.begun
        if begun:
            begun += payload
        data, position, messages = begun or payload, 0, 0
        while len(data) - position >= _PREFIX_BYTES:
            compressed, length = _PREFIX.unpack_from(data, position)
            if compressed and not self._may_compress:
                raise Http2Violation("received a compressed message in a call without a known compression")
            if length > self.max_bytes:
                raise MessageTooLong(f"expected messages of at most {self.max_bytes} bytes, received {length}")
            start = position + _PREFIX_BYTES
            if start + length > len(data):
                break
            position = start + length
            messages += 1
            message = payload[start:position] if data is payload else bytes(memoryview(data)[start:position])
            deliver(Compressed(message) if compressed else message)
        if begun:
            del begun[:position]
        elif position < len(data):
            begun += payload[position:]
        return messages


class Http2Side(ABC):
    """The frames of a connection, and its flow control. Subclasses know its calls."""

    def __init__(self) -> None:
        self.flood = FloodBudget(_FLOOD_ITEMS, _FLOOD_SECONDS)
        """Frames without a message the peer may still send."""
        self.wake: Callable[[], None] = lambda: None
        """Called when there may be bytes to write."""
        self.has_begun = True
        """Whether the peer has shown that it speaks HTTP/2."""
        self.is_over = False
        """Whether further frames are ignored."""
        self._decoder = hpack.Decoder(max_header_list_size=MAX_HEADER_BYTES)
        self._unread = b""
        """The first part of a frame."""
        self._headers: bytearray | None = None
        """The first part of a header block continued."""
        self.header_items = 0
        """Flood items of the latest header block."""
        self._known_blocks: dict[bytes, dict[bytes, bytes]] = {}
        """Blocks decoded since the table of HPACK changed: the calls of a client have equal ones."""
        self._headers_flags = 0
        self._headers_stream = 0
        self._max_frame = LEAST_MAX_FRAME_BYTES
        self._initial_window = INITIAL_WINDOW_BYTES
        """Bytes the peer accepts on a new stream."""
        self._connection_window = INITIAL_WINDOW_BYTES
        self._consumed = 0
        """Bytes read since the peer was last allowed more on the connection."""
        self.streams: dict[int, PassedStream] = {}
        """What answers the pieces of streams before their calls, by number."""
        self._replies: list[bytes | memoryview] = []
        """Frames to write."""
        self._answer_bytes = 0
        """Size of the answers to settings and pings among them."""

    def ping(self) -> None:
        """Requests an answer of the peer's HTTP/2 library."""
        self._replies.append(frame(Kind.PING, bytes(8)))

    def receive(self, data: bytes) -> None:
        """Processes bytes of the peer. Nearly all data are whole messages, which native calls read.

        Raises:
            Http2Violation: the peer broke a rule, or floods.
        """
        if not self.has_begun and not (data := self._take_preface(data)):
            return
        # Flood items of the read so far: frames with little data, less what messages restore.
        fruitless = int(len(data) < LEAST_USEFUL_BYTES)
        buffer = self._unread + data if self._unread else data
        position, end = 0, len(buffer)
        parsed = 0  # End of the messages that a native call has parsed, but the call could not take.
        while end - position >= HEADER_BYTES and not self.is_over:
            if position >= parsed and buffer[position + KIND_AT] == DATA and self._headers is None:
                if self.streams:
                    size, items = self._pass_pieces(buffer, position)
                    if size:
                        if not self.flood.spend(items + fruitless):
                            raise Flood
                        position, fruitless = position + size, 0
                        continue
                stream, messages, short_frames, payload_bytes, size = read_messages(
                    buffer, position, LEAST_USEFUL_BYTES
                )
                restored = self._take_messages(stream, messages, payload_bytes) if messages else None
                if restored is not None:
                    self._consumed += payload_bytes
                    # Fewer are restored than taken if the call ends with one of the messages.
                    if not self.flood.spend(short_frames + fruitless - restored):
                        raise Flood
                    position, fruitless = position + size, 0
                    continue
                parsed = position + size
            length, kind, flags, stream = read_frame_header(buffer, position)
            if length > LEAST_MAX_FRAME_BYTES:
                raise Http2Violation(f"expected frames of at most {LEAST_MAX_FRAME_BYTES} bytes, received {length}")
            start = position + HEADER_BYTES
            position = start + length
            if position > end:
                position = start - HEADER_BYTES
                break
            if kind == DATA:
                payload = buffer[start:position]
                if self._headers is not None:
                    raise UnexpectedData(stream)
                self._consumed += length
                if flags & PADDED:
                    payload = _unpadded(payload)
                fruitless += len(payload) < LEAST_USEFUL_BYTES
                fruitless -= self._take_data(stream, flags, payload, length)
                if fruitless and not self.flood.spend(fruitless):
                    raise Flood
                fruitless = 0
            elif kind == WINDOW_UPDATE and length == _SIZES[kind] and self._headers is None:
                # A peer sends several for each short message.
                if not self.flood.spend():
                    raise Flood
                self._take_window(stream, int.from_bytes(buffer[start:position], "big") & MAX_31_BITS)
            else:
                self._take_frame(kind, stream, flags, buffer[start:position])
        self._unread = buffer[position:]
        if fruitless and not self.flood.spend(fruitless):
            raise Flood
        if self._consumed > CONNECTION_WINDOW_BYTES // 2:
            self._allow(self._consumed)
            self._consumed = 0
            self.wake()

    def _send_data(self, stream: int, data: bytes | memoryview, most: int, last_flags: int = 0) -> int:
        """Adds data of a stream to the frames to write, at most some bytes and what the peer accepts on the connection.

        ``last_flags`` are the flags of the frame with its end. Returns the size of the added data.
        """
        end = min(len(data), most, self._connection_window)
        start = 0
        while start < end:
            size = min(end - start, self._max_frame)
            flags = last_flags if start + size == len(data) else 0
            self._replies += (frame_header(size, DATA, flags, stream), data[start : start + size])
            self._connection_window -= size
            self.flood.earn(ITEMS_OF_SENT_FRAME)
            start += size
        return start

    def _take_preface(self, data: bytes) -> bytes:
        """Takes the bytes before the first frame, and returns what follows them."""
        return data

    @abstractmethod
    def _allow(self, more: int) -> None:
        """Allows the peer to send more bytes on the connection."""

    @abstractmethod
    def _take_data(self, stream: int, flags: int, payload: bytes, length: int) -> int:
        """Takes data, ``length`` bytes with padding; returns the flood items that its messages restore."""

    @abstractmethod
    def _take_messages(self, stream: int, messages: list[bytes], length: int) -> int | None:
        """Takes the messages of ``length`` bytes of data that has only whole ones, each shorter than a frame.

        Returns:
            The flood items that they restore; None if they were not taken, so ``_take_data`` must take the data.
        """

    def _pass_pieces(self, buffer: bytes, position: int) -> tuple[int, int]:
        """Answers pieces of ``streams`` from a position on. Returns the size of their frames and their flood items."""
        raise NotImplementedError

    @abstractmethod
    def _check_opening(self, stream: int) -> None:
        """Checks that headers may come on a stream."""

    @abstractmethod
    def _take_headers(self, stream: int, flags: int, headers: dict[bytes, bytes]) -> None:
        """Takes whole headers."""

    @abstractmethod
    def _widen_stream(self, stream: int, more: int) -> None:
        """Adds to the window of a stream."""

    @abstractmethod
    def _widen(self, more: int) -> None:
        """Adds a change of the initial window to the windows of all streams."""

    @abstractmethod
    def _send_waiting(self) -> None:
        """Sends what waited for a window that is wider now."""

    @abstractmethod
    def _take_reset(self, stream: int, code: int) -> None:
        """Takes the end of a stream by the peer."""

    @abstractmethod
    def _take_goaway(self, payload: bytes) -> None:
        """Takes the peer's announcement that the connection will end."""

    def _take_window(self, stream: int, more: int) -> None:
        """Takes permission for more bytes on a stream, or on the connection (0)."""
        if not more:
            raise Http2Violation("received a window update of 0 bytes, which is not possible")
        if stream == 0:
            self._connection_window = widened(self._connection_window, more)
        else:
            self._widen_stream(stream, more)
        self._send_waiting()

    def _take_frame(self, kind: int, stream: int, flags: int, payload: bytes) -> None:
        if self._headers is not None and kind != Kind.CONTINUATION:
            raise Http2Violation("expected the rest of a header block, received another frame")
        if kind in (_OF_STREAMS if stream == 0 else _OF_CONNECTION):
            raise Http2Violation(f"received a frame of kind {kind} on stream {stream}, where none is defined")
        if kind in _SIZES and len(payload) != _SIZES[kind]:
            raise Http2Violation(f"expected {_SIZES[kind]} bytes in a frame of kind {kind}, received {len(payload)}")
        in_headers = kind in {Kind.HEADERS, Kind.CONTINUATION}
        if not self.flood.spend(1 + len(payload) // (_HEADER_ITEM_BYTES if in_headers else _FRAME_ITEM_BYTES)):
            raise Flood
        try:
            match kind:
                case Kind.HEADERS:
                    self._begin_headers(stream, flags, payload)
                case Kind.CONTINUATION:
                    self._continue_headers(stream, flags, payload)
                case Kind.SETTINGS:
                    self._take_settings(flags, payload)
                case Kind.PING:
                    if not flags & ACK:
                        self._reply(frame(Kind.PING, payload, flags=ACK))
                case Kind.RST_STREAM:
                    self._take_reset(stream, int.from_bytes(payload, "big"))
                case Kind.GOAWAY:
                    self._take_goaway(payload)
                case Kind.PUSH_PROMISE:
                    raise Http2Violation("received a push, which is disabled")
                case _:
                    pass  # Priorities and kinds that are not defined have no effect.
        except (struct.error, IndexError):
            raise Http2Violation(f"received a frame of kind {kind} that is cut off") from None

    def _reply(self, reply: bytes) -> None:
        self._replies.append(reply)
        self._answer_bytes += len(reply)
        if self._answer_bytes > _MAX_REPLY_BYTES:
            raise Http2Violation("the peer sends settings or pings, and does not read their answers")
        self.wake()

    def _begin_headers(self, stream: int, flags: int, payload: bytes) -> None:
        self._check_opening(stream)
        if flags & PADDED:
            payload = _unpadded(payload)
        if flags & PRIORITY:
            payload = payload[5:]
        self._headers, self._headers_flags, self._headers_stream = bytearray(), flags, stream
        self._add_headers(flags, payload)

    def _continue_headers(self, stream: int, flags: int, payload: bytes) -> None:
        if stream != self._headers_stream or self._headers is None:
            raise Http2Violation("received the rest of a header block without its beginning")
        self._add_headers(flags, payload)

    def _add_headers(self, flags: int, payload: bytes) -> None:
        assert self._headers is not None, "a block has begun"  # noqa: S101
        self._headers += payload
        if len(self._headers) > MAX_HEADER_BYTES:
            raise Http2Violation(f"expected headers of at most {MAX_HEADER_BYTES} bytes, received more")
        if flags & END_HEADERS:
            block, self._headers = bytes(self._headers), None
            self.header_items = len(block) // _HEADER_ITEM_BYTES
            known = self._known_blocks.get(block)
            self._take_headers(
                self._headers_stream, self._headers_flags, self._decoded(block) if known is None else known
            )

    def _decoded(self, block: bytes) -> dict[bytes, bytes]:
        table = self._decoder.header_table
        before = table.maxsize, *table.dynamic_entries
        try:
            fields = list(self._decoder.decode(block, raw=True))
        except hpack.HPACKError as error:
            raise Http2Violation(f"received headers that cannot be decoded: {error}") from None
        headers = dict(fields)
        if len(headers) < len(fields):
            for name in headers:
                headers[name] = b", ".join(value for each, value in fields if each == name)
        if before != (table.maxsize, *table.dynamic_entries):
            self._known_blocks = {}
        else:
            if len(self._known_blocks) >= _MOST_KNOWN_BLOCKS:
                del self._known_blocks[next(iter(self._known_blocks))]
            self._known_blocks[block] = headers
        return headers

    def _take_settings(self, flags: int, payload: bytes) -> None:
        if flags & ACK:
            return
        for setting, value in read_settings(payload):
            if setting == Setting.INITIAL_WINDOW_SIZE:
                if value > MAX_31_BITS:
                    raise Http2Violation(f"received an initial window of {value} bytes, which is too large")
                self._widen(value - self._initial_window)
                self._initial_window = value
            elif setting == Setting.MAX_FRAME_SIZE:
                if not LEAST_MAX_FRAME_BYTES <= value <= MOST_MAX_FRAME_BYTES:
                    raise Http2Violation(f"received a maximum frame size of {value} bytes, which is not possible")
                self._max_frame = value
        # A peer counts data that precedes the acknowledgement against the windows before.
        self._reply(frame(Kind.SETTINGS, flags=ACK))
        self._send_waiting()


def widened(window: int, more: int) -> int:
    """Returns a window with permission for more bytes.

    Raises:
        Http2Violation: it is too large.
    """
    if window + more > MAX_31_BITS:
        raise Http2Violation(f"received a window of {window + more} bytes, which is too large")
    return window + more


def _unpadded(payload: bytes) -> bytes:
    padding = payload[0] if payload else 0
    if padding >= len(payload):
        raise Http2Violation("received a frame that is shorter than its padding")
    return payload[1 : len(payload) - padding]
