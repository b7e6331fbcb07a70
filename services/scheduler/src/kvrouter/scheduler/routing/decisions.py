"""Recent decisions, with all that spoke for and against each candidate."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvrouter.core import Rank
from kvrouter.scheduler.identifiers import component_message, rank_message, rank_of
from kvrouter.scheduler.policies.interface import Explanation, SchedulingContext
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import CandidateTerms, Decision

_MAX_ROWS = 200_000
"""Candidates over all decisions kept: some 50 MB of columns."""


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision. What a person reads of it is written only when asked for."""

    decision_id: int
    component: ComponentName
    request_id: str
    """Empty where nothing was booked."""
    attempt: int
    mode: str
    chosen: Rank | None
    """None where no candidate was left."""
    context: SchedulingContext | None
    """None where no candidate was left."""
    explanation: Explanation
    excluded: Callable[[], Mapping[Rank, str]]
    """Tells which candidates were left out, and why."""
    rows: int
    """Candidates that it keeps columns of."""
    prompt_blocks: int
    load_only: bool
    decided_unix_ns: int
    queued_seconds: float = 0.0
    """Time that the request was held before."""

    def to_message(self) -> Decision:
        """As the contract has it, candidates in order of rank."""
        weighed = [] if self.context is None else [self._terms(index) for index in range(len(self.context.ranks))]
        left_out = [CandidateTerms(rank=rank_message(rank), excluded=why) for rank, why in self.excluded().items()]
        return self._message(sorted([*weighed, *left_out], key=rank_of))

    def to_short_message(self) -> Decision:
        """The same; of the candidates only the chosen one and the cheapest other, where they were weighed."""
        if self.context is None or self.chosen is None or not len(self.explanation.costs):
            return self._message([])
        costs, chosen = self.explanation.costs, self.context.ranks.index(self.chosen)
        others = sorted(
            (index for index in range(len(costs)) if index != chosen), key=lambda index: float(costs[index])
        )
        return self._message([self._terms(index) for index in (chosen, *others[:1])])

    def _message(self, candidates: list[CandidateTerms]) -> Decision:
        return Decision(
            decision_id=self.decision_id,
            request_id=self.request_id,
            mode=self.mode,
            chosen=None if self.chosen is None else rank_message(self.chosen),
            decided_unix_ns=self.decided_unix_ns,
            candidates=candidates,
            reason=self.explanation.reason,
            prompt_blocks=self.prompt_blocks,
            load_only=self.load_only,
            attempt=self.attempt,
            queued_us=int(self.queued_seconds * 1e6),
            component=component_message(self.component),
        )

    def _terms(self, index: int) -> CandidateTerms:
        assert self.context is not None  # noqa: S101 - only weighed candidates have an index
        return CandidateTerms(
            rank=rank_message(self.context.ranks[index]),
            cost=float(self.explanation.costs[index]) if len(self.explanation.costs) else 0.0,
            overlap_blocks=int(self.context.overlap_blocks[index]),
            terms={name: float(column[index]) for name, column in self.explanation.terms.items()},
            formula=self.explanation.formula(index),
        )


class Decisions:
    """The newest decisions: so many, and of so many candidates in all, whichever is reached first."""

    def __init__(self, capacity: int, *, max_rows: int = _MAX_ROWS) -> None:
        self.capacity = capacity
        """Most decisions that are kept."""
        self._max_rows = max_rows
        self._ring: deque[Decided] = deque()
        self._by_id: dict[int, Decided] = {}
        self._by_request: dict[str, Decided] = {}
        self._rows = 0
        # Starting at the time keeps ids of a Scheduler's earlier life apart from those of this one.
        self._ids = itertools.count(time.time_ns())

    def __len__(self) -> int:
        return len(self._ring)

    def next_id(self) -> int:
        """Id for the decision that comes next."""
        return next(self._ids)

    def add(self, decided: Decided) -> None:
        """Keeps a decision, at the expense of the oldest ones."""
        self._ring.append(decided)
        self._rows += decided.rows
        self._by_id[decided.decision_id] = decided
        for request_id in _names(decided.request_id):
            self._by_request[request_id] = decided
        while self._ring and (len(self._ring) > self.capacity or self._rows > self._max_rows):
            self._drop_oldest()

    def by_id(self, decision_id: int) -> Decided | None:
        """A decision by its id."""
        return self._by_id.get(decision_id)

    def by_request(self, request_id: str) -> Decided | None:
        """The newest decision on a request, by the id that it was booked under or by the one that its client gave."""
        return self._by_request.get(request_id)

    def newest(self, count: int, component: ComponentName | None = None) -> list[Decided]:
        """So many of the last ones, newest first; those of one component, or of all."""
        constraints = (each for each in reversed(self._ring) if component in (None, each.component))
        return list(itertools.islice(constraints, count))

    def _drop_oldest(self) -> None:
        oldest = self._ring.popleft()
        self._rows -= oldest.rows
        del self._by_id[oldest.decision_id]
        for request_id in _names(oldest.request_id):
            if self._by_request.get(request_id) is oldest:
                del self._by_request[request_id]


def _names(request_id: str) -> set[str]:
    """The ids that a booked request goes by: a Frontend books under the client's id, ``~`` and a random part."""
    return {request_id, request_id.rpartition("~")[0]} - {""}
