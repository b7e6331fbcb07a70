"""Counts of what happened to the events of a component, and of each of its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrouter.core import ApplySummary
from kvrouter.indexer.index.evidence import Evidence
from kvrouter.indexer.index.validation import Refusal
from kvrouter.v1.indexer_pb2 import EventCounts


@dataclass(slots=True)
class RankTally:
    """What is told of one rank beside what the index knows itself."""

    drifts: int = 0
    """Times that its digest differed from the worker's."""
    resynced_unix_ns: int = 0
    """When its blocks were last dropped or replaced, nanoseconds since 1970; 0 for never."""
    resync_reason: str = ""
    """Why."""
    verified: bool = False
    """Whether its state was compared with its worker's, and nothing was lost since."""
    drift_at: tuple[int, int] | None = None
    """(incarnation, next event id) at which drift was last seen."""
    lag_seconds: float = 0.0
    """From publishing to applying, of its newest batch."""
    evidence: Evidence = field(default_factory=Evidence)
    """When the index last learnt about it."""


@dataclass(slots=True)
class Tally:
    """Counts since the start of the replica; each is explained at ``EventCounts``."""

    batches: int = 0
    """Batches that the index was given."""
    applied: int = 0
    duplicates: int = 0
    fenced: int = 0
    gaps: int = 0
    unknown_parents: int = 0
    unknown_removals: int = 0
    rejected: int = 0
    unparsable: int = 0
    evictions: int = 0
    """Times that a rank was emptied because the index exceeded a bound."""
    misdirected: int = 0
    """Messages whose envelope contradicts their subject or the component."""
    unconfirmed: int = 0
    """Events that claim an incarnation or an id which the worker does not confirm; a batch without events counts 1."""
    repairs: int = 0
    drifts: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0

    def add(self, summary: ApplySummary, *, again: bool = False) -> None:
        """Counts a batch that could be read.

        Args:
            summary: What it did.
            again: Whether it was applied past a gap: what lies before the gap was counted the first time.
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
        """The counts as the contract has them; misdirected messages are among the rejected."""
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
