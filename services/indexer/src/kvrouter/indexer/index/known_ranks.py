"""Status of each rank, beside the prefix index."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrouter.core import Rank
from kvrouter.indexer.index.evidence import Evidence


@dataclass(slots=True)
class RankTally:
    """Status of one rank, apart from its blocks and cursor."""

    drifts: int = 0
    """How often its digest differed from the worker's."""
    resynced_unix_ns: int = 0
    """Time at which its blocks were last dropped or replaced, nanoseconds since 1970; 0 for never."""
    resync_reason: str = ""
    """Reason of that change; empty for never."""
    verified: bool = False
    """Whether its state was compared with the worker's and no event was lost since then."""
    drift_at: tuple[int, int] | None = None
    """(incarnation, next event id) at which drift was last detected; None for never."""
    lag_seconds: float = 0.0
    """Time from publishing to applying its newest batch."""
    evidence: Evidence = field(default_factory=Evidence)
    """Times of the newest evidence about it."""


class KnownRanks:
    """The status of all ranks, and which of them are partial."""

    def __init__(self) -> None:
        self._tallies: dict[Rank, RankTally] = {}
        self._partial: set[Rank] = set()

    def is_partial(self, rank: Rank) -> bool:
        """Returns whether blocks of a rank may be missing in the index."""
        return rank in self._partial

    def set_partial(self, rank: Rank, partial: bool) -> None:
        """Sets whether a rank is partial."""
        (self._partial.add if partial else self._partial.discard)(rank)

    def view(self, rank: Rank) -> RankTally:
        """Returns the status of a rank for reading. An unknown rank is not added."""
        return self._tallies.get(rank) or RankTally()

    def tally(self, rank: Rank) -> RankTally:
        """Returns the status of a rank for changes. An unknown rank is added."""
        return self._tallies.setdefault(rank, RankTally())

    def mark_unverified(self, rank: Rank) -> None:
        """Marks a rank as not verified."""
        self.tally(rank).verified = False

    def forget(self, rank: Rank) -> None:
        """Drops the status of a rank."""
        self._tallies.pop(rank, None)
        self._partial.discard(rank)
