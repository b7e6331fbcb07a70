"""Ranks, and the state of one in the prefix index."""

from __future__ import annotations

from typing import NamedTuple

Rank = tuple[int, int]
"""(worker_id, dp_rank)"""


class RankInfo(NamedTuple):
    """State of one rank in the index."""

    worker_id: int
    dp_rank: int
    incarnation: int
    next_event_id: int
    blocks: int
    """Number of entries: (engine hash, tier) pairs."""
    memory_bytes: int
    """Estimated memory that the removal of this rank would free."""
    partial: bool
    """Whether blocks may be missing."""
    evicted: bool = False
    """Whether the rank was emptied because the index reached a bound, and stores no blocks since."""
