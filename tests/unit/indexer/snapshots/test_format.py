from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from kvrouter.indexer.snapshots.format import decode
from kvrouter.net.snapshot_format import FORMAT_VERSION, InvalidSnapshot, SnapshotCheck, SnapshotWriter
from kvrouter.v1.common_pb2 import BlockRecord, Component, Cursor, Rank, RankState
from kvrouter.v1.snapshot_pb2 import SnapshotHeader

HEADER = SnapshotHeader(
    component=Component(namespace="n", name="c"), block_size=16, hash_scheme="xxh3-1337", stream_sequence=7
)


def chunk(worker: int, *blocks: int, last: bool = True) -> bytes:
    return RankState(
        rank=Rank(worker_id=worker, dp_rank=2),
        cursor=Cursor(incarnation=5, next_event_id=worker),
        blocks=[BlockRecord(engine_hash=block) for block in blocks],
        last=last,
        partial=worker == 2,
    ).SerializeToString()


RANKS = [[chunk(1, 1, 2, last=False), chunk(1, 3)], [chunk(2)]]


def encode(header: SnapshotHeader, ranks: Sequence[Sequence[bytes]]) -> bytes:
    writer = SnapshotWriter(header)
    for chunk_ in itertools.chain.from_iterable(ranks):
        writer.add(chunk_)
    return b"".join(writer.parts())


def test_what_was_written_is_read() -> None:
    snapshot = decode(encode(HEADER, RANKS), HEADER)
    assert [(dump.rank, dump.cursor, dump.partial, dump.chunks) for dump in snapshot.ranks] == [
        ((1, 2), (5, 1), False, RANKS[0]),
        ((2, 2), (5, 2), True, RANKS[1]),
    ]
    assert (snapshot.header.ranks, snapshot.header.blocks, snapshot.header.stream_sequence) == (2, 3, 7)


def test_one_without_ranks_is_a_snapshot_too() -> None:
    assert decode(encode(HEADER, []), HEADER).ranks == []


def test_a_rank_that_goes_while_one_is_taken_is_not_missed() -> None:
    assert len(decode(encode(HEADER, [RANKS[0], [], RANKS[1]]), HEADER).ranks) == 2


def test_every_cut_and_every_flipped_byte_is_noticed() -> None:
    data = encode(HEADER, RANKS)
    for length in range(len(data)):
        with pytest.raises(InvalidSnapshot):
            decode(data[:length], HEADER)
    body = len(data) - decode(data, HEADER).header.body_bytes
    for at in range(body, len(data)):
        with pytest.raises(InvalidSnapshot):
            decode(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :], HEADER)


def test_a_later_version_is_refused_by_its_number() -> None:
    data = encode(HEADER, RANKS)
    header = decode(data, HEADER).header
    size = len(header.SerializeToString())
    header.format_version = FORMAT_VERSION + 1
    with pytest.raises(InvalidSnapshot, match="version 2"):
        decode(data[:1] + header.SerializeToString() + data[1 + size :], HEADER)


@pytest.mark.parametrize(
    "other",
    [
        SnapshotHeader(component=Component(namespace="n", name="d"), block_size=16, hash_scheme="xxh3-1337"),
        SnapshotHeader(component=HEADER.component, block_size=32, hash_scheme="xxh3-1337"),
        SnapshotHeader(component=HEADER.component, block_size=16, hash_scheme="other"),
    ],
)
def test_a_snapshot_of_something_else_is_refused(other: SnapshotHeader) -> None:
    with pytest.raises(InvalidSnapshot):
        decode(encode(HEADER, RANKS), other)


def test_a_check_in_pieces_finds_the_same_faults_as_decoding() -> None:
    data = encode(HEADER, RANKS)
    header = decode(data, HEADER).header
    start = len(data) - header.body_bytes
    for cut in range(start, len(data)):
        check = SnapshotCheck(HEADER)
        check.add(data[:cut])
        with pytest.raises(InvalidSnapshot, match="after the header"):
            check.finish()
        check.add(data[cut:])
        assert check.finish() == header
        damaged = SnapshotCheck(HEADER)
        damaged.add(data[:cut])
        damaged.add(bytes([data[cut] ^ 0x10]) + data[cut + 1 :])
        with pytest.raises(InvalidSnapshot, match="damaged"):
            damaged.finish()


def test_a_check_of_nothing_fails() -> None:
    with pytest.raises(InvalidSnapshot, match="empty"):
        SnapshotCheck(HEADER).finish()


def test_parts_can_be_released_one_by_one() -> None:
    writer = SnapshotWriter(HEADER)
    for chunk_ in itertools.chain.from_iterable(RANKS):
        writer.add(chunk_)
    parts = writer.parts()
    data = b"".join(parts.popleft() for _ in range(len(parts)))
    assert decode(data, HEADER).header.blocks == 3
