"""Decides which incarnation of each other Scheduler counts. Does no I/O.

The incarnation is the start time of a Scheduler process by its own clock. It fences events of an earlier process. The
first incarnation may come from an event alone. If events contradict each other, because a clock went back or an event
is forged, the Scheduler itself is asked: its own answer counts, higher or lower, and from then on no event alone begins
an incarnation of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from kvrouter.runtime.deadline import Backoff

RETRY_SECONDS = (0.25, 30.0)
"""First and longest pause before a Scheduler is asked again, seconds."""
_MAX_DISPUTES = 64
_QUIET_SECONDS = 60.0


class Verdict(Enum):
    """Treatment of an event, by its incarnation."""

    APPLY = auto()
    OLD = auto()
    """It belongs to an earlier incarnation, or its later one was refuted."""
    UNCONFIRMED = auto()
    """It claims a later incarnation, unconfirmed by the Scheduler."""


@dataclass(slots=True)
class _Dispute:
    due: float
    is_open: bool = True
    backoff: Backoff = field(default_factory=lambda: Backoff(*RETRY_SECONDS))


class Incarnations:
    """The incarnations of the Schedulers of one component. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._current: dict[str, int] = {}
        self._confirmed: set[str] = set()
        self._disputes: dict[str, _Dispute] = {}

    def current(self, scheduler_id: str) -> int | None:
        """Returns the current incarnation; None if the Scheduler is unknown."""
        return self._current.get(scheduler_id)

    def judge(self, scheduler_id: str, incarnation: int, now: float) -> Verdict:
        """Judges an event. A contradiction to the current incarnation opens a dispute."""
        current = self._current.setdefault(scheduler_id, incarnation)
        if incarnation == current:
            return Verdict.APPLY
        if incarnation > current and scheduler_id not in self._confirmed:
            self._current[scheduler_id] = incarnation
            return Verdict.APPLY
        self.dispute(scheduler_id, now)
        return Verdict.OLD if incarnation < current else Verdict.UNCONFIRMED

    def dispute(self, scheduler_id: str, now: float) -> None:
        """Asks for a Scheduler's own answer about its incarnation: at once, or after its back-off."""
        known = self._disputes.get(scheduler_id)
        if known is None:
            if len(self._disputes) < _MAX_DISPUTES:
                self._disputes[scheduler_id] = _Dispute(now)
            return
        if now - known.due >= _QUIET_SECONDS:
            known.backoff.succeeded()
        known.is_open = True
        known.due = max(known.due, now)

    def due(self, now: float) -> list[str]:
        """Returns the Schedulers to ask now."""
        return [scheduler_id for scheduler_id, each in self._disputes.items() if each.is_open and each.due <= now]

    def next_due(self) -> float | None:
        """Returns when the next Scheduler is to be asked; None if none is."""
        return min((each.due for each in self._disputes.values() if each.is_open), default=None)

    def settle(self, scheduler_id: str, incarnation: int, now: float) -> bool:
        """Applies a Scheduler's own answer. Returns whether another incarnation counts from now on."""
        changed = self._current.get(scheduler_id) != incarnation
        self._current[scheduler_id] = incarnation
        self._confirmed.add(scheduler_id)
        dispute = self._disputes.get(scheduler_id)
        if dispute is not None:
            dispute.is_open = False
            if changed:
                dispute.backoff.succeeded()
            else:
                dispute.due = now + dispute.backoff.failed()
        return changed

    def unanswered(self, scheduler_id: str, now: float) -> None:
        """Records a missing answer of a Scheduler. It is asked again after a pause."""
        dispute = self._disputes.get(scheduler_id)
        if dispute is not None:
            dispute.due = now + dispute.backoff.failed()

    def forget(self, scheduler_id: str) -> None:
        """Drops the state of a gone Scheduler."""
        self._current.pop(scheduler_id, None)
        self._confirmed.discard(scheduler_id)
        self._disputes.pop(scheduler_id, None)

    def forget_quiet(self, now: float) -> None:
        """Drops disputes without news for a minute, and those about otherwise unknown Schedulers."""
        self._disputes = {
            scheduler_id: each
            for scheduler_id, each in self._disputes.items()
            if now - each.due < _QUIET_SECONDS
            and (scheduler_id in self._current or each.due - now < RETRY_SECONDS[1] / 2)
        }
