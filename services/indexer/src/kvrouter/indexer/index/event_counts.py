"""Counts of a component's events by outcome, and a log of evicted ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvrouter.core import ApplySummary, Rank
from kvrouter.indexer.index.messages import Refusal
from kvrouter.v1.indexer_pb2 import EventCounts
from structlog.typing import FilteringBoundLogger

LOG_SECONDS = 60.0
"""Minimum interval between log lines of a component. A full index evicts a rank whenever blocks are stored."""


@dataclass(slots=True)
class Tally:
    """Counts since the start of the replica. ``EventCounts`` in the contract explains each."""

    batches: int = 0
    """Batches given to the index."""
    applied: int = 0
    duplicates: int = 0
    fenced: int = 0
    gaps: int = 0
    unknown_parents: int = 0
    unknown_removals: int = 0
    rejected: int = 0
    unparsable: int = 0
    evictions: int = 0
    """How often a rank was emptied because the index exceeded a bound."""
    misdirected: int = 0
    """Messages whose envelope does not match their subject or the component."""
    unconfirmed: int = 0
    """Events with an incarnation or id unconfirmed by the worker. A batch without events counts as 1."""
    repairs: int = 0
    drifts: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0

    def add(self, summary: ApplySummary, *, again: bool = False) -> None:
        """Counts a parsed batch.

        Args:
            summary: Result of applying it.
            again: Whether it is applied again, past a gap. Its events before the gap are counted already.
        """
        self.batches += not again
        self.applied += summary.applied
        self.stored_blocks += summary.stored_blocks
        self.removed_blocks += summary.removed_blocks
        if summary.is_plain:
            return
        self.duplicates += 0 if again else summary.duplicates
        self.fenced += summary.fenced
        self.gaps += summary.gap is not None
        self.unknown_parents += summary.unknown_parents
        self.unknown_removals += summary.unknown_removals
        self.rejected += len(summary.rejected)
        self.drifts += summary.digest_differs

    def refuse(self, refusal: Refusal) -> None:
        """Counts a quarantined message."""
        if refusal.reason == "unparsable":
            self.unparsable += 1
        else:
            self.misdirected += 1

    def event_counts(self) -> EventCounts:
        """Returns the counts as a message. ``rejected`` includes the misdirected messages."""
        counts = EventCounts(**{field.name: getattr(self, field.name) for field in EventCounts.DESCRIPTOR.fields})
        counts.rejected += self.misdirected
        return counts


class EvictionLog:
    """Logs the first eviction immediately; later log lines carry the number of unlogged evictions since the last."""

    def __init__(self, log: FilteringBoundLogger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._logged_at: float | None = None
        self._unlogged = 0

    def note(self, rank: Rank, dropped_blocks: int) -> None:
        """Logs or counts the eviction of a rank, which lost ``dropped_blocks`` blocks."""
        now = self._clock()
        if self._logged_at is not None and now - self._logged_at < LOG_SECONDS:
            self._unlogged += 1
            return
        self._log.warning(
            "index.rank_evicted",
            worker_id=rank[0],
            dp_rank=rank[1],
            dropped_blocks=dropped_blocks,
            evictions_since_last_log=self._unlogged,
            consequence="the rank counts as empty until its worker's cache is cleared or its state is loaded again",
            advice="raise --max-index-bytes or --max-index-blocks, or give the process more memory",
        )
        self._logged_at, self._unlogged = now, 0
