"""Decoding of an Indexer's snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from kvrouter.indexer.index.state import RankDump
from kvrouter.net.snapshot_format import InvalidSnapshot, SnapshotCheck, records_after
from kvrouter.v1.common_pb2 import RankState
from kvrouter.v1.snapshot_pb2 import SnapshotHeader


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A decoded snapshot."""

    header: SnapshotHeader
    ranks: list[RankDump]


def decode(data: bytes | bytearray, expected: SnapshotHeader) -> Snapshot:
    """Decodes a snapshot.

    Args:
        data: The encoded snapshot.
        expected: Header whose component, block_size and hash_scheme the snapshot must have.

    Raises:
        InvalidSnapshot: the snapshot is truncated, damaged, of a later version, or of another component.
    """
    check = SnapshotCheck(expected)
    check.add(data)
    header = check.finish()
    ranks = list(_ranks(records_after(data, header)))
    if len(ranks) != header.ranks:
        raise InvalidSnapshot(f"expected {header.ranks} ranks, received {len(ranks)}")
    return Snapshot(header, ranks)


def _ranks(records: Iterable[bytes]) -> Iterator[RankDump]:
    chunks: list[bytes] = []
    for record in records:
        chunks.append(record)
        try:
            state = RankState.FromString(record)
        except DecodeError as error:
            raise InvalidSnapshot(f"a rank cannot be decoded: {error}") from None
        if state.last:
            cursor = (state.cursor.incarnation, state.cursor.next_event_id)
            yield RankDump((state.rank.worker_id, state.rank.dp_rank), cursor, state.partial, chunks)
            chunks = []
    if chunks:
        raise InvalidSnapshot("the last rank is incomplete")
