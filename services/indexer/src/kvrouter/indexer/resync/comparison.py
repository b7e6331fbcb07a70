"""Compares a rank of the index with its worker's own state, without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvrouter.core import Rank
from kvrouter.indexer.index.rank_repair import RankDump
from kvrouter.v1.common_pb2 import Cursor, RankState, Tier
from kvrouter.v1.common_pb2 import Rank as RankMessage
from kvrouter.v1.indexer_pb2 import VerifyResponse

_EXAMPLES = 32
_DIFFERENCES = 1024

Place = tuple[int, int, int]
"""(engine hash, sequence hash, tier)"""


def copies(chunks: Sequence[bytes]) -> dict[Place, int]:
    """Returns the number of physical copies by place, from encoded RankState chunks."""
    return {
        (block.engine_hash, block.sequence_hash, held.tier): held.copies
        for chunk in chunks
        for block in RankState.FromString(chunk).blocks
        for held in block.copies
    }


def compare(index: RankDump | None, worker: RankDump) -> VerifyResponse:
    """Compares a rank of the index with the worker's state; ``index`` is None if the rank is not in the index.

    The response lists at most 1,024 differences, and 32 engine hashes as examples.
    """
    ours = copies(index.chunks) if index else {}
    theirs = copies(worker.chunks)
    differing = sorted({place for place, _ in ours.items() ^ theirs.items()})
    answer = unanswered(worker.rank, index)
    answer.compared = True
    answer.worker_cursor.CopyFrom(_cursor(worker))
    answer.common_blocks = len(ours.items() & theirs.items())
    answer.missing_blocks = sum(place in theirs for place in differing)
    answer.surplus_blocks = sum(place in ours for place in differing)
    answer.examples.extend(sorted({place[0] for place in differing})[:_EXAMPLES])
    for place in differing[:_DIFFERENCES]:
        answer.differences.add(
            engine_hash=place[0],
            sequence_hash=place[1],
            tier=cast(Tier, place[2]),
            index_copies=ours.get(place, 0),
            worker_copies=theirs.get(place, 0),
        )
    return answer


def unanswered(rank: Rank, index: RankDump | None) -> VerifyResponse:
    """Returns the response for a rank whose worker did not answer: its cursor in the index, not compared."""
    answer = VerifyResponse(rank=RankMessage(worker_id=rank[0], dp_rank=rank[1]))
    if index is not None:
        answer.index_cursor.CopyFrom(_cursor(index))
    return answer


def _cursor(dump: RankDump) -> Cursor:
    return Cursor(incarnation=dump.cursor[0], next_event_id=dump.cursor[1])
