"""Calls to a worker for the events and states of its ranks, and the comparison of a state with the index."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import cast

from kvrouter.core import Rank
from kvrouter.indexer.index.state import RankDump
from kvrouter.net.tls import Tls
from kvrouter.runtime.contracts import Worker
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import remote_on_connections
from kvrouter.v1 import worker_pb2
from kvrouter.v1.common_pb2 import Cursor, Rank as RankMessage, RankState, Tier
from kvrouter.v1.errors import OutOfRange
from kvrouter.v1.indexer_pb2 import VerifyResponse
from kvrouter.v1.worker_pb2 import GetEventsRequest, GetRankStateRequest, GetRankStateResponse

_DESCRIPTOR = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
_MAX_STATE_BYTES = 1 << 30  # per rank: about 20 million blocks
_MAX_PART_BYTES = 4 << 20  # per message; parsing takes up to forty times its size
_MAX_EVENTS_BYTES = 32 << 20  # above this, the whole state is cheaper


class StateTooLarge(Exception):
    """Raised when a worker sends more than 1 GiB for one rank."""


def worker_at(endpoint: str, tls: Tls | None = None) -> Worker:
    """Returns a stub of the worker at ``host:port``, with the calls for its state."""
    stub = remote_on_connections(_DESCRIPTOR, endpoint, tls=tls, role="worker", max_message_bytes=_MAX_PART_BYTES)
    return cast(Worker, stub)


async def fetch_events(worker: Worker, rank: Rank, cursor: tuple[int, int], deadline: Deadline) -> list[bytes] | None:
    """Returns the rank's events from a cursor on as encoded batches; None if its whole state must be fetched instead.

    Reasons: the worker does not have these events, sends over 32 MiB, or sends events of another rank.

    Raises:
        KvRouterError: the worker does not answer.
    """
    start = Cursor(incarnation=cursor[0], next_event_id=cursor[1])
    request = GetEventsRequest(dp_rank=rank[1], start=start)
    batches: list[bytes] = []
    size = 0
    try:
        async with aclosing(worker.get_events(request, deadline=deadline)) as responses:
            async for response in responses:
                if (response.batch.worker_id, response.batch.dp_rank) != rank:
                    return None
                batches.append(response.batch.SerializeToString())
                size += len(batches[-1])
                if size > _MAX_EVENTS_BYTES:
                    return None
    except OutOfRange:
        return None
    return batches


async def fetch_state(worker: Worker, rank: Rank, deadline: Deadline) -> RankDump:
    """Returns the rank's whole state. gRPC's flow control bounds the data in flight.

    Raises:
        KvRouterError: the worker does not answer.
        StateTooLarge: the worker sends over 1 GiB.
    """
    chunks: list[bytes] = []
    cursor = Cursor()
    size = 0
    async with aclosing(worker.get_rank_state(GetRankStateRequest(dp_rank=rank[1]), deadline=deadline)) as stream:
        async for response in stream:
            cursor = response.cursor
            # In a thread, since it takes milliseconds; encoded immediately, since a parsed chunk takes far more memory.
            chunks.append(await asyncio.to_thread(_as_chunk, rank, response))
            size += len(chunks[-1])
            if size > _MAX_STATE_BYTES:
                raise StateTooLarge(
                    f"expected at most {_MAX_STATE_BYTES} bytes of state for rank {rank}, received more"
                )
    return RankDump(rank, (cursor.incarnation, cursor.next_event_id), False, chunks)


def _as_chunk(rank: Rank, response: GetRankStateResponse) -> bytes:
    state = RankState(
        rank=RankMessage(worker_id=rank[0], dp_rank=rank[1]),
        cursor=response.cursor,
        blocks=response.blocks,
        last=response.last,
        digest=response.digest,
        copy_counting=response.copy_counting,
    )
    return state.SerializeToString()


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
