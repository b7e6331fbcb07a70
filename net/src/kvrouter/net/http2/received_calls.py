"""The server's side of the gRPC calls of one HTTP/2 connection. Does no I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvrouter.core import pass_pieces
from kvrouter.net.http2.frames import (
    END_STREAM,
    HEADER_BYTES,
    INITIAL_WINDOW_BYTES,
    LEAST_MAX_FRAME_BYTES,
    PREFACE,
    ErrorCode,
    Kind,
    Setting,
    frame,
    settings,
    window_update,
)
from kvrouter.net.http2.options import CONNECTION_CALLS
from kvrouter.net.http2.received_call import ITEMS_OF_MESSAGE, WINDOW_BYTES, Received, ReceivedCall
from kvrouter.net.http2.side import (
    CONNECTION_WINDOW_BYTES,
    ITEMS_OF_SENT_FRAME,
    LEAST_USEFUL_BYTES,
    MAX_HEADER_BYTES,
    Http2Side,
    Http2Violation,
    UnexpectedData,
)

_MAX_UNWRITTEN_BYTES: Final = 256 << 10
"""Output ready for the socket beyond which calls wait with theirs."""
_MAX_STATUS_BYTES: Final = 4 << 20
"""Statuses and other answers a client may leave unread."""
_TURN_BYTES: Final = 64 << 10
"""Bytes of a call sent before those of others."""


class ReceivedCalls(Http2Side):
    """The calls of one connection. ``take`` returns the bytes to write, ``receive`` processes those read."""

    def __init__(self, received: Received, begin: Callable[[ReceivedCall], None]) -> None:
        """Prepares the connection.

        Args:
            received: Size of the messages all connections of the server hold.
            begin: Called with each new call.
        """
        super().__init__()
        self.loop = asyncio.get_running_loop()
        self.peer = ""
        """Address of the client, as gRPC names it."""
        self.names: tuple[str, ...] = ()
        """Names in the client's certificate; empty if it showed none that is valid."""
        self.is_admitted = False
        """Whether a call was admitted. This and the allowance belong to ``PeerConduct``."""
        self.allowance: tuple[float, float] | None = None
        """Calls without a credential it may still make, and when they were computed."""
        self.received = received
        self.has_begun = False
        self.calls: dict[int, ReceivedCall] = {}
        """The running calls."""
        self.end: Callable[[Exception], None] = lambda _error: None
        """Ends the connection with an error."""
        self._begin = begin
        self._last = 0
        self._is_draining = False
        self._waiting: dict[ReceivedCall, None] = {}
        self.pulling: dict[ReceivedCall, None] = {}
        """Calls whose next messages are taken with the next bytes to write."""
        self._unwritten = 0
        self._replies += (
            settings(
                {
                    Setting.MAX_CONCURRENT_STREAMS: CONNECTION_CALLS,
                    Setting.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
                    Setting.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
                }
            ),
            window_update(0, CONNECTION_WINDOW_BYTES - INITIAL_WINDOW_BYTES),
        )

    def _take_preface(self, data: bytes) -> bytes:
        begun = self._unread + data
        if not begun.startswith(PREFACE[: len(begun)]):
            raise Http2Violation("expected the beginning of HTTP/2, received other bytes")
        self.has_begun = len(begun) >= len(PREFACE)
        self._unread = b"" if self.has_begun else begun
        return begun[len(PREFACE) :]

    def _allow(self, more: int) -> None:
        self.append(window_update(0, more))

    def take(self) -> bytes:
        """Returns the bytes to write now, and forgets them."""
        pulling, self.pulling = self.pulling, {}
        for call in pulling:
            call.pull()
        if not self._replies:
            return b""
        taken, self._replies = b"".join(self._replies), []
        self._answer_bytes = self._unwritten = 0
        if self._waiting:
            self._send_waiting()
        return taken

    def append(self, encoded: bytes) -> None:
        """Adds a frame to the bytes to write."""
        self._replies.append(encoded)
        self._unwritten += len(encoded)
        self.wake()

    def send(self, call: ReceivedCall) -> None:
        """Adds the unsent data of a call to the bytes to write, as far as there is room."""
        unsent = call.unsent if len(call.unsent) <= LEAST_MAX_FRAME_BYTES else memoryview(call.unsent)
        sent = self._send_data(
            call.number, unsent, min(_TURN_BYTES, call.window, _MAX_UNWRITTEN_BYTES - self._unwritten)
        )
        call.window -= sent
        self._unwritten += sent + HEADER_BYTES * -(-sent // self._max_frame)
        call.unsent = unsent[sent:] or b""
        if call.unsent:
            self._waiting[call] = None

    def drain(self) -> None:
        """Refuses new calls, and says so."""
        self._is_draining = True
        self.append(frame(Kind.GOAWAY, self._last.to_bytes(4, "big") + ErrorCode.NO_ERROR.to_bytes(4, "big")))

    def drop(self, call: ReceivedCall) -> None:
        """Forgets a call."""
        self.calls.pop(call.number, None)
        self._waiting.pop(call, None)
        call.closed()

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for call in waiting:
            self.send(call)
            if not call.unsent:
                call.written()
        if waiting:
            self.wake()

    def _take_data(self, stream: int, flags: int, payload: bytes, length: int) -> int:
        call = self.calls.get(stream)
        if call is not None:
            call.take(payload, length, ends=bool(flags & END_STREAM))
            restored, call.restored = call.restored, 0
            return restored
        if stream > self._last or not stream & 1:
            raise UnexpectedData(stream)
        return 0

    def _take_messages(self, stream: int, messages: list[bytes], length: int) -> int | None:
        call = self.calls.get(stream)
        return None if call is None else call.take_messages(messages, length)

    def _pass_pieces(self, buffer: bytes, position: int) -> tuple[int, int]:
        most = min(self._connection_window, _MAX_UNWRITTEN_BYTES - self._unwritten)
        answers, due, short_frames, pieces, payload_bytes, size = pass_pieces(
            buffer, position, LEAST_USEFUL_BYTES, most, self.streams
        )
        if pieces:
            self._connection_window -= len(answers) - pieces * HEADER_BYTES
            self._consumed += payload_bytes
            self.flood.earn(ITEMS_OF_SENT_FRAME * pieces)
            self.append(answers)
        if due is not None:
            self.calls[due].go_on()
        return size, short_frames - ITEMS_OF_MESSAGE * pieces

    def _check_opening(self, stream: int) -> None:
        if not stream & 1 or (stream <= self._last and stream not in self.calls):
            raise Http2Violation(f"received headers on stream {stream}, which cannot be opened")

    def _take_headers(self, stream: int, flags: int, headers: dict[bytes, bytes]) -> None:
        ends = bool(flags & END_STREAM)
        if stream <= self._last:
            if (call := self.calls.get(stream)) is not None:  # It may have ended within a header block.
                call.take(b"", 0, ends=True)  # Trailers of a client, which gRPC has none of.
            return
        if self._unwritten > _MAX_STATUS_BYTES:
            raise Http2Violation("the client calls, and does not read the answers")
        self._last = stream
        if self._is_draining or len(self.calls) >= CONNECTION_CALLS:
            self.append(frame(Kind.RST_STREAM, ErrorCode.REFUSED_STREAM.to_bytes(4, "big"), stream=stream))
            return
        call = self.calls[stream] = ReceivedCall(self, stream, headers, self._initial_window)
        self._begin(call)
        if ends:
            call.take(b"", 0, ends=True)

    def _widen_stream(self, stream: int, more: int) -> None:
        if (call := self.calls.get(stream)) is not None:
            call.widen(more)

    def _widen(self, more: int) -> None:
        for call in self.calls.values():
            call.widen(more)

    def _take_reset(self, stream: int, code: int) -> None:  # noqa: ARG002 - whatever the reason
        if (call := self.calls.get(stream)) is not None:
            call.cancelled()

    def _take_goaway(self, payload: bytes) -> None:
        pass  # The client's calls go on.
