"""What is known of each rank beside its blocks."""

from __future__ import annotations

from kvrouter.core import Rank
from kvrouter.indexer.index.event_counts import RankTally


class KnownRanks:
    """Counts of the ranks, and which of them lack blocks."""

    def __init__(self) -> None:
        self._tallies: dict[Rank, RankTally] = {}
        self._partial: set[Rank] = set()

    def is_partial(self, rank: Rank) -> bool:
        """Returns whether blocks of a rank are known to be missing."""
        return rank in self._partial

    def set_partial(self, rank: Rank, partial: bool) -> None:
        """Notes whether blocks of a rank are missing."""
        (self._partial.add if partial else self._partial.discard)(rank)

    def view(self, rank: Rank) -> RankTally:
        """Returns the counts of a rank, to be read: those of an unknown rank are not kept."""
        return self._tallies.get(rank) or RankTally()

    def tally(self, rank: Rank) -> RankTally:
        """Returns the counts of a rank, to be changed."""
        return self._tallies.setdefault(rank, RankTally())

    def mark_unverified(self, rank: Rank) -> None:
        """Notes that a rank may differ from its worker."""
        self.tally(rank).verified = False

    def forget(self, rank: Rank) -> None:
        """Drops all that is known of a rank."""
        self._tallies.pop(rank, None)
        self._partial.discard(rank)
