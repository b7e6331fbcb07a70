"""Queries an Indexer for the leading blocks of a prompt that each rank holds.

The time is bounded. If no Indexer answers in time, the request is routed by load alone.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import structlog
from kvrouter.core import Rank
from kvrouter.runtime.contracts import Indexer
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import DeadlineExceeded, KvRouterError
from kvrouter.runtime.packed_hashes import local_hashes_message
from kvrouter.scheduler.identifiers import component_message
from kvrouter.scheduler.policies.interface import Column
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.scheduler.workers.worker_set import WorkerSet
from kvrouter.v1.common_pb2 import Cursor
from kvrouter.v1.indexer_pb2 import FindMatchesRequest, FindMatchesResponse
from kvrouter.v1.names import ComponentName
from numpy.typing import NDArray

log = structlog.get_logger(component="scheduler")

IndexerSource = Callable[[ComponentName], Indexer | None]
"""Returns the Indexer to query for a component; None if none is live."""


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Overlaps by rank, or the reason why there are none. Entry i of each column belongs to the i-th rank."""

    worker_ids: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    dp_ranks: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    blocks: Column = field(default_factory=lambda: np.zeros(0, np.int64))
    """Leading blocks in device memory, at most those of the prompt."""
    incarnations: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    """Incarnation of the cache that the blocks belong to."""
    next_event_ids: Sequence[int] = ()
    """Id of the next event that the Indexer expects from the rank; empty if the blocks are predicted."""
    failure: str = ""
    """``no_indexer``, ``timeout``, or the code of the Indexer's error; empty if none was queried, or one answered."""

    @classmethod
    def of(cls, held: Mapping[Rank, tuple[int, int]]) -> Overlaps:
        """Returns the overlaps of ranks, from (blocks, incarnation) by rank."""
        return cls(
            np.array([worker_id for worker_id, _ in held], np.uint64),
            np.array([dp_rank for _, dp_rank in held], np.uint32),
            np.array([blocks for blocks, _ in held.values()], np.int64),
            np.array([incarnation for _, incarnation in held.values()], np.uint64),
        )

    def on(self, worker_set: WorkerSet) -> Column:
        """Returns the leading blocks that each candidate holds, of its registered incarnation where that is known.

        Blocks of an earlier incarnation are gone. A later one belongs to a worker that is about to register, or is
        unconfirmed. Both count as 0, so the overlap is never overestimated.
        """
        if not len(self.blocks):
            return worker_set.zeros
        places, current = worker_set.sources(self.worker_ids, self.dp_ranks, self.incarnations)
        return self.blocks[places] * current

    def cursor(self, rank: Rank) -> Cursor | None:
        """Returns how far a rank's events were applied; None if the rank is not in the answer."""
        if not self.next_event_ids:
            return None
        for source in np.flatnonzero((self.worker_ids == rank[0]) & (self.dp_ranks == rank[1])).tolist():
            return Cursor(incarnation=int(self.incarnations[source]), next_event_id=self.next_event_ids[source])
        return None


NOT_QUERIED = Overlaps()
"""Overlaps of a request for which no Indexer is queried."""


async def ask(
    indexers: IndexerSource,
    component: ComponentName,
    prompt: Prompt,
    *,
    block_size: int,
    timeout_seconds: float,
    deadline: Deadline,
) -> Overlaps:
    """Returns the overlap of every rank. Errors of the Indexer are returned as ``failure``, never raised.

    Args:
        indexers: Finds an Indexer.
        component: The component.
        prompt: The prompt; without a full block no query is sent.
        block_size: Tokens per block.
        timeout_seconds: Maximum time to wait.
        deadline: The caller's deadline, which applies as well.
    """
    if not prompt.blocks:
        return NOT_QUERIED
    indexer = indexers(component)
    if indexer is None:
        return Overlaps(failure="no_indexer")
    request = FindMatchesRequest(
        component=component_message(component),
        local_hashes=local_hashes_message(prompt.local_hashes),
        block_size=block_size,
    )
    bounded = deadline.within(timeout_seconds)
    try:
        async with asyncio.timeout(bounded.remaining()):
            response = await indexer.find_matches(request, deadline=bounded)
    except (TimeoutError, DeadlineExceeded):
        return Overlaps(failure="timeout")
    except KvRouterError as error:
        return Overlaps(failure=error.code.name.lower())
    except Exception:
        # The Indexer may be an object in this process. Its defects must not fail a request either.
        log.exception("indexer.failed", component_name=str(component))
        return Overlaps(failure="internal")
    return read_answer(response, prompt.blocks)


def read_answer(response: FindMatchesResponse, prompt_blocks: int) -> Overlaps:
    """Returns the overlaps in an Indexer's answer, at most ``prompt_blocks`` for each rank."""
    worker_ids, dp_ranks, blocks = response.worker_ids, response.dp_ranks, response.device_blocks
    incarnations, event_ids = response.incarnations, response.next_event_ids
    count = min(map(len, (worker_ids, dp_ranks, blocks, incarnations, event_ids)))
    # By way of arrays, which takes half as long as from the message's own sequences.
    return Overlaps(
        np.asarray(array("Q", worker_ids[:count])),
        np.asarray(array("I", dp_ranks[:count])),
        np.minimum(np.asarray(array("q", blocks[:count])), prompt_blocks),
        np.asarray(array("Q", incarnations[:count])),
        event_ids,
    )
