"""Prompts that ranks have yet to compute, in the order of their dispatch, with the time spent on the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from kvrouter.core import Rank
from numpy.typing import NDArray

_Key = tuple[str, int, int]


class Head(NamedTuple):
    """The prompt that a rank is computing."""

    tokens: int = 0
    """Its tokens that had to be computed at dispatch; 0 if no prompt waits."""
    seconds: float = 0.0
    """Seconds since it became the first."""
    requests: int = 0
    """Requests without a first token, including this one."""


class Heads(NamedTuple):
    """Heads as columns of shape (ranks,), in the order given to ``show``."""

    tokens: NDArray[np.int64]
    requests: NDArray[np.int64]
    since: NDArray[np.float64]
    """Seconds of the clock at which each became the first; infinite if no prompt waits."""
    now: float
    """Seconds of the clock at which the heads were read."""

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Seconds since each became the first; 0 if no prompt waits. Computed on demand: few policies need it."""
        seconds: NDArray[np.float64] = np.maximum(self.now - self.since, 0.0)
        return seconds

    def of(self, place: int) -> Head:
        """Returns the head of the rank at an index."""
        return Head(int(self.tokens[place]), max(0.0, self.now - float(self.since[place])), int(self.requests[place]))


class PrefillQueues:
    """Tracks prompts by rank. Engines compute them in order of arrival, so the oldest one is being computed."""

    def __init__(self) -> None:
        self._queues: dict[Rank, dict[_Key, int]] = {}
        self._since: dict[Rank, float] = {}
        self.show(())

    def show(self, ranks: Sequence[Rank]) -> None:
        """Sets the ranks of the columns and their order."""
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._tokens, self._requests = np.zeros(len(ranks), np.int64), np.zeros(len(ranks), np.int64)
        self._first_since = np.full(len(ranks), np.inf)
        self._is_read = False
        for rank in self._queues:
            self._update(rank)

    def enter(self, rank: Rank, key: _Key, tokens: int, now: float) -> None:
        """Adds a request that was dispatched to a rank, with the prompt tokens that must be computed."""
        queue = self._queues.setdefault(rank, {})
        if not queue:
            self._since[rank] = now
        queue[key] = tokens
        self._update(rank)

    def leave(self, rank: Rank, key: _Key, now: float) -> None:
        """Removes a request that has its first token or has ended. An unknown request changes nothing."""
        queue = self._queues.get(rank)
        if queue is None or key not in queue:
            return
        del queue[key]
        self._since[rank] = now
        if not queue:
            del self._queues[rank], self._since[rank]
        self._update(rank)

    def waiting(self, rank: Rank) -> int:
        """Returns the number of requests of a rank without a first token."""
        return len(self._queues.get(rank, ()))

    def head(self, rank: Rank, now: float) -> Head:
        """Returns the prompt that a rank is computing."""
        queue = self._queues.get(rank)
        if not queue:
            return Head()
        return Head(next(iter(queue.values())), max(0.0, now - self._since[rank]), len(queue))

    def heads(self, now: float) -> Heads:
        """Returns the prompts that the shown ranks are computing."""
        # A change copies the columns if they were read, so that a reader's do not change.
        self._is_read = True
        return Heads(self._tokens, self._requests, self._first_since, now)

    def _update(self, rank: Rank) -> None:
        place = self._places.get(rank)
        if place is None:
            return
        if self._is_read:
            self._is_read = False
            self._tokens, self._requests = self._tokens.copy(), self._requests.copy()
            self._first_since = self._first_since.copy()
        queue = self._queues.get(rank)
        self._tokens[place] = next(iter(queue.values())) if queue else 0
        self._requests[place] = len(queue) if queue else 0
        self._first_since[place] = self._since.get(rank, np.inf)
