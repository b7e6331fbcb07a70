"""The client's side of one gRPC call on an HTTP/2 connection of its own. Does no I/O.

Sources: RFC 9113 (HTTP/2), RFC 7541 (HPACK, by the library hpack) and gRPC's "gRPC over HTTP2". Only the parts one call
needs is here: stream 1, messages not compressed, no priorities, no push.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

import grpc
import hpack
from kvrouter.net.budgets import FloodBudget
from kvrouter.net.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    HEADER_BYTES,
    INITIAL_WINDOW_BYTES,
    LEAST_MAX_FRAME_BYTES,
    MAX_31_BITS,
    MOST_MAX_FRAME_BYTES,
    PADDED,
    PREFACE,
    PRIORITY,
    ErrorCode,
    Kind,
    Setting,
    frame,
    frame_header,
    read_frame_header,
    read_settings,
    settings,
    window_update,
)

_STREAM: Final = 1
"""Number of the only stream."""
_WINDOW_BYTES: Final = 4 << 20
"""Bytes the server may send ahead of the reader. They are read at once, so this covers the way between the two."""
_MAX_HEADER_BYTES: Final = 16 << 10
"""Size of a header block, encoded and decoded, as gRPC limits it."""
_MAX_REPLY_BYTES: Final = 64 << 10
"""Size of unsent answers to settings and pings at which the server is flooding."""
_FLOOD_ITEMS: Final = 1_000
_FLOOD_SECONDS: Final = 10.0
"""Frames without a message a server may send in this time. They take some 20 ms of a core to read."""
_HEADER_ITEM_BYTES: Final = 16
"""Bytes of a header block per item of a flood: HPACK takes about 1 µs a byte."""
_FRAME_ITEM_BYTES: Final = 64
"""The same for other frames without a message."""
_LEAST_USEFUL_BYTES: Final = 256
"""Frames with data, and reads, below this size count as items of a flood, unless they complete a message."""
_ITEMS_OF_MESSAGE: Final = 2
"""A message, sent alone, comes in a read and a frame."""
_ITEMS_OF_SENT_FRAME: Final = 4
"""Answers of a server to data: window updates of stream and connection, a measuring ping, settings."""
_PREFIX: Final = struct.Struct(">BI")
"""Prefix of a gRPC message: compression and length."""
_PREFIX_BYTES: Final = _PREFIX.size
_MAX_DETAILS: Final = 512
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_STATUS_DIGITS: Final = 3
_RESET_CODES: Final = {
    ErrorCode.REFUSED_STREAM.value: grpc.StatusCode.UNAVAILABLE,
    0x8: grpc.StatusCode.CANCELLED,
    0xB: grpc.StatusCode.RESOURCE_EXHAUSTED,
    0xC: grpc.StatusCode.PERMISSION_DENIED,
}
"""gRPC's codes for resets; INTERNAL for others."""
_HTTP_CODES: Final = {
    "400": grpc.StatusCode.INTERNAL,
    "401": grpc.StatusCode.UNAUTHENTICATED,
    "403": grpc.StatusCode.PERMISSION_DENIED,
    "404": grpc.StatusCode.UNIMPLEMENTED,
    "429": grpc.StatusCode.UNAVAILABLE,
    "502": grpc.StatusCode.UNAVAILABLE,
    "503": grpc.StatusCode.UNAVAILABLE,
    "504": grpc.StatusCode.UNAVAILABLE,
}
"""gRPC's codes for HTTP statuses; UNKNOWN for others."""


_OF_CONNECTION: Final = frozenset({Kind.SETTINGS, Kind.PING, Kind.GOAWAY})
"""Kinds of frames outside of streams."""
_OF_STREAMS: Final = frozenset({Kind.HEADERS, Kind.PRIORITY, Kind.RST_STREAM, Kind.PUSH_PROMISE, Kind.CONTINUATION})
_SIZES: Final[Mapping[int, int]] = {Kind.PRIORITY: 5, Kind.RST_STREAM: 4, Kind.PING: 8, Kind.WINDOW_UPDATE: 4}
_GOAWAY_BYTES: Final = 8

Metadata = Sequence[tuple[str, str]]
"""Names and values."""


class Http2Violation(Exception):
    """The server broke a rule of HTTP/2 or of gRPC."""

    reason = "http2"
    """Label for metrics."""


class MessageTooLong(Http2Violation):
    """A message of the server is longer than is accepted."""

    reason = "too_long"


class Flood(Http2Violation):
    """The server floods with frames without a message."""

    reason = "flood"


