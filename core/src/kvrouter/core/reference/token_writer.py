"""Writes single tokens of a worker's output to a client."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable

from kvrouter.core.reference.output_writer import Client, OutputWriter
from kvrouter.core.reference.outputs import read_output


class TokenWriter(OutputWriter):
    """Writes events of one client that differ only in a token, which it reads from a worker's pieces of output."""

    def __init__(
        self,
        pending: dict[asyncio.Transport, list[bytes]],
        wake: Callable[[], object],
        transport: asyncio.Transport,
        protocol: Client,
        before: bytes,
        after: bytes,
        *,
        are_chunks: bool,
    ) -> None:
        """Takes nothing before ``begin``.

        Args:
            pending: Where events are added, by client.
            wake: Called when the first one is.
            transport: The client.
            protocol: Says whether it reads.
            before: The bytes of an event before its token.
            after: Those after it.
            are_chunks: Whether each event is a chunk of an HTTP response.
        """
        super().__init__(protocol)
        self._pending = pending
        self._wake = wake
        self._transport = transport
        self._before = before
        self._after = after
        self._are_chunks = are_chunks
        self.total = 0
        """Number of tokens taken so far."""
        self._taken = array("I")

    def take(self, piece: bytes) -> bool:
        """Takes the token of an encoded WorkerServiceGenerateResponse that has nothing else, and writes its event.

        Returns False, and does nothing, if there is anything else to do, or while the client does not read.
        """
        plain = read_output(piece)
        if plain is None or not self._may_take(1):
            return False
        token_ids, finish_reason, cached_tokens = plain
        if len(token_ids) != 1 or finish_reason or cached_tokens is not None:
            return False
        self._write(*token_ids)
        self._count(1)
        self.total += 1
        self._taken.extend(token_ids)
        return True

    def taken(self) -> tuple[int, bytes]:
        """Returns the number of tokens taken since ``begin``, and the tokens as packed little-endian u32."""
        taken, self._taken = self._taken, array("I")
        return self._end(), taken.tobytes()

    def _write(self, token: int) -> None:
        event = b"%b%d%b" % (self._before, token, self._after)
        if self._are_chunks:
            event = b"%x\r\n%b\r\n" % (len(event), event)
        if not self._pending:
            self._wake()
        self._pending.setdefault(self._transport, []).append(event)
