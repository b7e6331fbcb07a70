"""Passes the engines' cache events to the index, in the batches that a publisher would send.

Each batch becomes visible to the index a fixed lag after its events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from kvrouter.core import PrefixIndex, Rank, local_hashes
from kvrouter.mocker.tiers import TIERS
from kvrouter.scheduler.overlap.indexer_query import Overlaps
from kvrouter.scheduler.policies.interface import Column
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.scheduler.workers.candidates import LOWER_TIERS, ListedRanks
from kvrouter.simulator.engines.fleet import RawEvent
from kvrouter.v1.common_pb2 import CopyCounting, Tier
from kvrouter.v1.events_pb2 import KvEventBatch

_DEVICE, _COUNTED = Tier.TIER_DEVICE, CopyCounting.COPY_COUNTING_COUNTED  # read once: an enum lookup goes by name


class CacheEvents:
    """Connects the engines to the index."""

    def __init__(self, ranks: Sequence[Rank], block_size: int, lag_seconds: float, *, has_tiers: bool = False) -> None:
        """``has_tiers``: whether the engines have tiers below device memory."""
        self.index = PrefixIndex()
        self._has_tiers = has_tiers
        self._ranks = ranks
        self._block_size = block_size
        self._lag = lag_seconds
        self._next_id = [0] * len(ranks)
        self._incarnations = [1] * len(ranks)
        self._under_way: deque[tuple[float, bytes]] = deque()
        for rank in ranks:
            self.index.reset_rank(rank, 1, 0, partial=False)
        # The index fences older incarnations itself; simulated workers stay registered with their first one.
        self._listed = ListedRanks(ranks, np.ones(len(ranks), np.uint64))

    def overlaps(self, prompt: Prompt) -> Overlaps:
        """Returns the leading blocks of a prompt that each rank can reuse by the index, in the order of the ranks."""
        hashes = prompt.reusable_hashes(self._block_size)
        if not self._has_tiers:
            return Overlaps(self._listed, self._overlaps(hashes, _DEVICE))
        lower = np.array([self._overlaps(hashes, tier) for tier in LOWER_TIERS])
        device = self._overlaps(hashes, _DEVICE)
        return Overlaps(self._listed, device, lower, self.index.pooled(hashes))

    def _overlaps(self, hashes: bytes, tier: Tier) -> Column:
        blocks: Column = np.frombuffer(self.index.overlaps(hashes, tier), np.uint32).astype(np.int64)
        return blocks

    def restarted(self, engine: int) -> None:
        """Begins a new incarnation of an engine; its former blocks go with the first event of the new one."""
        self._incarnations[engine] += 1
        self._next_id[engine] = 0
        self.index.reset_rank(self._ranks[engine], self._incarnations[engine], 0, partial=False)

    def publish(self, events: Iterable[tuple[float, int, RawEvent]]) -> None:
        """Adds events in the order in which they happened."""
        gathered: dict[int, list[RawEvent]] = {}
        latest = 0.0
        for at, engine, event in events:
            gathered.setdefault(engine, []).append(event)
            latest = at
        for engine, some in gathered.items():
            self._under_way.append((latest + self._lag, self._batch(engine, some)))

    def apply_until(self, now: float) -> None:
        """Applies the batches that are visible at a time."""
        while self._under_way and self._under_way[0][0] <= now:
            summary = self.index.apply(self._under_way.popleft()[1])
            if summary.gap or summary.rejected or summary.unparsable or summary.unknown_parents:
                raise RuntimeError(f"the index differs from the engines: {summary}")

    def _batch(self, engine: int, events: Sequence[RawEvent]) -> bytes:
        worker_id, dp_rank = self._ranks[engine]
        batch = KvEventBatch(
            worker_id=worker_id,
            dp_rank=dp_rank,
            incarnation=self._incarnations[engine],
            block_size=self._block_size,
            copy_counting=_COUNTED,
        )
        for event_id, event in enumerate(events, start=self._next_id[engine]):
            entry = batch.events.add(event_id=event_id)
            match event:
                case (hashes, parent, tokens, _, tier):
                    entry.tier = TIERS[tier]
                    stored = entry.stored
                    stored.MergeFromString(_packed(2, hashes) + _packed(3, local_hashes(tokens, self._block_size)))
                    if parent is not None:
                        stored.parent_engine_hash = parent
                case (hashes, tier):
                    entry.tier = TIERS[tier]
                    entry.removed.MergeFromString(_packed(1, hashes))
                case _:
                    entry.cleared.SetInParent()
        self._next_id[engine] += len(events)
        return batch.SerializeToString()


def _packed(field: int, words: bytes) -> bytes:
    """Returns a repeated fixed64 field in its wire format, which avoids an integer for each word."""
    size, length = bytearray(), len(words)
    while length > 0x7F:
        size.append(length & 0x7F | 0x80)
        length >>= 7
    size.append(length)
    return bytes([field << 3 | 2]) + size + words