class Http2Call:
    """One call. ``take`` returns the bytes to write, ``receive`` processes those read."""

    def __init__(
        self, path: str, authority: str, scheme: str, metadata: Metadata = (), *, max_message_bytes: int
    ) -> None:
        """Prepares the beginning of the connection; see ``GrpcConnection.open``."""
        self.on_message: Callable[[bytes], None] = _ignore
        """Called with each message of the server."""
        self.ended: tuple[grpc.StatusCode, str] | None = None
        """The call's status, once the server has ended it."""
        self.never_processed = False
        """Whether the server ended the call and said it processed nothing of it."""
        self.going_away = False
        """Whether the server takes no further calls on the connection. This one goes on."""
        self._max_message_bytes = max_message_bytes
        self._flood = FloodBudget(_FLOOD_ITEMS, _FLOOD_SECONDS)
        self._decoder = hpack.Decoder(max_header_list_size=_MAX_HEADER_BYTES)
        self._unread = b""
        """The first part of a frame."""
        self._message = bytearray()
        """The first part of a message."""
        self._headers: bytearray | None = None
        """The first part of a header block continued."""
        self._headers_flags = 0
        self._status = ""
        self._consumed = 0
        """Bytes read since the server was last allowed more."""
        self._unsent = b""
        """A message, with its prefix, of which a part waits for the server's window."""
        self._sent = 0
        self._max_frame = LEAST_MAX_FRAME_BYTES
        self._initial_window = INITIAL_WINDOW_BYTES
        self._window = INITIAL_WINDOW_BYTES
        """Bytes the server accepts on the stream."""
        self._connection_window = INITIAL_WINDOW_BYTES
        self._replies = [
            PREFACE,
            settings(
                {
                    Setting.ENABLE_PUSH: 0,
                    Setting.INITIAL_WINDOW_SIZE: _WINDOW_BYTES,
                    Setting.MAX_HEADER_LIST_SIZE: _MAX_HEADER_BYTES,
                }
            ),
            window_update(0, _WINDOW_BYTES - INITIAL_WINDOW_BYTES),
            frame(
                Kind.HEADERS,
                _encode_headers(path, authority, scheme, metadata),
                flags=END_HEADERS,
                stream=_STREAM,
            ),
        ]

    @property
    def blocked(self) -> bool:
        """Whether a part of the latest message is not written, so no further one can be sent.

        The server cannot have processed such a message.
        """
        return bool(self._unsent)

    @property
    def waiting(self) -> bool:
        """Whether ``take`` may return bytes."""
        return bool(self._replies or self._unsent)

    def send(self, message: bytes) -> None:
        """Sends a message. The call must not be blocked."""
        self._unsent = _PREFIX.pack(0, len(message)) + message
        self._sent = 0

    def ping(self) -> None:
        """Requests an answer of the server's HTTP/2 library."""
        self._replies.append(frame(Kind.PING, bytes(8)))

    def cancel(self) -> None:
        """Ends the call."""
        self._unsent = b""
        self._replies.append(frame(Kind.RST_STREAM, ErrorCode.CANCEL.to_bytes(4, "big"), stream=_STREAM))
        self._replies.append(frame(Kind.GOAWAY, bytes(4) + ErrorCode.NO_ERROR.to_bytes(4, "big")))

    def take(self) -> bytes:
        """Returns the bytes to write now, and forgets them."""
        chunks, self._replies = self._replies, []
        while self._unsent:
            left = len(self._unsent) - self._sent
            size = min(left, self._window, self._connection_window, self._max_frame)
            if size <= 0:
                break
            self._window -= size
            self._connection_window -= size
            self._flood.earn(_ITEMS_OF_SENT_FRAME)
            chunks.append(frame_header(size, Kind.DATA, 0, _STREAM))
            if size == len(self._unsent):
                chunks.append(self._unsent)
            else:
                chunks.append(self._unsent[self._sent : self._sent + size])
            self._sent += size
            if size == left:
                self._unsent = b""
        return b"".join(chunks)

    def receive(self, data: bytes) -> None:
        """Processes bytes of the server.

        Raises:
            Http2Violation: the server broke a rule, or floods the client.
        """
        if len(data) < _LEAST_USEFUL_BYTES:
            self._spend(1)
        buffer = self._unread + data if self._unread else data
        position, end = 0, len(buffer)
        while end - position >= HEADER_BYTES and self.ended is None:
            length, kind, flags, stream = read_frame_header(buffer, position)
            if length > LEAST_MAX_FRAME_BYTES:
                raise Http2Violation(f"expected frames of at most {LEAST_MAX_FRAME_BYTES} bytes, received {length}")
            start = position + HEADER_BYTES
            position = start + length
            if position > end:
                position = start - HEADER_BYTES
                break
            if kind == Kind.DATA:
                self._take_data(stream, flags, buffer[start:position])
            elif kind == Kind.WINDOW_UPDATE and length == _SIZES[kind] and self._headers is None:
                # A server sends several for each short message.
                self._spend(1)
                self._take_window(stream, buffer[start:position])
            else:
                self._take_frame(kind, stream, flags, buffer[start:position])
        self._unread = buffer[position:]
        if self._consumed > _WINDOW_BYTES // 2:
            self._replies += (window_update(0, self._consumed), window_update(_STREAM, self._consumed))
            self._consumed = 0

    def _take_data(self, stream: int, flags: int, payload: bytes) -> None:
        if stream != _STREAM or self._headers is not None or not self._status:
            raise Http2Violation(f"received data on stream {stream}, where none was expected")
        self._consumed += len(payload)
        if flags & PADDED:
            payload = _unpadded(payload)
        if len(payload) < _LEAST_USEFUL_BYTES:
            self._spend(1)
        if not self._message and len(payload) >= _PREFIX_BYTES and self._size(payload) == len(payload):
            self._deliver(payload[_PREFIX_BYTES:])
        else:
            self._message += payload
            while len(self._message) >= _PREFIX_BYTES and len(self._message) >= (size := self._size(self._message)):
                message = bytes(self._message[_PREFIX_BYTES:size])
                del self._message[:size]
                self._deliver(message)
        if flags & END_STREAM:
            self.ended = (grpc.StatusCode.UNKNOWN, "the server ended the call without a status")

    def _deliver(self, message: bytes) -> None:
        self._flood.earn(_ITEMS_OF_MESSAGE)
        self.on_message(message)

    def _spend(self, items: int) -> None:
        if not self._flood.spend(items):
            raise Flood("the server sends many frames that carry no message")

    def _size(self, data: bytes | bytearray) -> int:
        """Returns the size of a message with its prefix."""
        compressed, length = _PREFIX.unpack_from(data)
        if compressed:
            raise Http2Violation("expected messages that are not compressed, received a compressed one")
        if length > self._max_message_bytes:
            raise MessageTooLong(f"expected messages of at most {self._max_message_bytes} bytes, received {length}")
        return int(length) + _PREFIX_BYTES

    def _take_frame(self, kind: int, stream: int, flags: int, payload: bytes) -> None:
        if self._headers is not None and kind != Kind.CONTINUATION:
            raise Http2Violation("expected the rest of a header block, received another frame")
        if kind in (_OF_STREAMS if stream == 0 else _OF_CONNECTION):
            raise Http2Violation(f"received a frame of kind {kind} on stream {stream}, where none is defined")
        if kind in _SIZES and len(payload) != _SIZES[kind]:
            raise Http2Violation(f"expected {_SIZES[kind]} bytes in a frame of kind {kind}, received {len(payload)}")
        in_headers = kind in {Kind.HEADERS, Kind.CONTINUATION}
        self._spend(1 + len(payload) // (_HEADER_ITEM_BYTES if in_headers else _FRAME_ITEM_BYTES))
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
                case Kind.RST_STREAM if stream == _STREAM:
                    code = int.from_bytes(payload, "big")
                    status = _RESET_CODES.get(code, grpc.StatusCode.INTERNAL)
                    self.never_processed = code == ErrorCode.REFUSED_STREAM and not self._status
                    self.ended = (status, f"the server reset the call (error {code})")
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
        if len(self._replies) * len(reply) > _MAX_REPLY_BYTES:
            raise Http2Violation("the server sends settings or pings, and does not read their answers")

    def _begin_headers(self, stream: int, flags: int, payload: bytes) -> None:
        if stream != _STREAM:
            raise Http2Violation(f"received headers on stream {stream}, which was not opened")
        if flags & PADDED:
            payload = _unpadded(payload)
        if flags & PRIORITY:
            payload = payload[5:]
        self._headers, self._headers_flags = bytearray(payload), flags
        self._check_headers_size()
        if flags & END_HEADERS:
            self._end_headers()

    def _continue_headers(self, stream: int, flags: int, payload: bytes) -> None:
        if stream != _STREAM or self._headers is None:
            raise Http2Violation("received the rest of a header block without its beginning")
        self._headers += payload
        self._check_headers_size()
        if flags & END_HEADERS:
            self._end_headers()

    def _check_headers_size(self) -> None:
        if self._headers is not None and len(self._headers) > _MAX_HEADER_BYTES:
            raise Http2Violation(f"expected headers of at most {_MAX_HEADER_BYTES} bytes, received more")

    def _end_headers(self) -> None:
        try:
            headers = dict(self._decoder.decode(bytes(self._headers or b""), raw=True))
        except hpack.HPACKError as error:
            raise Http2Violation(f"received headers that cannot be decoded: {error}") from None
        self._headers = None
        status = headers.get(b":status", b"")[:_STATUS_DIGITS].decode("ascii", "replace")
        last = bool(self._headers_flags & END_STREAM)
        if not self._status:
            if status.startswith("1") and not last:
                return
            self._status = status or "none"
        elif not last:
            raise Http2Violation("expected headers that end the call, received further ones")
        if self._status != "200" and b"grpc-status" not in headers:
            code = _HTTP_CODES.get(self._status, grpc.StatusCode.UNKNOWN)
            self.ended = (code, f"expected the HTTP status 200, received {self._status}")
        elif last:
            self.ended = _status_of(headers)

    def _take_settings(self, flags: int, payload: bytes) -> None:
        if flags & ACK:
            return
        for setting, value in read_settings(payload):
            if setting == Setting.INITIAL_WINDOW_SIZE:
                if value > MAX_31_BITS:
                    raise Http2Violation(f"received an initial window of {value} bytes, which is too large")
                self._window += value - self._initial_window
                self._initial_window = value
                if self._window > MAX_31_BITS:
                    raise Http2Violation(f"received an initial window of {value} bytes, which is too large")
            elif setting == Setting.MAX_FRAME_SIZE:
                if not LEAST_MAX_FRAME_BYTES <= value <= MOST_MAX_FRAME_BYTES:
                    raise Http2Violation(f"received a maximum frame size of {value} bytes, which is not possible")
                self._max_frame = value
        self._reply(frame(Kind.SETTINGS, flags=ACK))

    def _take_window(self, stream: int, payload: bytes) -> None:
        more = int.from_bytes(payload, "big") & MAX_31_BITS
        if stream == 0:
            self._connection_window += more
        elif stream == _STREAM:
            self._window += more
        if not more or max(self._window, self._connection_window) > MAX_31_BITS:
            raise Http2Violation(f"received a window update of {more} bytes, which is not possible")

    def _take_goaway(self, payload: bytes) -> None:
        if len(payload) < _GOAWAY_BYTES:
            raise Http2Violation("received a frame of kind 7 that is cut off")
        last = int.from_bytes(payload[:4], "big") & MAX_31_BITS
        if last >= _STREAM:
            self.going_away = True
        else:
            # A server that has answered has processed the call, whatever it says.
            self.never_processed = not self._status
            code, details = int.from_bytes(payload[4:8], "big"), payload[8:].decode("utf-8", "replace")
            reason = f"the server takes no calls (error {code}) {details}".rstrip()
            self.ended = (grpc.StatusCode.UNAVAILABLE, reason[:_MAX_DETAILS])


def _ignore(_message: bytes) -> None:
    pass


def _encode_headers(path: str, authority: str, scheme: str, metadata: Metadata) -> bytes:
    headers: list[Any] = [
        (":method", "POST"),
        (":scheme", scheme),
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "kvrouter"),
    ]
    headers += (hpack.NeverIndexedHeaderTuple(name, value) for name, value in metadata)
    encoded = hpack.Encoder().encode(headers)
    if len(encoded) > LEAST_MAX_FRAME_BYTES:
        raise ValueError(f"expected metadata of less than {LEAST_MAX_FRAME_BYTES} bytes, got {len(encoded)}")
    return encoded


def _unpadded(payload: bytes) -> bytes:
    padding = payload[0] if payload else 0
    if padding >= len(payload):
        raise Http2Violation("received a frame that is shorter than its padding")
    return payload[1 : len(payload) - padding]


def _status_of(headers: dict[bytes, bytes]) -> tuple[grpc.StatusCode, str]:
    number = headers.get(b"grpc-status", b"")
    is_code = number.isdigit() and len(number) <= _STATUS_DIGITS
    code = _CODES.get(int(number), grpc.StatusCode.UNKNOWN) if is_code else grpc.StatusCode.UNKNOWN
    return code, unquote(headers.get(b"grpc-message", b"")[:_MAX_DETAILS].decode("ascii", "replace"), errors="replace")
