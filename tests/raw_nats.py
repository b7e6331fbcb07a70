"""A NATS connection that publishes any bytes: as subjects, headers and payloads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class RawNats:
    """Speaks the protocol itself, since client libraries refuse subjects that cannot be decoded."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def publish(self, subject: bytes, payload: bytes, headers: bytes | None = None, reply: bytes = b"") -> None:
        parts = [subject, *([reply] if reply else [])]
        if headers is None:
            command, sizes = b"PUB", [len(payload)]
        else:
            command, sizes = b"HPUB", [len(headers), len(headers) + len(payload)]
        line = b" ".join([command, *parts, *(b"%d" % size for size in sizes)])
        self._writer.write(line + b"\r\n" + (headers or b"") + payload + b"\r\n")

    async def flush(self) -> None:
        """Returns when the server has taken everything."""
        self._writer.write(b"PING\r\n")
        await self._writer.drain()
        async with asyncio.timeout(30):
            while not (await self._reader.readline()).startswith(b"PONG"):
                continue

    async def inboxes(self, count: int) -> set[bytes]:
        """Subjects of the first ``count`` replies that pass; the subscription stays."""
        self._writer.write(b"SUB _INBOX.> 1\r\n")
        await self.flush()
        found: set[bytes] = set()
        async with asyncio.timeout(30):
            while len(found) < count:
                line = await self._reader.readline()
                if line.startswith((b"MSG ", b"HMSG ")):
                    found.add(line.split()[1])
                    await self._reader.readexactly(int(line.split()[-1]) + 2)
        self._writer.write(b"UNSUB 1\r\n")
        return found


@asynccontextmanager
async def raw_nats(url: str) -> AsyncIterator[RawNats]:
    """A connection while the context lasts."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    await reader.readline()
    writer.write(b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"lang":"raw","version":"0"}\r\n')
    try:
        yield RawNats(reader, writer)
    finally:
        writer.close()
