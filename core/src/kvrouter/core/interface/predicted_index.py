"""The predicted blocks of ranks without events."""

from __future__ import annotations

from typing import Protocol

from kvrouter.core.interface.ranks import Rank


class PredictedIndex(Protocol):
    """Predicted blocks of ranks, derived from the requests sent to them.

    Constructor: ``PredictedIndex(ttl_seconds=120.0, max_blocks=1 << 20, prune_ratio=0.8)``. The caller passes the time,
    in seconds of a monotonic clock; a time earlier than a previous one counts as the previous one. An entry
    (rank, place) expires ``ttl_seconds`` after a request with it was last recorded. When a call of ``record`` leads to
    more than ``max_blocks`` entries that are not expired, the least recently used are dropped until
    ``int(prune_ratio * max_blocks)`` are left; of entries used at the same time, deeper ones are dropped first.
    """

    def record(self, rank: Rank, local_hashes: bytes, now: float) -> None:
        """Records that a request with these blocks was sent to the rank."""

    def overlaps(self, local_hashes: bytes, now: float) -> dict[Rank, int]:
        """Returns the overlaps above 0 by rank, in blocks."""

    def remove_rank(self, rank: Rank) -> int:
        """Removes a rank. Returns the number of entries dropped."""

    def expire(self, now: float) -> int:
        """Drops expired entries, which ``overlaps`` ignores in any case. Returns their number."""

    def __len__(self) -> int: ...
