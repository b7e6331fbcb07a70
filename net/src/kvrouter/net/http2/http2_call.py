"""The client's side of one gRPC call on an HTTP/2 connection of its own: stream 1. Does no I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

import grpc
from hpack.hpack import encode_integer
from kvrouter.net.http2.frames import (
    END_HEADERS,
    END_STREAM,
    INITIAL_WINDOW_BYTES,
    LEAST_MAX_FRAME_BYTES,
    MAX_31_BITS,
    PREFACE,
    ErrorCode,
    Kind,
    Setting,
    frame,
    settings,
    window_update,
)
from kvrouter.net.http2.metadata import Metadata
from kvrouter.net.http2.side import (
    CONNECTION_WINDOW_BYTES,
    MAX_HEADER_BYTES,
    Http2Side,
    Http2Violation,
    MessageReader,
    UnexpectedData,
    prefix,
    widened,
)

_STREAM: Final = 1
"""Number of the only stream."""
_ITEMS_OF_MESSAGE: Final = 2
"""A message, sent alone, comes in a read and a frame."""
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


_GOAWAY_BYTES: Final = 8
_KNOWN_BLOCKS: Final[dict[bytes, dict[bytes, bytes]]] = {}
"""Decoded header blocks, for all connections whose HPACK table has not changed: most servers send equal blocks."""


class Http2Call(Http2Side):
    """One call. ``take`` returns the bytes to write, ``receive`` processes those read."""

    def __init__(
        self, path: str, authority: str, scheme: str, metadata: Metadata = (), *, max_message_bytes: int
    ) -> None:
        """Prepares the beginning of the connection; see ``GrpcConnection.open``."""
        super().__init__()
        self._known_blocks = _KNOWN_BLOCKS
        self.on_messages: Callable[[Sequence[bytes]], None] = _ignore
        """Called with messages of the server, in order: all that a read has in whole frames, or one."""
        self.ended: tuple[grpc.StatusCode, str] | None = None
        """The call's status, once the server has ended it."""
        self.trailers: dict[bytes, bytes] = {}
        """The headers with the status."""
        self.never_processed = False
        """Whether the server ended the call and said it processed nothing of it."""
        self.going_away = False
        """Whether the server takes no further calls on the connection. This one goes on."""
        self._messages = MessageReader(max_message_bytes)
        self._status = ""
        self._unsent: bytes | memoryview = b""
        """A message of which a part waits for the server's window. A long one is a view: its frames are no copies."""
        self._last_flags = 0
        """Flags of the last frame of the message."""
        self._withheld: int | None = None
        """Bytes that the server is not allowed to send yet; None if all are allowed at once."""
        self.blocked = False
        """Whether a part of the latest message is not written, so no further one can be sent.

        The server cannot have processed such a message.
        """
        self._window = INITIAL_WINDOW_BYTES
        """Bytes the server accepts on the stream."""
        self._replies = [
            PREFACE,
            settings(
                {
                    Setting.ENABLE_PUSH: 0,
                    Setting.INITIAL_WINDOW_SIZE: CONNECTION_WINDOW_BYTES,
                    Setting.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
                }
            ),
            window_update(0, CONNECTION_WINDOW_BYTES - INITIAL_WINDOW_BYTES),
            frame(
                Kind.HEADERS,
                _encode_headers(path, authority, scheme, metadata),
                flags=END_HEADERS,
                stream=_STREAM,
            ),
        ]

    def send(self, message: bytes, *, last: bool = False) -> None:
        """Sends a message, perhaps the last one. The call must not be blocked."""
        self.blocked = True
        self._last_flags = END_STREAM if last else 0
        unsent = prefix(len(message)) + message
        self._unsent = unsent if len(unsent) <= LEAST_MAX_FRAME_BYTES else memoryview(unsent)

    def cancel(self) -> None:
        """Ends the call."""
        self._unsent = b""
        self.blocked = False
        self._replies.append(frame(Kind.RST_STREAM, ErrorCode.CANCEL.to_bytes(4, "big"), stream=_STREAM))
        self._replies.append(frame(Kind.GOAWAY, bytes(4) + ErrorCode.NO_ERROR.to_bytes(4, "big")))

    def take(self) -> bytes:
        """Returns the bytes to write now, and forgets them."""
        if self.blocked:
            sent = self._send_data(_STREAM, self._unsent, self._window, self._last_flags)
            self._window -= sent
            self._unsent = self._unsent[sent:] or b""
            self.blocked = bool(self._unsent)
        taken, self._replies, self._answer_bytes = b"".join(self._replies), [], 0
        return taken

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        self.ended = (code, details)
        self.is_over = True

    def withhold(self) -> None:
        """Allows the server no more bytes until ``allow_withheld``."""
        if self._withheld is None:
            self._withheld = 0

    def allow_withheld(self) -> None:
        """Allows the server as many bytes as were withheld, and further ones at once."""
        more, self._withheld = self._withheld, None
        if more:
            self._allow(more)
            self.wake()

    def _allow(self, more: int) -> None:
        if self._withheld is not None:
            self._withheld += more
            return
        self._replies += (window_update(0, more), window_update(_STREAM, more))

    def _take_data(self, stream: int, flags: int, payload: bytes, length: int) -> int:  # noqa: ARG002 - all of it
        if stream != _STREAM or not self._status:
            raise UnexpectedData(stream)
        messages = self._messages.take(payload, lambda message: self.on_messages((message,)))
        if flags & END_STREAM:
            self._end(grpc.StatusCode.UNKNOWN, "the server ended the call without a status")
        return messages * _ITEMS_OF_MESSAGE

    def _take_messages(self, stream: int, messages: list[bytes], length: int) -> int | None:  # noqa: ARG002 - all of it
        reader = self._messages
        if stream != _STREAM or not self._status or reader.begun or reader.max_bytes < LEAST_MAX_FRAME_BYTES:
            return None
        self.on_messages(messages)
        return len(messages) * _ITEMS_OF_MESSAGE

    def _check_opening(self, stream: int) -> None:
        if stream != _STREAM:
            raise Http2Violation(f"received headers on stream {stream}, which was not opened")

    def _take_headers(self, stream: int, flags: int, headers: dict[bytes, bytes]) -> None:  # noqa: ARG002
        status = headers.get(b":status", b"")[:_STATUS_DIGITS].decode("ascii", "replace")
        last = bool(flags & END_STREAM)
        if not self._status:
            if status.startswith("1") and not last:
                return
            self._status = status or "none"
        elif not last:
            raise Http2Violation("expected headers that end the call, received further ones")
        if self._status != "200" and b"grpc-status" not in headers:
            code = _HTTP_CODES.get(self._status, grpc.StatusCode.UNKNOWN)
            self._end(code, f"expected the HTTP status 200, received {self._status}")
        elif last:
            self.trailers = headers
            self._end(*_status_of(headers))

    def _widen_stream(self, stream: int, more: int) -> None:
        if stream == _STREAM:
            self._window = widened(self._window, more)

    def _widen(self, more: int) -> None:
        self._window = widened(self._window, more)

    def _send_waiting(self) -> None:
        if self.blocked:
            self.wake()

    def _take_reset(self, stream: int, code: int) -> None:
        if stream == _STREAM:
            self.never_processed = code == ErrorCode.REFUSED_STREAM and not self._status
            status = _RESET_CODES.get(code, grpc.StatusCode.INTERNAL)
            self._end(status, f"the server reset the call (error {code})")

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
            self._end(grpc.StatusCode.UNAVAILABLE, reason[:_MAX_DETAILS])


