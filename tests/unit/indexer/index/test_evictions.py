"""What is logged and counted where a rank is emptied because the index exceeds its bound."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from kvrouter.core import MemoryBudget, PrefixIndex
from kvrouter.indexer.index.event_counts import LOG_SECONDS, EvictionLog
from kvrouter.indexer.index.messages import StreamMessage
from kvrouter.indexer.index.state import IndexState
from kvrouter.v1.common_pb2 import Tier
from kvrouter.v1.events_pb2 import BlocksStored, KvEvent, KvEventBatch
from kvrouter.v1.names import ComponentName
from structlog.testing import capture_logs

from tests.unit.indexer.index.policy import Policy

COMPONENT = ComponentName("ns", "decode")


def stored(worker_id: int, event_id: int, blocks: Sequence[int]) -> StreamMessage:
    event = KvEvent(event_id=event_id, tier=Tier.TIER_DEVICE)
    event.stored.CopyFrom(BlocksStored(engine_hashes=blocks, local_hashes=blocks))
    batch = KvEventBatch(worker_id=worker_id, incarnation=1, block_size=4, events=[event], next_event_id=event_id + 1)
    return StreamMessage(COMPONENT.events_subject(worker_id, 0), 1, batch.SerializeToString())


def test_an_eviction_is_logged_and_counted_once() -> None:
    with capture_logs() as logs:
        index = IndexState(str(COMPONENT), 4, PrefixIndex(max_blocks=3), Policy())
        index.events.apply([stored(1, 0, [1, 2]), stored(1, 1, [3, 4]), stored(1, 2, [5, 6])])
    evicted = [line for line in logs if line["event"] == "index.rank_evicted"]
    assert [(line["worker_id"], line["dropped_blocks"], line["log_level"]) for line in evicted] == [(1, 4, "warning")]
    assert (index.events.tally.evictions, index.events.tally.event_counts().evictions) == (1, 1)


async def test_a_state_that_is_loaded_over_the_bound_is_an_eviction_too() -> None:
    whole = IndexState(str(COMPONENT), 4, PrefixIndex(), Policy())
    whole.events.apply([stored(1, 0, [1, 2, 3])])
    dump = await whole.repair.whole_rank((1, 0))
    assert dump is not None
    bounded = IndexState(str(COMPONENT), 4, PrefixIndex(max_blocks=2), Policy())
    await bounded.repair.load_rank(dump)
    assert bounded.events.tally.evictions == 1
    assert [(info.blocks, info.evicted) for info in await bounded.shared.ranks()] == [(0, True)]


def test_components_that_share_a_budget_are_bounded_together() -> None:
    budget = MemoryBudget(2 << 20)
    first, second = (IndexState(name, 4, PrefixIndex(budget=budget), Policy()) for name in ("first", "second"))
    filled = 0
    while not first.events.tally.evictions + second.events.tally.evictions:
        for index in (first, second):
            index.events.apply([stored(1, filled, range(1000 * filled, 1000 * (filled + 1)))])
        filled += 1
        assert budget.used_bytes <= budget.max_bytes
        assert filled < 1000, "there is no bound"
    assert filled > 1


def test_evictions_are_logged_at_intervals_with_their_number() -> None:
    times = (0.0, 1.0, LOG_SECONDS - 1, LOG_SECONDS, LOG_SECONDS + 1, 3 * LOG_SECONDS)
    with capture_logs() as logs:
        evictions = EvictionLog(structlog.get_logger(), clock=iter(times).__next__)
        for _ in times:
            evictions.note((1, 0), 7)
    assert [line["evictions_since_last_log"] for line in logs] == [0, 2, 1]
