"""How many leading blocks of a prompt each rank holds: asked of an Indexer, and never waited for long.

An Indexer that is missing, late or failing costs the overlap of that request, not the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog
from kvrouter.core import Rank
from kvrouter.runtime.contracts import Indexer
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import DeadlineExceeded, KvRouterError
from kvrouter.scheduler.prompts import Prompt
from kvrouter.v1.common_pb2 import Component, Cursor
from kvrouter.v1.indexer_pb2 import FindMatchesRequest, FindMatchesResponse, LocalHashes
from kvrouter.v1.names import ComponentName

log = structlog.get_logger(component="scheduler")

IndexerSource = Callable[[ComponentName], Indexer | None]
"""The Indexer to ask about a component; None where none is live."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds of a prompt."""

    blocks: int
    """Leading blocks in device memory."""
    incarnation: int
    """Life of the cache that they belong to."""
    next_event_id: int | None = None
    """Event that the Indexer awaits next; None where the blocks are predicted."""

    def cursor(self) -> Cursor | None:
        """How far the rank's events were applied; None where none are."""
        if self.next_event_id is None:
            return None
        return Cursor(incarnation=self.incarnation, next_event_id=self.next_event_id)


@dataclass(frozen=True, slots=True)
class Overlaps:
    """The answer, or the reason why there is none."""

    held: Mapping[Rank, Held] = field(default_factory=dict)
    failure: str = ""
    """``no_indexer``, ``timeout``, or the code of the Indexer's error; empty where none was wanted, or one answered."""

    def blocks(self, rank: Rank, incarnation: int) -> int:
        """Leading blocks that a rank holds. Blocks of a life before the registered one are gone with it."""
        held = self.held.get(rank)
        return 0 if held is None or held.incarnation < incarnation else held.blocks


NOT_ASKED = Overlaps()
"""Where overlaps do not matter."""


async def ask(
    indexers: IndexerSource,
    component: ComponentName,
    prompt: Prompt,
    *,
    block_size: int,
    timeout_seconds: float,
    deadline: Deadline,
) -> Overlaps:
    """The overlap of every rank. Never raises for what the Indexer does.

    Args:
        indexers: Where to find one.
        component: The component.
        prompt: The prompt; without a full block nothing needs asking.
        block_size: Tokens per block.
        timeout_seconds: Longest time to wait.
        deadline: The caller's, kept to as well.
    """
    if not prompt.blocks:
        return NOT_ASKED
    indexer = indexers(component)
    if indexer is None:
        return Overlaps(failure="no_indexer")
    request = FindMatchesRequest(
        component=Component(namespace=component.namespace, name=component.name),
        local_hashes=LocalHashes(hashes=memoryview(prompt.local_hashes).cast("Q").tolist()),
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
        # The Indexer may be an object in this process: what is wrong with it must not fail a request either.
        log.exception("indexer failed", routed=str(component))
        return Overlaps(failure="internal")
    return Overlaps(held=_columns_by_rank(response, prompt.blocks))


def _columns_by_rank(response: FindMatchesResponse, prompt_blocks: int) -> dict[Rank, Held]:
    ranks = zip(response.worker_ids, response.dp_ranks, strict=False)
    columns = zip(response.device_blocks, response.incarnations, response.next_event_ids, strict=False)
    return {
        rank: Held(min(blocks, prompt_blocks), incarnation, next_event_id)
        for rank, (blocks, incarnation, next_event_id) in zip(ranks, columns, strict=False)
    }
