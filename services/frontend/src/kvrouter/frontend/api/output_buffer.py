"""Buffers the output of one request for a gRPC client, which reads at its own speed."""

from __future__ import annotations

import asyncio

from kvrouter.runtime.errors import TooLarge
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateResponse, RoutingInfo
from kvrouter.v1.worker_pb2 import GenerateOutput

MAX_UNREAD_BYTES = 4 << 20
"""Memory of unread output at which a request ends: some forty thousand pieces of one token."""
_PIECE_BYTES = 64
"""Memory of a piece besides its content."""


class OutputBuffer:
    """An OutputReceiver whose output is taken by one reader, as encoded FrontendServiceGenerateResponse messages."""

    def __init__(self) -> None:
        self._responses: list[bytes] = []
        self._bytes = 0
        self._routing = b""
        self._changed = asyncio.Event()
        self._ended = False

    def routed(self, routing: RoutingInfo) -> None:
        """Adds the routing to the next piece."""
        self._routing = FrontendServiceGenerateResponse(routing=routing).SerializeToString()

    def output(self, encoded: bytes, output: GenerateOutput) -> None:  # noqa: ARG002
        """Buffers a piece.

        Raises:
            TooLarge: the client has not read too much; what it has not read is dropped.
        """
        if self._routing:
            encoded, self._routing = encoded + self._routing, b""
        self._bytes += len(encoded) + _PIECE_BYTES
        if self._bytes > MAX_UNREAD_BYTES:
            self._responses.clear()
            raise TooLarge(
                f"the client has not read {self._bytes} bytes of output; the limit is {MAX_UNREAD_BYTES}",
                advice="Read the output as it arrives.",
            )
        self._responses.append(encoded)
        self._changed.set()

    def end(self) -> None:
        """Ends the output."""
        self._ended = True
        self._changed.set()

    async def take(self) -> list[bytes]:
        """Waits for output and returns it; nothing at the end."""
        while not self._responses and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        taken, self._responses, self._bytes = self._responses, [], 0
        return taken
