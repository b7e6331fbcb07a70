"""Recent decisions, for Explain and status."""

from __future__ import annotations

import itertools
import time
from collections import deque

from kvrouter.scheduler.routing.decision import Decision
from kvrouter.v1.names import ComponentName

_MAX_ROWS = 200_000
"""Candidates over all decisions kept: some 50 MB of columns."""


class Decisions:
    """The newest decisions: so many, and of so many candidates in all, whichever is reached first."""

    def __init__(self, capacity: int, *, max_rows: int = _MAX_ROWS) -> None:
        self.capacity = capacity
        """Most decisions that are kept."""
        self._max_rows = max_rows
        self._ring: deque[Decision] = deque()
        self._by_id: dict[int, Decision] = {}
        self._by_request: dict[str, Decision] = {}
        self._rows = 0
        # Starting at the time keeps ids of a Scheduler's earlier life apart from those of this one.
        self._ids = itertools.count(time.time_ns())

    def __len__(self) -> int:
        return len(self._ring)

    def next_id(self) -> int:
        """Id for the decision that comes next."""
        return next(self._ids)

    def add(self, decision: Decision) -> None:
        """Keeps a decision, at the expense of the oldest ones."""
        self._ring.append(decision)
        self._rows += len(decision.snapshot.worker_set)
        self._by_id[decision.decision_id] = decision
        for request_id in _names(decision.request_id):
            self._by_request[request_id] = decision
        while self._ring and (len(self._ring) > self.capacity or self._rows > self._max_rows):
            self._drop_oldest()

    def by_id(self, decision_id: int) -> Decision | None:
        """A decision by its id."""
        return self._by_id.get(decision_id)

    def by_request(self, request_id: str) -> Decision | None:
        """The newest decision on a request, by the id that it was booked under or by the one that its client gave."""
        return self._by_request.get(request_id)

    def newest(self, count: int, component: ComponentName | None = None) -> list[Decision]:
        """So many of the last ones, newest first; those of one component, or of all."""
        constraints = (each for each in reversed(self._ring) if component in (None, each.component))
        return list(itertools.islice(constraints, count))

    def _drop_oldest(self) -> None:
        oldest = self._ring.popleft()
        self._rows -= len(oldest.snapshot.worker_set)
        del self._by_id[oldest.decision_id]
        for request_id in _names(oldest.request_id):
            if self._by_request.get(request_id) is oldest:
                del self._by_request[request_id]


def _names(request_id: str) -> tuple[str, ...]:
    """The ids that a booked request goes by: a Frontend books under the client's id, ``~`` and a random part."""
    clients = request_id.rpartition("~")[0]
    return (request_id, clients) if clients else (request_id,) if request_id else ()
