"""Encoding of snapshots: a SnapshotHeader, then RankState messages, each preceded by its length as a varint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from kvrouter.indexer.index.rank_dump import RankDump
from kvrouter.net.varint import encode_varint
from kvrouter.v1.indexer_pb2 import RankState
from kvrouter.v1.snapshot_pb2 import SnapshotHeader
from xxhash import xxh3_64

FORMAT_VERSION = 1
_SEED = 1337


class InvalidSnapshot(Exception):
    """Raised when bytes are not a usable snapshot; the message says why."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A decoded snapshot."""

    header: SnapshotHeader
    ranks: list[RankDump]


class SnapshotWriter:
    """Builds a snapshot chunk by chunk, so that each call is short for an index of any size."""

    def __init__(self, header: SnapshotHeader) -> None:
        """Starts a snapshot. ``header`` has component, stream, sequence, time and replica; the writer sets the rest."""
        self._header = SnapshotHeader()
        self._header.CopyFrom(header)
        self._header.format_version = FORMAT_VERSION
        self._body: list[bytes] = []
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
        for part in (encode_varint(len(chunk)), chunk):
            self._header.body_bytes += len(part)
            self._body.append(part)
            self._checksum.update(part)

    def parts(self) -> list[bytes]:
        """Returns the snapshot in parts. It is the largest object of an Indexer, so it is never copied into one."""
        self._header.body_checksum = self._checksum.intdigest()
        encoded = self._header.SerializeToString()
        return [encode_varint(len(encoded)), encoded, *self._body]


def decode(data: bytes | bytearray, expected: SnapshotHeader) -> Snapshot:
    """Decodes a snapshot.

    Args:
        data: The encoded snapshot.
        expected: Header whose component, block_size and hash_scheme the snapshot must have.

    Raises:
        InvalidSnapshot: the snapshot is truncated, damaged, of a later version, or of another component.
    """
    header, body = check(data, expected)
    ranks = list(_ranks(body))
    if len(ranks) != header.ranks:
        raise InvalidSnapshot(f"expected {header.ranks} ranks, received {len(ranks)}")
    return Snapshot(header, ranks)


def check(data: bytes | bytearray, expected: SnapshotHeader) -> tuple[SnapshotHeader, memoryview]:
    """Checks length, version, component and checksum of a snapshot. Returns its header and body.

    Raises:
        InvalidSnapshot: the snapshot is truncated, damaged, of a later version, or of another component.
    """
    length, start = _read_varint(data, 0)
    try:
        header = SnapshotHeader.FromString(bytes(data[start : start + length]))
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
    body = memoryview(data)[start + length :]
    if len(body) != header.body_bytes:
        raise InvalidSnapshot(f"expected {header.body_bytes} bytes after the header, received {len(body)}")
    if xxh3_64(body, seed=_SEED).intdigest() != header.body_checksum:
        raise InvalidSnapshot("the checksum differs: the snapshot is damaged")
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
            raise InvalidSnapshot(f"a rank cannot be decoded: {error}") from None
        if state.last:
            cursor = (state.cursor.incarnation, state.cursor.next_event_id)
            yield RankDump((state.rank.worker_id, state.rank.dp_rank), cursor, state.partial, chunks)
            chunks = []
    if chunks:
        raise InvalidSnapshot("the last rank is incomplete")


def _read_varint(data: bytes | bytearray | memoryview, at: int) -> tuple[int, int]:
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
