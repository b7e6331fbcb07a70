"""A call from the point of view of its handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrouter.net.calls.errors import failure_of
from kvrouter.net.http2 import ReceivedCall
from kvrouter.net.logs import get_logger
from kvrouter.v1.calls_pb2 import CallFailure, CallResponseKind
from kvrouter.v1.errors import KvRouterError

log = get_logger(__name__)

MORE = CallResponseKind.CALL_RESPONSE_KIND_UNSPECIFIED
LAST = CallResponseKind.CALL_RESPONSE_KIND_LAST
PART = CallResponseKind.CALL_RESPONSE_KIND_PART
ENDED = CallResponseKind.CALL_RESPONSE_KIND_ENDED
FAILED = CallResponseKind.CALL_RESPONSE_KIND_FAILED


class ResponseStream(Protocol):
    """The stream of a call."""

    client_name: str
    """Name the client gave in its hello."""
    metadata: Sequence[tuple[str, str | bytes]]
    """Metadata with which the client opened the stream."""
    unread_call_bytes: int
    """Size of a call's unread responses at which it may add no further one."""

    def queue(self, call: ServerCall, kind: int, response: bytes | CallFailure) -> None:
        """Queues a response of a call."""

    def end_unread(self, call: ServerCall) -> None:
        """Ends a call of which too much is unread."""

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Calls the callback once the stream has ended."""


class ServerCall:
    """A call a handler answers."""

    __slots__ = (
        "ended",
        "number",
        "on_cancelled",
        "stream",
        "time_left",
        "trace_context",
        "unread_bytes",
    )

    def __init__(self, stream: ResponseStream, number: int, time_left: float | None, trace_context: str) -> None:
        self.stream = stream
        """The stream of the call; the same object for all calls of one connection."""
        self.ended = False
        """Whether the call has ended. Further responses are dropped."""
        self.number = number
        self.time_left = time_left
        """Time left when the call arrived, seconds; None for no limit."""
        self.trace_context = trace_context
        """Trace context (W3C traceparent); empty for none."""
        self.unread_bytes = 0
        """Size of the responses not handed to the stream yet."""
        self.on_cancelled: Callable[[], None] | None = None
        """Called once if the call ends before its handler ends it: cancelled, lost with its stream, or too much of it
        is unread."""

    @property
    def client(self) -> str:
        """Name the client gave in its hello."""
        return self.stream.client_name

    def respond(self, encoded: bytes) -> None:
        """Queues a response. If too much is unread, the call ends instead."""
        if not self.ended:
            if self.unread_bytes >= self.stream.unread_call_bytes:
                self.stream.end_unread(self)
                return
            self.stream.queue(self, MORE, encoded)

    def end(self, encoded: bytes | None = None) -> None:
        """Ends the call, with a last response if there is one."""
        if not self.ended:
            self.ended = True
            self.stream.queue(self, ENDED if encoded is None else LAST, encoded or b"")

    def fail(self, error: KvRouterError) -> None:
        """Ends the call with an error."""
        if not self.ended:
            self.ended = True
            self.stream.queue(self, FAILED, failure_of(error))

    def abandon(self) -> None:
        """Ends the call without an answer and calls ``on_cancelled``."""
        if not self.ended:
            self.ended = True
            self.cancelled()

    def cancelled(self) -> None:
        """Calls ``on_cancelled``, once."""
        notify, self.on_cancelled = self.on_cancelled, None
        if notify is not None:
            try:
                notify()
            except Exception:
                log.exception("call.cancel_failed", call=self.number)


UnaryHandler = Callable[[bytes, "ServerCall"], "bytes | Awaitable[bytes]"]
"""Answers an encoded request with an encoded response, or with an awaitable of one. May raise ``KvRouterError``."""

StreamingHandler = Callable[[bytes, "ServerCall"], None]
"""Starts a call with responses through the ``ServerCall``. May raise ``KvRouterError``. Must not block."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method on call streams."""

    name: str
    """Full name, such as kvrouter.v1.IndexerService/FindMatches."""
    unary: UnaryHandler | None = None
    streaming: StreamingHandler | None = None


class Peer(Protocol):
    """Who opened a connection, with the credential it showed."""

    def open_stream(self, methods: Sequence[str]) -> None:
        """Admits a peer of one of the methods, such as kvrouter.v1.IndexerService/FindMatches.

        Raises:
            KvRouterError: it may call none of them, or its credential is no longer valid.
        """

    def check(self, method: str) -> None:
        """Admits a peer to a method.

        Raises:
            KvRouterError: it may not call it.
        """


class PeerCheck(Protocol):
    """Finds out who calls."""

    def peer(self, context: ReceivedCall) -> Peer | None:
        """Returns the peer of a call; None for one that may call all methods."""
