"""Prompts that ranks have yet to compute, in the order in which they were sent, and the time spent on the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from kvrouter.core import Rank
from numpy.typing import NDArray

_Key = tuple[str, int, int]


class Head(NamedTuple):
    """The prompt that a rank is at."""

    tokens: int = 0
    """Tokens of it that had to be computed when it was sent; 0 where no prompt waits."""
    seconds: float = 0.0
    """Time since it became the first."""
    requests: int = 0
    """Requests without a first token, this one counted."""


class Heads(NamedTuple):
    """The same as columns, entry i of each speaking of the i-th rank shown."""

    tokens: NDArray[np.int64]
    seconds: NDArray[np.float64]
    requests: NDArray[np.int64]


class PrefillQueues:
    """Engines compute prompts first come first served, so the oldest without a first token is the one under way."""

    def __init__(self) -> None:
        self._queues: dict[Rank, dict[_Key, int]] = {}
        self._since: dict[Rank, float] = {}
        self.show(())

    def show(self, ranks: Sequence[Rank]) -> None:
        """The ranks of the columns, in their order."""
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._tokens, self._requests = np.zeros(len(ranks), np.int64), np.zeros(len(ranks), np.int64)
        self._first_since = np.full(len(ranks), np.inf)
        for rank in self._queues:
            self._update(rank)

    def enter(self, rank: Rank, key: _Key, tokens: int, now: float) -> None:
        """A request is sent to a rank. ``tokens``: what must be computed of its prompt."""
        queue = self._queues.setdefault(rank, {})
        if not queue:
            self._since[rank] = now
        queue[key] = tokens
        self._update(rank)

    def leave(self, rank: Rank, key: _Key, now: float) -> None:
        """The request has its first token, or has ended; again, or unknown: nothing happens."""
        queue = self._queues.get(rank)
        if queue is None or key not in queue:
            return
        del queue[key]
        self._since[rank] = now
        if not queue:
            del self._queues[rank], self._since[rank]
        self._update(rank)

    def head(self, rank: Rank, now: float) -> Head:
        """The prompt that a rank is at."""
        queue = self._queues.get(rank)
        if not queue:
            return Head()
        return Head(next(iter(queue.values())), max(0.0, now - self._since[rank]), len(queue))

    def heads(self, now: float) -> Heads:
        """The prompts that the ranks shown are at."""
        return Heads(self._tokens.copy(), np.maximum(now - self._first_since, 0.0), self._requests.copy())

    def _update(self, rank: Rank) -> None:
        place = self._places.get(rank)
        if place is None:
            return
        queue = self._queues.get(rank)
        self._tokens[place] = next(iter(queue.values())) if queue else 0
        self._requests[place] = len(queue) if queue else 0
        self._first_since[place] = self._since.get(rank, np.inf)
