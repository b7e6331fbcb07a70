"""Recent decisions, for Explain and status."""

from __future__ import annotations

import itertools
import time
from collections import deque

import structlog
from kvrouter.scheduler.routing.decide import Decision
from kvrouter.v1.names import ComponentName

log = structlog.get_logger(component="scheduler")

_MAX_ROWS = 200_000
"""Candidates over all decisions kept: some 50 MB of columns."""


class Decisions:
    """The newest decisions: so many, and of so many candidates in all, whichever is reached first."""

    def __init__(self, capacity: int, *, max_rows: int = _MAX_ROWS, log_formulas: bool = False) -> None:
        """``log_formulas`` logs the cost formula of every candidate of every decision."""
        self.capacity = capacity
        """Most kept decisions."""
        self._max_rows = max_rows
        self._log_formulas = log_formulas
        self._ring: deque[Decision] = deque()
        self._rows = 0
        # Starting at the time keeps ids of a Scheduler's earlier life apart from those of this one.
        self._ids = itertools.count(time.time_ns())

    def __len__(self) -> int:
        return len(self._ring)

    def next_id(self) -> int:
        """Id of the next decision."""
        return next(self._ids)

    def add(self, decision: Decision) -> None:
        """Keeps a decision, at the expense of the oldest ones."""
        self._ring.append(decision)
        self._rows += len(decision.snapshot.worker_set)
        while self._ring and (len(self._ring) > self.capacity or self._rows > self._max_rows):
            self._rows -= len(self._ring.popleft().snapshot.worker_set)
        if self._log_formulas and decision.context is not None:
            for formula in filter(None, map(decision.explanation.formula, range(len(decision.context.ranks)))):
                log.info(
                    "decision.formula", formula=formula, decision=decision.decision_id, request_id=decision.request_id
                )

    def by_id(self, decision_id: int) -> Decision | None:
        """Returns a decision by its id. It searches them all: look-ups are rare, decisions are not."""
        return next((each for each in reversed(self._ring) if each.decision_id == decision_id), None)

    def by_request(self, request_id: str) -> Decision | None:
        """Returns the newest decision on a request; a prefill worker's only if there is no other.

        ``request_id`` is the id of its booking, or the one of its client: a Frontend books under the
        client's id, ``~`` and a random part.
        """
        if not request_id:
            return None
        matches = [each for each in reversed(self._ring) if _names(each.request_id, request_id)]
        return next((each for each in matches if not each.is_of_prefill), matches[0] if matches else None)

    def newest(self, count: int, component: ComponentName | None = None) -> list[Decision]:
        """So many of the last ones, newest first; those of one component, or of all."""
        constraints = (each for each in reversed(self._ring) if component in (None, each.component))
        return list(itertools.islice(constraints, count))


def _names(booked_id: str, request_id: str) -> bool:
    """Returns whether a request id names a booked request."""
    return booked_id.startswith(request_id) and request_id in (booked_id, booked_id.rpartition("~")[0])
