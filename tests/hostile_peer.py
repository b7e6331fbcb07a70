"""A peer that speaks HTTP/2 by hand, so that it can do what no gRPC client would."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvrouter.net.http2 import frames
from kvrouter.net.http2.frames import Kind, Setting, frame, settings

OPEN_STREAM = "/kvrouter.v1.CallStreamService/OpenCallStream"


def request_headers(path: str, metadata: Sequence[tuple[str, str]] = ()) -> bytes:
    """Encodes the headers of a gRPC call, without tables (RFC 7541, section 6.2.2)."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
    fields += [("content-type", "application/grpc"), ("te", "trailers"), *metadata]
    block = bytearray()
    for name, value in fields:
        assert max(len(name), len(value)) < 127
        block += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return bytes(block)


def message_head(size: int) -> bytes:
    """Returns the five bytes before a gRPC message of that size."""
    return struct.pack(">BI", 0, size)


class HostilePeer:
    """One connection. It answers no ping unless it is told to read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.ended: dict[int, bytes] = {}
        """Streams that the server has ended, with the header blocks that it sent."""
        self.received = 0
        """Bytes of messages received."""
        self.sent = 0
        """Bytes sent."""
        self._stream = -1

    def send(self, data: bytes) -> None:
        self.sent += len(data)
        self.writer.write(data)

    def open(self, path: str, metadata: Sequence[tuple[str, str]] = (), *, ends: bool = False) -> int:
        """Opens a stream with its headers and nothing else; returns its number."""
        self._stream += 2
        flags = frames.END_HEADERS | (frames.END_STREAM if ends else 0)
        self.send(frame(Kind.HEADERS, request_headers(path, metadata), flags=flags, stream=self._stream))
        return self._stream

    def data(self, stream: int, payload: bytes) -> None:
        self.send(frame(Kind.DATA, payload, stream=stream))

    async def read(self) -> None:
        """Reads what the server sends until it closes the connection."""
        headers: dict[int, bytes] = {}
        while True:
            try:
                head = await self.reader.readexactly(frames.HEADER_BYTES)
                length, kind, flags, stream = frames.read_frame_header(head, 0)
                payload = await self.reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            if kind in (Kind.SETTINGS, Kind.PING) and not flags & frames.ACK:
                self.send(frame(Kind(kind), payload if kind == Kind.PING else b"", flags=frames.ACK))
            elif kind == Kind.DATA:
                self.received += length
            elif kind == Kind.HEADERS:
                headers[stream] = headers.get(stream, b"") + payload
            if kind == Kind.RST_STREAM or (kind in (Kind.DATA, Kind.HEADERS) and flags & frames.END_STREAM):
                self.ended[stream] = headers.pop(stream, b"")


@asynccontextmanager
async def hostile_peer(
    address: str, *, reads: bool = True, window: int = frames.INITIAL_WINDOW_BYTES
) -> AsyncIterator[HostilePeer]:
    """Connects to host:port. ``reads`` reads what the server sends; ``window`` is what it may send on a stream."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    peer = HostilePeer(reader, writer)
    peer.send(frames.PREFACE + settings({Setting.INITIAL_WINDOW_SIZE: window}))
    reading = asyncio.create_task(peer.read()) if reads else None
    try:
        yield peer
    finally:
        if reading is not None:
            reading.cancel()
            await asyncio.wait([reading])
        writer.transport.abort()
