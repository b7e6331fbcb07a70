"""Which epoch of each other Scheduler counts: decided without I/O.

An epoch is the start time of a Scheduler process, by its own clock, and fences what a former process left under way. An
event alone may begin an epoch the first time. Where events contradict each other (a clock went back, or an event is
forged), the Scheduler itself is asked: its own answer counts, higher or lower, and from then on no event alone begins
an epoch of that Scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from kvrouter.runtime.backoff import Backoff

RETRY_SECONDS = (0.25, 30.0)
"""First and longest pause before a Scheduler is asked again."""
_MAX_DISPUTES = 64
_QUIET_SECONDS = 60.0


class Verdict(Enum):
    """What to do with an event, by its epoch."""

    APPLY = auto()
    OLD = auto()
    """It is of an earlier epoch, or the later one is untrue."""
    UNCONFIRMED = auto()
    """It claims a later epoch that the Scheduler has not confirmed."""


@dataclass(slots=True)
class _Dispute:
    due: float
    is_open: bool = True
    backoff: Backoff = field(default_factory=lambda: Backoff(*RETRY_SECONDS))


class Epochs:
    """The epochs of the Schedulers of one component. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._current: dict[str, int] = {}
        self._confirmed: set[str] = set()
        self._disputes: dict[str, _Dispute] = {}

    def current(self, router_id: str) -> int | None:
        """Returns the epoch that counts; None if the Scheduler is not known."""
        return self._current.get(router_id)

    def judge(self, router_id: str, epoch: int, now: float) -> Verdict:
        """Judges an event; what contradicts the current epoch opens a dispute."""
        current = self._current.setdefault(router_id, epoch)
        if epoch == current:
            return Verdict.APPLY
        if epoch > current and router_id not in self._confirmed:
            self._current[router_id] = epoch
            return Verdict.APPLY
        self.dispute(router_id, now)
        return Verdict.OLD if epoch < current else Verdict.UNCONFIRMED

    def dispute(self, router_id: str, now: float) -> None:
        """Has a Scheduler asked for its epoch: at once, unless it was asked in vain of late."""
        known = self._disputes.get(router_id)
        if known is None:
            if len(self._disputes) < _MAX_DISPUTES:
                self._disputes[router_id] = _Dispute(now)
            return
        if now - known.due >= _QUIET_SECONDS:
            known.backoff.succeeded()
        known.is_open = True
        known.due = max(known.due, now)

    def due(self, now: float) -> list[str]:
        """Returns the Schedulers to ask at once."""
        return [router_id for router_id, each in self._disputes.items() if each.is_open and each.due <= now]

    def next_due(self) -> float | None:
        """Returns when the next Scheduler is to be asked; None if none is."""
        return min((each.due for each in self._disputes.values() if each.is_open), default=None)

    def settle(self, router_id: str, epoch: int, now: float) -> bool:
        """Takes a Scheduler's own answer. Returns whether another epoch counts from now on."""
        changed = self._current.get(router_id) != epoch
        self._current[router_id] = epoch
        self._confirmed.add(router_id)
        dispute = self._disputes.get(router_id)
        if dispute is not None:
            dispute.is_open = False
            if changed:
                dispute.backoff.succeeded()
            else:
                dispute.due = now + dispute.backoff.failed()
        return changed

    def unanswered(self, router_id: str, now: float) -> None:
        """Notes that a Scheduler did not answer; it is asked again later."""
        dispute = self._disputes.get(router_id)
        if dispute is not None:
            dispute.due = now + dispute.backoff.failed()

    def forget(self, router_id: str) -> None:
        """Drops what is known of a Scheduler that is gone."""
        self._current.pop(router_id, None)
        self._confirmed.discard(router_id)
        self._disputes.pop(router_id, None)

    def forget_quiet(self, now: float) -> None:
        """Drops disputes that were quiet for a minute, and those about Schedulers of which nothing else is known."""
        self._disputes = {
            router_id: each
            for router_id, each in self._disputes.items()
            if now - each.due < _QUIET_SECONDS and (router_id in self._current or each.due - now < RETRY_SECONDS[1] / 2)
        }
