"""Decides whether a rank is reset after a batch, without I/O. Missing blocks are acceptable, wrong ones are not.

After a gap, a rank may list blocks without a copy at its engine. As a rule, it keeps them, and later batches wait until
its worker has sent the missing events. Only if they cannot wait, all its blocks are dropped. Later events are true
again but incomplete: the rank is partial until its state is fetched from its worker, its cache is cleared, or it starts
a new incarnation. A stored block whose parent was dropped is skipped. On a partial rank this is expected and causes no
further reset; otherwise one gap would keep the rank empty forever. A refused event may have been a removal, so it
empties a partial rank too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvrouter.core import ApplySummary, Rank

PERSISTENT_DRIFT = "persistent_drift"
"""Reason of a resync when the digest differs again right after the worker's own state was loaded."""


class ResyncPolicy(Protocol):
    """Requests and defers resyncs of ranks. Called from any thread, under the index's lock."""

    def request(self, rank: Rank, reason: str) -> None:
        """Requests a resync of a rank."""

    def may_retain(self, rank: Rank) -> bool:
        """Returns whether events after a gap may wait for the missing ones."""

    def is_deferred(self, rank: Rank, reason: str) -> bool:
        """Returns whether a resync for a reason backs off after false alarms."""


@dataclass(frozen=True, slots=True)
class RankReset:
    """Drop the rank's blocks and continue from a cursor."""

    reason: str
    """One of ``gap``, ``rejected``, ``unknown_parent``, ``drift``."""
    incarnation: int
    next_event_id: int
    """Cursor of the emptied rank."""
    reapply: bool
    """Whether the batch contains events from that cursor on, and so must be applied again."""


def reset_after(summary: ApplySummary, *, was_partial: bool) -> RankReset | None:
    """Returns the reset of a rank that a batch calls for; None if it calls for none.

    After a gap, the caller resets the rank only if the events behind the gap cannot wait for the missing ones.

    Args:
        summary: Result of applying the batch.
        was_partial: Whether the rank was partial before the batch.
    """
    if summary.unparsable:
        return None
    if summary.gap is not None:
        _, received = summary.gap
        return RankReset("gap", summary.incarnation, received, reapply=True)
    if summary.rejected:
        return RankReset("rejected", summary.incarnation, summary.next_event_id, reapply=False)
    if summary.unknown_parents and not was_partial:
        return RankReset("unknown_parent", summary.incarnation, summary.next_event_id, reapply=False)
    if summary.digest_differs:
        return RankReset("drift", summary.incarnation, summary.next_event_id, reapply=False)
    return None
