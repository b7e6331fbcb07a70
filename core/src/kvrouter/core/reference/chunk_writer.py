"""Gives a client the chunks of an engine's stream, as the engine wrote them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from kvrouter.core.reference.output_writer import Client, OutputWriter

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
_EVENT_END = b"\n\n"
_CHUNK_END = b"\r\n"
_DATA = b"data:"
_USAGE = re.compile(rb'"usage"(?![ \t\n\r\f]*:[ \t\n\r\f]*null)')


class ChunkWriter(OutputWriter):
    """Writes whole chunks of HTTP/1.1 that have whole server-sent events, each of which counts as a token."""

    def __init__(
        self, pending: Mapping[asyncio.Transport, list[bytes]], transport: asyncio.Transport, protocol: Client
    ) -> None:
        """Takes nothing before ``begin``.

        Args:
            pending: What is to be written before, by client.
            transport: The client.
            protocol: Says whether it reads.
        """
        super().__init__(protocol)
        self._pending = pending
        self._transport = transport

    def take(self, piece: bytes) -> bool:
        """Writes chunks, at once: the event loop collects the writes of a step itself.

        Returns False, and does nothing, if these are no whole chunks with whole events, or have a usage, which somebody
        must read; and while the client does not read, or gets other bytes before.
        """
        tokens = _count_tokens(piece)
        if not self._may_take(tokens) or self._transport in self._pending or self._transport.is_closing():
            return False
        self._transport.write(piece)
        self._count(tokens)
        return True

    def taken(self) -> tuple[int, bytes]:
        """Returns the number of tokens taken since ``begin``. Their ids are not known."""
        return self._end(), b""


def _count_tokens(chunks: bytes) -> int:
    """Returns the number of events; 0 if there is anything else."""
    at = tokens = 0
    while size := _SIZE.match(chunks, at):
        begin, end = size.end(), size.end() + int(size[1], 16)
        events, at = chunks[begin:end], end + len(_CHUNK_END)
        if chunks[end:at] != _CHUNK_END or not events.endswith(_EVENT_END) or _USAGE.search(events):
            return 0
        tokens += events.count(_DATA)
    return tokens if at == len(chunks) else 0
