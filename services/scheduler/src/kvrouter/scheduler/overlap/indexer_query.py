"""Queries an Indexer for each rank's leading blocks of a prompt.

The time is bounded. If no Indexer answers in time, the request is routed by load alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Protocol

import msgspec
import numpy as np
import structlog
from google.protobuf.message import DecodeError
from kvrouter.core import Rank, read_matches
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.tracing import client_call
from kvrouter.scheduler.policies.interface import Column
from kvrouter.scheduler.request.prompt import HASH_BYTES, Prompt
from kvrouter.scheduler.workers.candidates import ListedRanks, WorkerSet
from kvrouter.v1.errors import DeadlineExceeded, Internal, KvRouterError
from kvrouter.v1.indexer_pb2 import FindMatchesResponse
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse
from msgspec.structs import replace

log = structlog.get_logger(component="scheduler")

_LISTS = 64
"""Lists of ranks to keep decoded: one for each component and Indexer, and some for changes of the ranks."""


class OverlapIndex(Protocol):
    """An Indexer, as a Scheduler queries it."""

    async def find_matches_of_hashes(
        self, component: ComponentName, local_hashes: bytes, *, block_size: int, deadline: Deadline
    ) -> bytes:
        """Returns the encoded FindMatchesResponse for packed local hashes, before the deadline.

        Raises:
            KvRouterError: the query failed, or the deadline has passed.
        """


IndexerSource = Callable[[ComponentName], OverlapIndex | None]
"""Returns the Indexer to query for a component; None if none is live."""

NO_RANKS = ListedRanks((), np.zeros(0, np.uint64))


class Overlaps(msgspec.Struct, frozen=True):
    """Overlaps by rank, or the reason why there are none. Entry i of each column belongs to the i-th listed rank."""

    listed: ListedRanks = NO_RANKS
    """The ranks, each with the incarnation of its cache."""
    blocks: Column = np.zeros(0, np.int64)
    """Leading blocks in device memory, at most those of the prompt."""
    lower: Column | None = None
    """Leading blocks in a lower tier or a faster one, a row for each: host memory, disk, shared storage. None if no
    rank has more than ``blocks``."""
    pooled_blocks: int = 0
    """Leading blocks in shared storage, whichever ranks stored them, for those that read all of it."""
    next_event_ids: Sequence[int] = ()
    """Id of each rank's next event at the Indexer; ranks after the last one have predicted blocks."""
    prefill: Mapping[ComponentName, Overlaps] = MappingProxyType({})
    """The same in the components whose workers may compute the prompt for these ranks."""
    failure: str = ""
    """``no_indexer``, ``timeout``, or the code of the Indexer's error; empty if none was queried, or one answered."""

    def with_predicted(self, predicted: Overlaps) -> Overlaps:
        """Returns these overlaps and those of further ranks. Without an answer of an Indexer there are none."""
        if self.failure or not predicted.blocks.any():
            return self
        known = self.listed.place_of
        added = {rank: place for rank, place in predicted.listed.place_of.items() if rank not in known}
        places = list(added.values())
        incarnations = np.concatenate((self.listed.incarnations, predicted.listed.incarnations[places]))
        listed = ListedRanks((*known, *added), incarnations)
        held = predicted.blocks[places]
        lower = None if self.lower is None else np.hstack((self.lower, np.tile(held, (len(self.lower), 1))))
        return replace(self, listed=listed, blocks=np.concatenate((self.blocks, held)), lower=lower)

    def extended(self, predicted: Overlaps, indexed_blocks: int) -> Overlaps:
        """Returns these overlaps, extended by predicted ones.

        An index can know the first ``indexed_blocks`` of the prompt. The predicted overlap of a rank that has all of
        these counts where it is longer.
        """
        blocks = self.blocks.copy()
        for rank, place in predicted.listed.place_of.items():
            own = self.listed.place_of.get(rank)
            if own is None or self.listed.incarnations[own] != predicted.listed.incarnations[place]:
                continue
            if blocks[own] >= indexed_blocks:
                blocks[own] = max(blocks[own], predicted.blocks[place])
        return replace(self, blocks=blocks)

    def on(self, worker_set: WorkerSet) -> Column:
        """Returns the leading blocks of each candidate, of its registered incarnation where known.

        Blocks of an earlier incarnation are gone. A later one belongs to a worker about to register, or is
        unconfirmed. Both count as 0, so the overlap is never overestimated.
        """
        if not len(self.blocks):
            return worker_set.zeros
        sources = worker_set.sources(self.listed)
        return self.blocks if sources.equal else self.blocks[sources.places] * sources.current

    def lower_on(self, worker_set: WorkerSet, device: Column) -> Column | None:
        """Returns the blocks that follow those of ``device`` on each candidate, as rows by lower tier.

        These are host memory, disk and shared storage. None if no candidate can load a block.
        """
        ends = np.tile(device, (4, 1))
        if self.lower is not None:
            sources = worker_set.sources(self.listed)
            ends[1:] = self.lower if sources.equal else self.lower[:, sources.places] * sources.current
        ends[3] = np.maximum(ends[3], self.pooled_blocks * worker_set.reads_shared_storage)
        for slower, faster in zip(ends[1:], ends, strict=False):  # in a tenth of the time of numpy's accumulate
            np.maximum(slower, faster, out=slower)
        blocks: Column = np.diff(ends, axis=0)
        return blocks if blocks.any() else None

    def is_indexed(self, rank: Rank) -> bool:
        """Returns whether an Indexer knows the cache of a rank."""
        source = self.listed.place_of.get(rank)
        return source is not None and source < len(self.next_event_ids)

    def write_cursor(self, rank: Rank, response: SelectWorkerResponse) -> None:
        """Sets how far a rank's events were applied; leaves it unset if the rank is not in the answer."""
        source = self.listed.place_of.get(rank)
        if source is not None and source < len(self.next_event_ids):
            cursor = response.cursor
            cursor.incarnation = self.listed.incarnations.item(source)
            cursor.next_event_id = self.next_event_ids[source]


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
        prompt: The prompt; without a reusable block no query is sent.
        block_size: Tokens per block.
        timeout_seconds: Maximum time to wait.
        deadline: The caller's deadline, which applies as well.
    """
    hashes = prompt.reusable_hashes(block_size)
    if not hashes:
        return NOT_QUERIED
    indexer = indexers(component)
    if indexer is None:
        return Overlaps(failure="no_indexer")
    try:
        query = indexer.find_matches_of_hashes(
            component, hashes, block_size=block_size, deadline=deadline.within(timeout_seconds)
        )
        answer = await client_call("kvrouter.v1.IndexerService/FindMatches", query)
        return read_answer(answer, len(hashes) // HASH_BYTES)
    except DeadlineExceeded:
        return Overlaps(failure="timeout")
    except KvRouterError as error:
        return Overlaps(failure=error.code.name.lower())
    except Exception:
        # The Indexer may be an object in this process. Its defects must not fail a request either.
        log.exception("indexer.failed", component_name=str(component))
        return Overlaps(failure="internal")


def read_answer(answer: bytes, most_blocks: int) -> Overlaps:
    """Returns the overlaps in an encoded FindMatchesResponse, at most ``most_blocks`` for each rank.

    Raises:
        Internal: it is not such a response, or its columns differ in length.
    """
    try:
        ranks, blocks, lower, pooled_blocks, event_ids = read_matches(answer, most_blocks)
        listed = _listed(ranks)
    except (DecodeError, ValueError):
        raise Internal("the Indexer sent a response that cannot be parsed") from None
    count, size = len(listed.incarnations), len(blocks)
    if not 8 * count == size == len(event_ids) or (lower is not None and len(lower) != 3 * size):
        raise Internal(
            f"expected columns of one length, received {count} ranks, {size // 8} overlaps and "
            f"{len(event_ids) // 8} event ids"
        )
    return Overlaps(
        listed,
        np.frombuffer(blocks, np.int64),
        None if lower is None else np.frombuffer(lower, np.int64).reshape(3, count),
        pooled_blocks,
        memoryview(event_ids).cast("Q"),
    )


@lru_cache(maxsize=_LISTS)
def _listed(ranks: bytes) -> ListedRanks:
    """Returns the ranks in an encoded response without other fields, which hardly ever changes."""
    message = FindMatchesResponse.FromString(ranks)
    if not len(message.worker_ids) == len(message.dp_ranks) == len(message.incarnations):
        raise DecodeError("the columns differ in length")
    named = tuple(zip(message.worker_ids, message.dp_ranks, strict=True))
    return ListedRanks(named, np.array(message.incarnations, np.uint64))
