"""Encodes a rank's state in chunks, as consumers fetch it and snapshots keep it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvrouter.core.reference.block_table import Block
from kvrouter.core.reference.rank_blocks import TIERS
from kvrouter.v1.common_pb2 import BlockRecord, CopyCounting, Cursor, Rank, RankState, TierCopies
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


def dump_chunks(
    rank: Rank,
    cursor: Cursor,
    digest: int,
    blocks: Sequence[tuple[int, Block]],
    copy_counting: CopyCounting,
    *,
    partial: bool,
    chunk_blocks: int = CHUNK_BLOCKS,
) -> Iterator[RankState]:
    """Returns a state in chunks of a dump."""
    chunks = state_chunks(cursor, digest, blocks, copy_counting, chunk_blocks)
    return (
        RankState(
            rank=rank,
            cursor=chunk.cursor,
            blocks=chunk.blocks,
            last=chunk.last,
            digest=chunk.digest,
            copy_counting=chunk.copy_counting,
            partial=partial,
        )
        for chunk in chunks
    )


def block_records(blocks: Sequence[tuple[int, Block]], chunk_blocks: int) -> Iterator[list[BlockRecord]]:
    """Yields a state's blocks in chunks, chain after chain, parents before children; at least one chunk.

    A parent is included only if it is still resident at the position that it had when its child was stored.
    """
    held = dict(blocks)
    ordered = _in_chains(blocks)
    for start in range(0, max(len(ordered), 1), chunk_blocks):
        records = []
        for engine_hash, block in ordered[start : start + chunk_blocks]:
            records.append(
                BlockRecord(
                    engine_hash=engine_hash,
                    parent_engine_hash=_parent(held, block),
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


def _in_chains(blocks: Sequence[tuple[int, Block]]) -> list[tuple[int, Block]]:
    """Sorts blocks into chains, which an index loads as a whole.

    A block continues the chain of its parent unless a sibling does. Parents precede children, and equal states have
    equal orders.
    """
    held = dict(blocks)
    chain_of: dict[int, int] = {}
    last: list[int] = []
    by_depth = sorted(blocks, key=lambda item: (item[1].depth, item[0]))
    for engine_hash, block in by_depth:
        parent = _parent(held, block)
        chain = None if parent is None else chain_of.get(parent)
        if chain is None or last[chain] != parent:
            chain = len(last)
            last.append(engine_hash)
        last[chain] = engine_hash
        chain_of[engine_hash] = chain
    return sorted(by_depth, key=lambda item: chain_of[item[0]])


def _parent(held: Mapping[int, Block], block: Block) -> int | None:
    """Returns the parent of a block, if it is still resident at the position that it had when the block was stored."""
    above = held.get(block.parent) if block.parent is not None else None
    return block.parent if above is not None and above.sequence_hash == block.parent_place else None
