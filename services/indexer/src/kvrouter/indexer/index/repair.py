"""What must happen to a rank after a batch: less, never wrong.

A rank whose history has a hole may claim blocks that its engine has dropped, so its blocks go. What is learnt
afterwards is true again, only incomplete: the rank is partial until its state is fetched from its worker, its cache is
cleared, or it starts a new life. A store below a parent that went with the others is skipped: on a partial rank that is
expected and costs no more blocks, or one hole would keep the rank empty for ever. A refused event may have been a
removal, so it drops a partial rank too.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrouter.core import ApplySummary

PERSISTENT_DRIFT = "persistent_drift"
"""Reason of a rank that differed again from its worker's digest right after the worker's state was loaded."""


@dataclass(frozen=True, slots=True)
class Repair:
    """Drop the rank's blocks and go on from a cursor."""

    reason: str
    """One of ``gap``, ``rejected``, ``unknown_parent``, ``drift``."""
    incarnation: int
    next_event_id: int
    """Cursor of the emptied rank."""
    reapply: bool
    """Whether the batch holds events that the cursor leads to, so that it is applied once more."""


def repair_after(summary: ApplySummary, *, was_partial: bool) -> Repair | None:
    """The repair that a batch calls for, or None.

    Args:
        summary: What the batch did.
        was_partial: Whether blocks of the rank were known to be missing before the batch.
    """
    if summary.unparsable:
        return None
    if summary.gap is not None:
        _, found = summary.gap
        return Repair("gap", summary.incarnation, found, reapply=True)
    if summary.rejected:
        return Repair("rejected", summary.incarnation, summary.next_event_id, reapply=False)
    if summary.unknown_parents and not was_partial:
        return Repair("unknown_parent", summary.incarnation, summary.next_event_id, reapply=False)
    if summary.digest_differs:
        return Repair("drift", summary.incarnation, summary.next_event_id, reapply=False)
    return None
