"""Decides which repair a rank needs after a batch, without I/O. Missing blocks are acceptable, wrong ones are not.

After a gap, a rank may list blocks without a copy at its engine, so all its blocks are dropped. Later events are true
again but incomplete: the rank is partial until its state is fetched from its worker, its cache is cleared, or it starts
a new incarnation. A stored block whose parent was dropped is skipped. On a partial rank this is expected and causes no
further repair; otherwise one gap would keep the rank empty forever. A refused event may have been a removal, so it
empties a partial rank too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvrouter.core import ApplySummary, Rank

PERSISTENT_DRIFT = "persistent_drift"
"""Reason of a repair when the digest differs again right after the worker's own state was loaded."""


class RepairPolicy(Protocol):
    """Requests and defers repairs by a rank's worker. Called from any thread, under the index's lock."""

    def suspect(self, rank: Rank, reason: str) -> None:
        """Requests a comparison of a rank with its worker."""

    def may_retain(self, rank: Rank) -> bool:
        """Returns whether events after a gap may wait for the missing ones."""

    def is_deferred(self, rank: Rank, reason: str) -> bool:
        """Returns whether a repair for a reason backs off after false alarms."""


@dataclass(frozen=True, slots=True)
class Repair:
    """Drop the rank's blocks and continue from a cursor."""

    reason: str
    """One of ``gap``, ``rejected``, ``unknown_parent``, ``drift``."""
    incarnation: int
    next_event_id: int
    """Cursor of the emptied rank."""
    reapply: bool
    """Whether the batch contains events from that cursor on, and so must be applied again."""


def repair_after(summary: ApplySummary, *, was_partial: bool) -> Repair | None:
    """Returns the repair of a rank after a batch; None if it needs none.

    Args:
        summary: Result of applying the batch.
        was_partial: Whether the rank was partial before the batch.
    """
    if summary.unparsable:
        return None
    if summary.gap is not None:
        _, received = summary.gap
        return Repair("gap", summary.incarnation, received, reapply=True)
    if summary.rejected:
        return Repair("rejected", summary.incarnation, summary.next_event_id, reapply=False)
    if summary.unknown_parents and not was_partial:
        return Repair("unknown_parent", summary.incarnation, summary.next_event_id, reapply=False)
    if summary.digest_differs:
        return Repair("drift", summary.incarnation, summary.next_event_id, reapply=False)
    return None
