"""The client's side of one gRPC call on an HTTP/2 connection of its own. Does no I/O.

Sources: RFC 9113 (HTTP/2), RFC 7541 (HPACK, by the library hpack) and gRPC's "gRPC over HTTP2". Only what one call
needs is here: stream 1, messages that are not compressed, no priorities, no push.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import unquote

import grpc
import hpack
from kvrouter.net.grpc_connection.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    HEADER_BYTES,
    INITIAL_WINDOW_BYTES,
    LEAST_MAX_FRAME_BYTES,
    MAX_31_BITS,
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
"""What the server may send before it is read. It is read at once, so this covers the way between the two."""
_MAX_HEADER_BYTES: Final = 64 << 10
_MAX_REPLY_BYTES: Final = 64 << 10
"""Size of unsent answers to settings and pings at which the server is flooding."""
_PREFIX: Final = struct.Struct(">BI")
"""What precedes a gRPC message: whether it is compressed, and its length."""
_PREFIX_BYTES: Final = _PREFIX.size
_MAX_DETAILS: Final = 512
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_RESET_CODES: Final = {
    0x7: grpc.StatusCode.UNAVAILABLE,
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


Metadata = Sequence[tuple[str, str]]
"""Names and values."""


class Http2Violation(Exception):
    """The server broke a rule of HTTP/2 or of gRPC."""

    reason = "http2"
    """Label for metrics."""


class MessageTooLong(Http2Violation):
    """A message of the server is longer than is accepted."""

    reason = "too_long"


class Http2Call:
    """One call. ``take`` returns the bytes to write, ``receive`` processes those that were read."""

    def __init__(
        self, path: str, authority: str, scheme: str, metadata: Metadata = (), *, max_message_bytes: int
    ) -> None:
        """Prepares the beginning of the connection; see ``GrpcConnection.open``."""
        self.on_message: Callable[[bytes], None] = _ignore
        """Called with each message of the server."""
        self.ended: tuple[grpc.StatusCode, str] | None = None
        """The call's status, once the server has ended it."""
        self._max_message_bytes = max_message_bytes
        self._decoder = hpack.Decoder(max_header_list_size=_MAX_HEADER_BYTES)
        self._unread = b""
        """The first part of a frame."""
        self._message = bytearray()
        """The first part of a message."""
        self._headers: bytearray | None = None
        """The first part of a header block that is continued."""
        self._headers_flags = 0
        self._status = ""
        self._consumed = 0
        """Bytes that were read since the server was last allowed more."""
        self._unsent = b""
        """A message, with its prefix, of which a part waits for the server's window."""
        self._sent = 0
        self._max_frame = LEAST_MAX_FRAME_BYTES
        self._initial_window = INITIAL_WINDOW_BYTES
        self._window = INITIAL_WINDOW_BYTES
        """Bytes that the server accepts on the stream."""
        self._connection_window = INITIAL_WINDOW_BYTES
        self._replies = [
            PREFACE,
            settings({Setting.ENABLE_PUSH: 0, Setting.INITIAL_WINDOW_SIZE: _WINDOW_BYTES}),
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
        """Whether a message waits for the server's window, so that no further one can be sent."""
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
        """Returns what can be written now, and forgets it."""
        chunks, self._replies = self._replies, []
        while self._unsent:
            left = len(self._unsent) - self._sent
            size = min(left, self._window, self._connection_window, self._max_frame)
            if size <= 0:
                break
            self._window -= size
            self._connection_window -= size
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
            Http2Violation: the server broke a rule.
        """
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
        if not self._message and len(payload) >= _PREFIX_BYTES and self._size(payload) == len(payload):
            self.on_message(payload[_PREFIX_BYTES:])
        else:
            self._message += payload
            while len(self._message) >= _PREFIX_BYTES and len(self._message) >= (size := self._size(self._message)):
                message = bytes(self._message[_PREFIX_BYTES:size])
                del self._message[:size]
                self.on_message(message)
        if flags & END_STREAM:
            self.ended = (grpc.StatusCode.UNKNOWN, "the server ended the call without a status")

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
        try:
            match kind:
                case Kind.HEADERS:
                    self._begin_headers(stream, flags, payload)
                case Kind.CONTINUATION:
                    self._continue_headers(stream, flags, payload)
                case Kind.SETTINGS:
                    self._take_settings(flags, payload)
                case Kind.WINDOW_UPDATE:
                    self._take_window(stream, payload)
                case Kind.PING:
                    if not flags & ACK:
                        self._reply(frame(Kind.PING, payload[:8], flags=ACK))
                case Kind.RST_STREAM if stream == _STREAM:
                    code = int.from_bytes(payload, "big")
                    status = _RESET_CODES.get(code, grpc.StatusCode.INTERNAL)
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
        if flags & END_HEADERS:
            self._end_headers()

    def _continue_headers(self, stream: int, flags: int, payload: bytes) -> None:
        if stream != _STREAM or self._headers is None:
            raise Http2Violation("received the rest of a header block without its beginning")
        self._headers += payload
        if len(self._headers) > _MAX_HEADER_BYTES:
            raise Http2Violation(f"expected headers of at most {_MAX_HEADER_BYTES} bytes, received more")
        if flags & END_HEADERS:
            self._end_headers()

    def _end_headers(self) -> None:
        try:
            headers = dict(self._decoder.decode(bytes(self._headers or b""), raw=True))
        except hpack.HPACKError as error:
            raise Http2Violation(f"received headers that cannot be decoded: {error}") from None
        self._headers = None
        status = headers.get(b":status", b"").decode("ascii", "replace")
        if not self._status:
            if status.startswith("1"):
                return
            self._status = status or "none"
        if self._status != "200" and b"grpc-status" not in headers:
            code = _HTTP_CODES.get(self._status, grpc.StatusCode.UNKNOWN)
            self.ended = (code, f"expected the HTTP status 200, received {self._status}")
        elif self._headers_flags & END_STREAM or b"grpc-status" in headers:
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
            elif setting == Setting.MAX_FRAME_SIZE:
                if value < LEAST_MAX_FRAME_BYTES:
                    raise Http2Violation(f"received a maximum frame size of {value} bytes, which is too small")
                self._max_frame = value
        self._reply(frame(Kind.SETTINGS, flags=ACK))

    def _take_window(self, stream: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Violation(f"expected 4 bytes in a window update, received {len(payload)}")
        more = int.from_bytes(payload, "big") & MAX_31_BITS
        if stream == 0:
            self._connection_window += more
        elif stream == _STREAM:
            self._window += more
        if not more or max(self._window, self._connection_window) > MAX_31_BITS:
            raise Http2Violation(f"received a window update of {more} bytes, which is not possible")

    def _take_goaway(self, payload: bytes) -> None:
        last = int.from_bytes(payload[:4], "big") & MAX_31_BITS
        if last < _STREAM:
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
    code = _CODES.get(int(number), grpc.StatusCode.UNKNOWN) if number.isdigit() else grpc.StatusCode.UNKNOWN
    return code, unquote(headers.get(b"grpc-message", b"")[:_MAX_DETAILS].decode("ascii", "replace"), errors="replace")
