"""Converts a rank's state to RankState chunks and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from kvrouter.core.interface import InvalidDump, Rank
from kvrouter.core.reference.hashing import chain
from kvrouter.core.reference.rank_blocks import NO_COPIES, TIERS, Block, RankBlocks, digest_of
from kvrouter.v1.common_pb2 import BlockRecord, CopyCounting, Cursor, Rank as RankMessage, RankState, Tier, TierCopies


@dataclass(frozen=True, slots=True)
class RankDump:
    """The complete state of a rank."""

    rank: Rank
    incarnation: int
    next_event_id: int
    counted: bool
    """Whether copies are counted (COUNTED), or blocks are a set (SET)."""
    partial: bool
    blocks: Sequence[tuple[int, Block]]
    """(engine hash, block)"""


def encode(dump: RankDump, chunk_blocks: int) -> Iterator[bytes]:
    """Yields one or more chunks of at most ``chunk_blocks`` blocks, parents before children."""
    ordered = sorted(dump.blocks, key=lambda item: (item[1].depth, item[0]))
    # The key contains the depth, so that no block is written as the parent of an earlier one.
    engine_hash_at = {(block.sequence_hash, block.depth): engine_hash for engine_hash, block in ordered}
    digest = digest_of(dump.blocks)
    for start in range(0, max(len(ordered), 1), chunk_blocks):
        records = [
            BlockRecord(
                engine_hash=engine_hash,
                parent_engine_hash=None
                if block.parent_sequence_hash is None
                else engine_hash_at.get((block.parent_sequence_hash, block.depth - 1)),
                local_hash=block.local_hash,
                sequence_hash=block.sequence_hash,
                depth=block.depth,
                copies=[
                    TierCopies(tier=tier, copies=block.copies[tier - 1]) for tier in TIERS if block.copies[tier - 1]
                ],
            )
            for engine_hash, block in ordered[start : start + chunk_blocks]
        ]
        yield RankState(
            rank=RankMessage(worker_id=dump.rank[0], dp_rank=dump.rank[1]),
            cursor=Cursor(incarnation=dump.incarnation, next_event_id=dump.next_event_id),
            blocks=records,
            last=start + chunk_blocks >= len(ordered),
            digest=digest,
            copy_counting=CopyCounting.COPY_COUNTING_COUNTED if dump.counted else CopyCounting.COPY_COUNTING_SET,
            partial=dump.partial,
        ).SerializeToString()


def decode(chunks: Iterable[bytes]) -> RankDump:
    """Parses and validates a dump.

    Raises:
        InvalidDump: the dump is invalid in one of the ways listed at ``PrefixIndex.load_rank``.
    """
    state: RankState | None = None
    blocks: dict[int, Block] = {}
    for number, chunk in enumerate(chunks):
        if state is not None and state.last:
            raise InvalidDump(f"chunk {number} follows the last one")
        state = _parse(chunk, number, state)
        for record in state.blocks:
            if record.engine_hash in blocks:
                raise InvalidDump(f"engine hash {record.engine_hash:#x} appears twice")
            blocks[record.engine_hash] = _block(record, blocks)
    if state is None or not state.last:
        raise InvalidDump("the last chunk is missing")
    digest = digest_of(blocks.items())
    if digest != state.digest:
        raise InvalidDump(f"expected digest {state.digest:#018x}, received blocks with digest {digest:#018x}")
    return RankDump(
        rank=(state.rank.worker_id, state.rank.dp_rank),
        incarnation=state.cursor.incarnation,
        next_event_id=state.cursor.next_event_id,
        counted=state.copy_counting != CopyCounting.COPY_COUNTING_SET,
        partial=state.partial,
        blocks=list(blocks.items()),
    )


def _parse(chunk: bytes, number: int, before: RankState | None) -> RankState:
    try:
        state = RankState.FromString(chunk)
    except DecodeError as error:
        raise InvalidDump(f"chunk {number} is not a RankState: {error}") from None
    if "rank" not in state or "cursor" not in state:
        raise InvalidDump(f"chunk {number} has no rank or no cursor")
    if before is not None and (state.rank != before.rank or state.cursor != before.cursor):
        raise InvalidDump(f"chunk {number} has another rank or cursor than the chunk before")
    return state


def _block(record: BlockRecord, before: dict[int, Block]) -> Block:
    name = f"engine hash {record.engine_hash:#x}"
    parent_place = None
    if "parent_engine_hash" in record:
        parent = before.get(record.parent_engine_hash)
        if parent is None:
            raise InvalidDump(f"{name} appears before its parent {record.parent_engine_hash:#x}")
        if record.depth != parent.depth + 1:
            raise InvalidDump(f"{name}: expected depth {parent.depth + 1}, received {record.depth}")
        parent_place = parent.sequence_hash
    if record.depth == 0 or parent_place is not None:
        (place,) = chain(parent_place, [record.local_hash])
        if place != record.sequence_hash:
            raise InvalidDump(f"{name}: expected sequence hash {place:#x}, received {record.sequence_hash:#x}")
    return Block(record.sequence_hash, record.local_hash, parent_place, record.depth, _copies(record, name))


def _copies(record: BlockRecord, name: str) -> tuple[int, ...]:
    copies = list(NO_COPIES)
    for one in record.copies:
        tier = one.tier or Tier.TIER_DEVICE
        if tier not in TIERS:
            raise InvalidDump(f"{name} has unknown tier {tier}")
        if copies[tier - 1]:
            raise InvalidDump(f"{name} has tier {tier} twice")
        if not one.copies:
            raise InvalidDump(f"{name} has no copies in tier {tier}")
        copies[tier - 1] = one.copies
    if not any(copies):
        raise InvalidDump(f"{name} has no copies")
    return tuple(copies)


def restore(dump: RankDump) -> RankBlocks:
    """Returns the blocks of a dump."""
    blocks = RankBlocks()
    for engine_hash, block in dump.blocks:
        blocks.put(engine_hash, block)
    return blocks
