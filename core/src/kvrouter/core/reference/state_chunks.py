"""Encodes a rank's state in chunks, as consumers fetch it and journals keep it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvrouter.core.reference.block_table import Block
from kvrouter.core.reference.rank_blocks import TIERS
from kvrouter.v1.common_pb2 import BlockRecord, CopyCounting, Cursor, TierCopies
from kvrouter.v1.worker_pb2 import GetRankStateResponse

CHUNK_BLOCKS = 4096
"""Number of blocks in one chunk of a state."""


def state_chunks(
    cursor: Cursor,
    digest: int,
    blocks: Sequence[tuple[int, Block]],
    copy_counting: CopyCounting,
    chunk_blocks: int = CHUNK_BLOCKS,
) -> Iterator[GetRankStateResponse]:
    """Returns a state in chunks."""
    count = max(1, -(-len(blocks) // chunk_blocks))
    return (
        GetRankStateResponse(
            cursor=cursor, blocks=records, last=number == count, digest=digest, copy_counting=copy_counting
        )
        for number, records in enumerate(block_records(blocks, chunk_blocks), start=1)
    )


def block_records(blocks: Sequence[tuple[int, Block]], chunk_blocks: int) -> Iterator[list[BlockRecord]]:
    """Yields a state's blocks in chunks, by depth and engine hash, so parents before children; at least one chunk.

    A parent is included only if it is still resident at the position that it had when its child was stored.
    """
    held = dict(blocks)
    ordered = sorted(blocks, key=lambda item: (item[1].depth, item[0]))
    for start in range(0, max(len(ordered), 1), chunk_blocks):
        records = []
        for engine_hash, block in ordered[start : start + chunk_blocks]:
            above = held.get(block.parent) if block.parent is not None else None
            named = above is not None and above.sequence_hash == block.parent_place
            records.append(
                BlockRecord(
                    engine_hash=engine_hash,
                    parent_engine_hash=block.parent if named else None,
                    local_hash=block.local_hash,
                    sequence_hash=block.sequence_hash,
                    depth=block.depth,
                    copies=[
                        TierCopies(tier=tier, copies=copies)
                        for tier, copies in zip(TIERS, block.copies, strict=True)
                        if copies
                    ],
                )
            )
        yield records
