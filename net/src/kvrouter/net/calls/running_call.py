"""A call as its caller keeps it."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Protocol

from kvrouter.core import TokenWriter
from kvrouter.v1.errors import KvRouterError


class ResponseReceiver(Protocol):
    """Receives responses and end of a call, from the loop of the stream. Must not block.

    ``on_end`` or ``on_error`` is called once and last, unless the caller cancels the call.
    """

    def on_response(self, encoded: bytes) -> TokenWriter | None:
        """Receives a response. May return a writer, to which the following responses are offered first."""

    def on_end(self) -> None:
        """Receives the end of the call."""

    def on_error(self, error: KvRouterError) -> None:
        """Receives the failure of the call."""


class Timer(Protocol):
    """A timer of the event loop."""

    def cancel(self) -> None:
        """Stops the timer."""


class CallStream(Protocol):
    """The stream of a call."""

    def cancel(self, call: RunningCall) -> None:
        """Ends a call."""


Lane = OrderedDict["RunningCall", None]
"""Waiting calls, in order."""


class RunningCall:
    """A started call."""

    __slots__ = (
        "_expires_at",
        "_stream",
        "lane",
        "method",
        "number",
        "receiver",
        "request",
        "sent_bytes",
        "timer",
        "trace",
    )

    def __init__(
        self,
        stream: CallStream,
        method: int,
        request: bytes,
        receiver: ResponseReceiver,
        time_left: float | None,
        trace: str,
    ) -> None:
        self._stream = stream
        self._expires_at = None if time_left is None else time.monotonic() + time_left
        self.method = method
        self.request = request
        self.receiver: ResponseReceiver | None = receiver
        """Receives the responses; None once the call has ended for its caller."""
        self.trace = trace
        self.number = 0
        """Number on the stream; 0 while no part is sent."""
        self.sent_bytes = 0
        """Bytes of the request sent in parts."""
        self.timer: Timer | None = None
        """Ends the call when its time is up; cancelled when the call ends before."""
        self.lane: Lane | None = None
        """Where the call waits; None once its last part is sent or it has ended."""

    def cancel(self) -> None:
        """Cancels the call. Its receiver is not called any more."""
        if self.receiver is not None:
            self._stream.cancel(self)

    def release(self) -> ResponseReceiver | None:
        """Returns the receiver and forgets it, because the call ends; None if it has ended before."""
        receiver, self.receiver = self.receiver, None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        return receiver

    def time_left_ms(self) -> int | None:
        """Returns the time left, milliseconds, at least 1; None for no limit."""
        if self._expires_at is None:
            return None
        return min(max(1, int((self._expires_at - time.monotonic()) * 1e3)), 0xFFFF_FFFF)
