"""A snapshot as bytes, and back: a SnapshotHeader, then RankState messages, each preceded by its length as a varint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from kvrouter.indexer.index.rank_dump import RankDump
from kvrouter.v1.indexer_pb2 import RankState
from kvrouter.v1.snapshot_pb2 import SnapshotHeader
from xxhash import xxh3_64

FORMAT_VERSION = 1
_SEED = 1337


class InvalidSnapshot(Exception):
    """The bytes are no snapshot that can be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot that was read."""

    header: SnapshotHeader
    ranks: list[RankDump]


class SnapshotWriter:
    """Puts a snapshot together, chunk by chunk: each call is short, whatever the size of the index."""

    def __init__(self, header: SnapshotHeader) -> None:
        """``header`` says component, stream, sequence, time and replica; the rest of it is filled in."""
        self._header = SnapshotHeader()
        self._header.CopyFrom(header)
        self._header.format_version = FORMAT_VERSION
        self._body: list[bytes] = []
        self._checksum = xxh3_64(seed=_SEED)

    @property
    def blocks(self) -> int:
        """Blocks so far."""
        return self._header.blocks

    def add(self, chunk: bytes) -> None:
        """Adds a RankState chunk; those of a rank follow each other, the last one marked."""
        state = RankState.FromString(chunk)
        self._header.blocks += len(state.blocks)
        self._header.ranks += state.last
        for part in (_varint(len(chunk)), chunk):
            self._header.body_bytes += len(part)
            self._body.append(part)
            self._checksum.update(part)

    def parts(self) -> list[bytes]:
        """Returns the snapshot in pieces: it is by far the largest thing that an Indexer makes, and never copied."""
        self._header.body_checksum = self._checksum.intdigest()
        encoded = self._header.SerializeToString()
        return [_varint(len(encoded)), encoded, *self._body]


def decode(data: bytes | bytearray, expected: SnapshotHeader) -> Snapshot:
    """Reads a snapshot.

    Args:
        data: The object.
        expected: Its component, block_size and hash_scheme must be the snapshot's.

    Raises:
        InvalidSnapshot: it is cut short, damaged, of a later version, or of another component.
    """
    header, body = check(data, expected)
    ranks = list(_ranks(body))
    if len(ranks) != header.ranks:
        raise InvalidSnapshot(f"{len(ranks)} ranks of {header.ranks}")
    return Snapshot(header, ranks)


def check(data: bytes | bytearray, expected: SnapshotHeader) -> tuple[SnapshotHeader, memoryview]:
    """Returns the header and the body of a snapshot that is whole and undamaged.

    Raises:
        InvalidSnapshot: as ``decode``.
    """
    length, start = _read_varint(data, 0)
    try:
        header = SnapshotHeader.FromString(bytes(data[start : start + length]))
    except DecodeError as error:
        raise InvalidSnapshot(f"its header cannot be read: {error}") from None
    if header.format_version > FORMAT_VERSION or not header.format_version:
        raise InvalidSnapshot(f"format version {header.format_version}, this reader knows {FORMAT_VERSION}")
    for name in ("component", "block_size", "hash_scheme"):
        if getattr(header, name) != getattr(expected, name):
            raise InvalidSnapshot(f"{name} is {getattr(header, name)!r}, not {getattr(expected, name)!r}")
    body = memoryview(data)[start + length :]
    if len(body) != header.body_bytes:
        raise InvalidSnapshot(f"{len(body)} bytes of {header.body_bytes}")
    if xxh3_64(body, seed=_SEED).intdigest() != header.body_checksum:
        raise InvalidSnapshot("its checksum differs")
    return header, body


def _ranks(body: memoryview) -> Iterator[RankDump]:
    chunks: list[bytes] = []
    at = 0
    while at < len(body):
        length, at = _read_varint(body, at)
        chunks.append(bytes(body[at : at + length]))
        at += length
        try:
            state = RankState.FromString(chunks[-1])
        except DecodeError as error:
            raise InvalidSnapshot(f"a rank cannot be read: {error}") from None
        if state.last:
            cursor = (state.cursor.incarnation, state.cursor.next_event_id)
            yield RankDump((state.rank.worker_id, state.rank.dp_rank), cursor, state.partial, chunks)
            chunks = []
    if chunks:
        raise InvalidSnapshot("its last rank is not whole")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes | bytearray | memoryview, at: int) -> tuple[int, int]:
    """The number at a place, and the place after it."""
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise InvalidSnapshot("it is cut short")
