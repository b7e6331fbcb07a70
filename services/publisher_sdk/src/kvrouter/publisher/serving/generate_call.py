"""A Generate call over gRPC, whose responses wait for a caller that reads at its own speed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from kvrouter.net.calls import CallRefused, TooMuchUnread

MAX_UNREAD_BYTES = 4 << 20
"""Unread responses at which a call ends."""
_RESPONSE_BYTES = 64
"""Memory of a response besides its content."""


class GenerateCall:
    """An OutputCall that one task reads."""

    def __init__(self) -> None:
        self.on_cancelled: Callable[[], None] | None = None
        """Called once if the call ends before it is ended here."""
        self._responses: list[bytes] = []
        self._unread_bytes = 0
        self._changed = asyncio.Event()
        self._ended = False
        self._error: CallRefused | None = None

    def respond(self, encoded: bytes) -> None:
        """Queues a response. If too much is unread, the call ends instead."""
        if self._ended:
            return
        self._unread_bytes += len(encoded) + _RESPONSE_BYTES
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._responses.clear()
            unread = f"the caller has not read {self._unread_bytes} bytes of output; the limit is {MAX_UNREAD_BYTES}"
            self.fail(TooMuchUnread(unread))
            self.cancel()
            return
        self._responses.append(encoded)
        self._changed.set()

    def end(self, encoded: bytes | None = None) -> None:
        """Ends the call, with a last response if there is one."""
        if encoded is not None:
            self.respond(encoded)
        self._ended = True
        self._changed.set()

    def fail(self, error: CallRefused) -> None:
        """Ends the call with an error."""
        if not self._ended:
            self._error = error
            self._ended = True
            self._changed.set()

    def cancel(self) -> None:
        """Calls ``on_cancelled``, once."""
        self._ended = True
        notify, self.on_cancelled = self.on_cancelled, None
        if notify is not None:
            notify()

    async def responses(self) -> AsyncIterator[bytes]:
        """Yields the responses.

        Raises:
            CallRefused: the call has failed.
        """
        while True:
            while not self._responses and not self._ended:
                self._changed.clear()
                await self._changed.wait()
            taken, self._responses, self._unread_bytes = self._responses, [], 0
            for response in taken:
                yield response
            if self._ended and not self._responses:
                break
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # Its traceback refers to this frame.
