"""Buffers the encoded responses of one call for a client with its own speed."""

from __future__ import annotations

import asyncio

MAX_UNREAD_BYTES = 4 << 20
"""Memory of unread responses at which a call ends: some forty thousand outputs of one token."""
_RESPONSE_BYTES = 64
"""Memory of a response besides its content."""


class BufferFull(Exception):
    """The client has left more unread than the buffer holds."""

    def __init__(self, unread_bytes: int) -> None:
        super().__init__(f"{unread_bytes} bytes are unread; the limit is {MAX_UNREAD_BYTES}")
        self.unread_bytes = unread_bytes


class ResponseBuffer:
    """Responses for one task. Appending never waits."""

    def __init__(self) -> None:
        self._responses: list[bytes] = []
        self._unread_bytes = 0
        self._changed = asyncio.Event()
        self._ended = False

    def append(self, encoded: bytes) -> None:
        """Adds a response.

        Raises:
            BufferFull: too much is unread. All of it is dropped.
        """
        self._unread_bytes += len(encoded) + _RESPONSE_BYTES
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._responses.clear()
            raise BufferFull(self._unread_bytes)
        self._responses.append(encoded)
        self._changed.set()

    def end(self) -> None:
        """Ends the responses."""
        self._ended = True
        self._changed.set()

    async def take(self) -> list[bytes]:
        """Waits for responses and returns them; an empty list at the end."""
        while not self._responses and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        taken, self._responses, self._unread_bytes = self._responses, [], 0
        return taken
