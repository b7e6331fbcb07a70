"""Counts of a component's events by outcome, and the status of each rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrouter.core import ApplySummary
from kvrouter.indexer.index.evidence import Evidence
from kvrouter.indexer.index.validation import Refusal
from kvrouter.v1.indexer_pb2 import EventCounts


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
    """Events with an incarnation or id that the worker does not confirm. A batch without events counts as 1."""
    repairs: int = 0
    drifts: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0

    def add(self, summary: ApplySummary, *, again: bool = False) -> None:
        """Counts a batch that could be parsed.

        Args:
            summary: Result of applying it.
            again: Whether it is applied again, past a gap. Its events before the gap are counted already.
        """
        self.batches += not again
        self.applied += summary.applied
        self.duplicates += 0 if again else summary.duplicates
        self.fenced += summary.fenced
        self.gaps += summary.gap is not None
        self.unknown_parents += summary.unknown_parents
        self.unknown_removals += summary.unknown_removals
        self.rejected += len(summary.rejected)
        self.drifts += summary.digest_differs
        self.stored_blocks += summary.stored_blocks
        self.removed_blocks += summary.removed_blocks

    def refuse(self, refusal: Refusal) -> None:
        """Counts a message that was quarantined."""
        if refusal.reason == "unparsable":
            self.unparsable += 1
        else:
            self.misdirected += 1

    def event_counts(self) -> EventCounts:
        """Returns the counts as a message. ``rejected`` includes the misdirected messages."""
        return EventCounts(
            applied=self.applied,
            duplicates=self.duplicates,
            fenced=self.fenced,
            gaps=self.gaps,
            unknown_parents=self.unknown_parents,
            unknown_removals=self.unknown_removals,
            rejected=self.rejected + self.misdirected,
            unparsable=self.unparsable,
            repairs=self.repairs,
            unconfirmed=self.unconfirmed,
            evictions=self.evictions,
        )