def _ignore(_messages: Sequence[bytes]) -> None:
    pass


def _encode_headers(path: str, authority: str, scheme: str, metadata: Metadata) -> bytes:
    encoded = _method_headers(path, scheme) + _encode(((":authority", authority),)) + _CONSTANT_HEADERS
    if metadata:
        encoded += _encode(metadata)
    if len(encoded) > LEAST_MAX_FRAME_BYTES:
        raise ValueError(f"expected metadata of less than {LEAST_MAX_FRAME_BYTES} bytes, got {len(encoded)}")
    return encoded


def _encode(headers: Metadata) -> bytes:
    """Returns a part of a header block that uses no table, and no Huffman codes: RFC 7541, 6.2.3.

    The library takes several times as long, to save some 50 bytes for each connection.
    """
    return b"".join(b"\x10" + _string(name) + _string(value) for name, value in headers)


def _string(text: str) -> bytes:
    encoded = text.encode()
    return bytes(encode_integer(len(encoded), 7)) + encoded


@lru_cache(maxsize=64)
def _method_headers(path: str, scheme: str) -> bytes:
    return _encode(((":method", "POST"), (":scheme", scheme), (":path", path)))


_CONSTANT_HEADERS: Final = _encode(
    (("te", "trailers"), ("content-type", "application/grpc"), ("user-agent", "kvrouter"))
)


def _status_of(headers: dict[bytes, bytes]) -> tuple[grpc.StatusCode, str]:
    number = headers.get(b"grpc-status", b"")
    is_code = number.isdigit() and len(number) <= _STATUS_DIGITS
    code = _CODES.get(int(number), grpc.StatusCode.UNKNOWN) if is_code else grpc.StatusCode.UNKNOWN
    return code, unquote(headers.get(b"grpc-message", b"")[:_MAX_DETAILS].decode("ascii", "replace"), errors="replace")
