"""Buffers the output of one request for a client that reads at its own speed."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from kvrouter.runtime.errors import TooLarge
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateResponse, RoutingInfo
from kvrouter.v1.worker_pb2 import GenerateOutput

MAX_UNREAD_BYTES = 4 << 20
"""Unread output at which a request ends: some ten thousand pieces of one token."""
_PIECE_BYTES = 320
"""Memory of a piece besides its encoding."""


class Piece(NamedTuple):
    """A piece of the output, encoded for the client, with the fields that the gateway reads."""

    encoded: bytes
    """A FrontendServiceGenerateResponse."""
    output: GenerateOutput
    routing: RoutingInfo | None
    """Where the request runs; set in the first piece of an attempt."""


class OutputBuffer:
    """An OutputReceiver whose pieces are taken by one reader."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._bytes = 0
        self._routing: RoutingInfo | None = None
        self._changed = asyncio.Event()
        self._ended = False

    def routed(self, routing: RoutingInfo) -> None:
        """Adds the routing to the next piece."""
        self._routing = routing

    def output(self, encoded: bytes, output: GenerateOutput) -> None:
        """Buffers a piece.

        Raises:
            TooLarge: the client has not read too much; what it has not read is dropped.
        """
        routing, self._routing = self._routing, None
        if routing is not None:
            encoded += FrontendServiceGenerateResponse(routing=routing).SerializeToString()
        self._bytes += len(encoded) + _PIECE_BYTES
        if self._bytes > MAX_UNREAD_BYTES:
            self._pieces.clear()
            raise TooLarge(
                f"the client has not read {self._bytes} bytes of output; the limit is {MAX_UNREAD_BYTES}",
                advice="Read the output as it arrives.",
            )
        self._pieces.append(Piece(encoded, output, routing))
        self._changed.set()

    def end(self) -> None:
        """Ends the output."""
        self._ended = True
        self._changed.set()

    async def take(self) -> list[Piece]:
        """Waits for output and returns it; nothing at the end."""
        while not self._pieces and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        taken, self._pieces, self._bytes = self._pieces, [], 0
        return taken
