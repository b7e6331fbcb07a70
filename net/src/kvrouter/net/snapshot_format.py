"""Encoding of snapshots: a SnapshotHeader, then records, each preceded by its length as a varint."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from google.protobuf.message import DecodeError
from kvrouter.net.wire_format import encode_varint
from kvrouter.v1.common_pb2 import RankState
from kvrouter.v1.snapshot_pb2 import SnapshotHeader
from xxhash import xxh3_64

FORMAT_VERSION = 1
_SEED = 1337
_LEAST_BLOCK_BYTES = 8
"""Size of a block's engine hash alone."""


class InvalidSnapshot(Exception):
    """Raised when bytes are not a usable snapshot; the message says why."""


class SnapshotWriter:
    """Builds a snapshot chunk by chunk: each call is short for an index of any size."""

    def __init__(self, header: SnapshotHeader) -> None:
        """Starts a snapshot.

        ``header`` has component, block size, hash scheme, stream, sequence, time and replica, and counts what
        ``append`` will add; the writer sets the rest.
        """
        self._header = SnapshotHeader()
        self._header.CopyFrom(header)
        self._header.format_version = FORMAT_VERSION
        self._body: deque[bytes] = deque()
        self._checksum = xxh3_64(seed=_SEED)

    @property
    def blocks(self) -> int:
        """Returns the number of blocks added so far."""
        return self._header.blocks

    def add(self, chunk: bytes) -> None:
        """Adds an encoded RankState chunk. The chunks of a rank must be consecutive, the last one with ``last`` set."""
        state = RankState.FromString(chunk)
        self._header.blocks += len(state.blocks)
        self._header.ranks += state.last
        self.append(chunk)

    def append(self, record: bytes) -> None:
        """Adds a record whose blocks and ranks the header counts already."""
        for part in (encode_varint(len(record)), record):
            self._header.body_bytes += len(part)
            self._body.append(part)
            self._checksum.update(part)

    def parts(self) -> deque[bytes]:
        """Returns the snapshot in parts, which the caller may take out of the queue.

        A snapshot is the largest object of an Indexer: it is never copied into one, and released part by part.
        """
        self._header.body_checksum = self._checksum.intdigest()
        encoded = self._header.SerializeToString()
        self._body.extendleft((encoded, encode_varint(len(encoded))))
        return self._body


class SnapshotCheck:
    """Checks version, component, length and checksum of a snapshot piece by piece, without keeping it."""

    def __init__(self, expected: SnapshotHeader) -> None:
        """Starts a check. ``expected`` has the required component, block_size and hash_scheme."""
        self._expected = expected
        self._header: SnapshotHeader | None = None
        self._body_bytes = 0
        self._checksum = xxh3_64(seed=_SEED)

    def add(self, piece: bytes | bytearray | memoryview) -> None:
        """Adds the next piece; the first one must contain the whole header.

        Raises:
            InvalidSnapshot: the snapshot is truncated, of a later version, or of another component.
        """
        body = memoryview(piece)
        if self._header is None:
            encoded, body = _divided(body)
            self._header = _read_header(encoded, self._expected)
        self._body_bytes += len(body)
        self._checksum.update(body)

    def finish(self) -> SnapshotHeader:
        """Returns the header, after the last piece.

        Raises:
            InvalidSnapshot: the snapshot is truncated or damaged.
        """
        header = self._header
        if header is None:
            raise InvalidSnapshot("the snapshot is empty")
        if self._body_bytes != header.body_bytes:
            raise InvalidSnapshot(f"expected {header.body_bytes} bytes after the header, received {self._body_bytes}")
        if self._checksum.intdigest() != header.body_checksum:
            raise InvalidSnapshot("the checksum differs: the snapshot is damaged")
        return header


def records_after(data: bytes | bytearray, header: SnapshotHeader) -> Iterator[bytes]:
    """Yields the records of a checked snapshot with this header.

    Raises:
        InvalidSnapshot: a record is truncated.
    """
    body = memoryview(data)[len(data) - header.body_bytes :]
    at = 0
    while at < len(body):
        length, at = _read_varint(body, at)
        if len(body) - at < length:
            raise InvalidSnapshot("the snapshot is truncated")
        yield bytes(body[at : at + length])
        at += length


def claimed_blocks(data: bytes | bytearray) -> int:
    """Returns how many blocks a snapshot says it has, whether or not it can be used; 0 if its header is damaged."""
    try:
        header = SnapshotHeader.FromString(_divided(memoryview(data))[0])
    except (InvalidSnapshot, DecodeError):
        return 0
    return header.blocks if header.blocks * _LEAST_BLOCK_BYTES <= header.body_bytes else 0


def _divided(data: memoryview) -> tuple[bytes, memoryview]:
    """Returns the encoded header, and what follows it."""
    length, start = _read_varint(data, 0)
    return bytes(data[start : start + length]), data[start + length :]


def _read_header(encoded: bytes, expected: SnapshotHeader) -> SnapshotHeader:
    try:
        header = SnapshotHeader.FromString(encoded)
    except DecodeError as error:
        raise InvalidSnapshot(f"the header cannot be decoded: {error}") from None
    if header.format_version > FORMAT_VERSION or not header.format_version:
        raise InvalidSnapshot(
            f"expected at most format version {FORMAT_VERSION}, received version {header.format_version}; "
            "upgrade this replica if a later one wrote it"
        )
    for name in ("component", "block_size", "hash_scheme"):
        if getattr(header, name) != getattr(expected, name):
            raise InvalidSnapshot(f"expected {name} {getattr(expected, name)!r}, received {getattr(header, name)!r}")
    return header


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Returns the number at an offset, and the offset after it."""
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise InvalidSnapshot("the snapshot is truncated")
