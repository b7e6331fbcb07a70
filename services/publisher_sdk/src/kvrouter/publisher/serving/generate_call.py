"""A Generate call over gRPC, whose responses wait for the caller to read them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from kvrouter.net.calls.limits import MAX_UNREAD_BYTES, BufferFull, ResponseBuffer
from kvrouter.v1.errors import KvRouterError, TooMuchUnread


class GenerateCall:
    """An OutputCall with one task as its reader."""

    def __init__(self) -> None:
        self.on_cancelled: Callable[[], None] | None = None
        """Called once if the call ends before it is ended here."""
        self._buffer = ResponseBuffer()
        self._ended = False
        self._error: KvRouterError | None = None

    def respond(self, encoded: bytes) -> None:
        """Queues a response. If too much is unread, the call ends instead."""
        if self._ended:
            return
        try:
            self._buffer.append(encoded)
        except BufferFull as full:
            unread = f"the caller has not read {full.unread_bytes} bytes of output; the limit is {MAX_UNREAD_BYTES}"
            self.fail(TooMuchUnread(unread))
            self.cancel()

    def end(self, encoded: bytes | None = None) -> None:
        """Ends the call, with a last response if there is one."""
        if encoded is not None:
            self.respond(encoded)
        self._ended = True
        self._buffer.end()

    def fail(self, error: KvRouterError) -> None:
        """Ends the call with an error."""
        if not self._ended:
            self._error = error
            self._ended = True
            self._buffer.end()

    def cancel(self) -> None:
        """Calls ``on_cancelled``, once."""
        self._ended = True
        notify, self.on_cancelled = self.on_cancelled, None
        if notify is not None:
            notify()

    async def responses(self) -> AsyncIterator[bytes]:
        """Yields the responses.

        Raises:
            KvRouterError: the call has failed.
        """
        while taken := await self._buffer.take():
            for response in taken:
                yield response
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # Its traceback refers to this frame.
