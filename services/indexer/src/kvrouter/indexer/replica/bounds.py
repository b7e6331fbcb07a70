"""Fill levels of the bounded parts of an Indexer. Bounds of a component show the fullest one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvrouter.core.interface import MemoryBudget
from kvrouter.indexer.index.pending_buffer import MAX_ALL_BYTES
from kvrouter.indexer.ingest.core_nats import MAX_PENDING_MESSAGES
from kvrouter.indexer.replica.component import ComponentIndex
from kvrouter.runtime.bounds import Bounds
from kvrouter.v1.names import ComponentName


def expose_bounds(
    bounds: Bounds, components: Mapping[ComponentName, ComponentIndex], budget: MemoryBudget, *, max_blocks: int
) -> None:
    """Adds the bounds of an Indexer. ``max_blocks`` limits the blocks of each component; 0 for no limit."""

    def fullest(used: Callable[[ComponentIndex], float]) -> Callable[[], float]:
        return lambda: max(map(used, list(components.values())), default=0.0)

    def blocks(component: ComponentIndex) -> int:
        return sum(info.blocks for info in component.ranks)

    bounds.add("index_bytes", lambda: budget.used_bytes, lambda: budget.max_bytes, when_full="evicts")
    bounds.add("index_blocks", fullest(blocks), max_blocks, when_full="evicts")
    bounds.add("pending_bytes", fullest(lambda each: each.state.events.pending.bytes), MAX_ALL_BYTES, when_full="drops")
    bounds.add(
        "live_queue_messages", fullest(lambda each: each.core_nats.queued), MAX_PENDING_MESSAGES, when_full="drops"
    )
