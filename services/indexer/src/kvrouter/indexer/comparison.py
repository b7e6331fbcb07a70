"""How a rank of the index compares with its worker's own state."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.core import Rank
from kvrouter.indexer.state import RankDump
from kvrouter.v1.common_pb2 import Cursor
from kvrouter.v1.common_pb2 import Rank as RankMessage
from kvrouter.v1.indexer_pb2 import RankState, VerifyResponse

_EXAMPLES = 32

Entry = tuple[int, int, int, int]
"""(engine hash, sequence hash, tier, copies)"""


def entries(chunks: Sequence[bytes]) -> set[Entry]:
    """What encoded RankState chunks say is held."""
    return {
        (block.engine_hash, block.sequence_hash, copies.tier, copies.copies)
        for chunk in chunks
        for block in RankState.FromString(chunk).blocks
        for copies in block.copies
    }


def compare(index: RankDump | None, worker: RankDump) -> VerifyResponse:
    """Compares a rank; ``index`` is None where the index does not know it."""
    ours = entries(index.chunks) if index else set()
    theirs = entries(worker.chunks)
    missing, surplus = theirs - ours, ours - theirs
    answer = unanswered(worker.rank, index)
    answer.compared = True
    answer.worker_cursor.CopyFrom(_cursor(worker))
    answer.common_blocks = len(ours & theirs)
    answer.missing_blocks = len(missing)
    answer.surplus_blocks = len(surplus)
    answer.examples.extend(sorted({entry[0] for entry in missing | surplus})[:_EXAMPLES])
    return answer


def unanswered(rank: Rank, index: RankDump | None) -> VerifyResponse:
    """What is known of a rank whose worker did not answer."""
    answer = VerifyResponse(rank=RankMessage(worker_id=rank[0], dp_rank=rank[1]))
    if index is not None:
        answer.index_cursor.CopyFrom(_cursor(index))
    return answer


def _cursor(dump: RankDump) -> Cursor:
    return Cursor(incarnation=dump.cursor[0], next_event_id=dump.cursor[1])
