"""Prompts that ranks have yet to compute, in the order in which they were sent, and the time spent on the first."""

from __future__ import annotations

from typing import NamedTuple

from kvrouter.core import Rank

_Key = tuple[str, int, int]


class Head(NamedTuple):
    """The prompt that a rank is at."""

    tokens: int = 0
    """Tokens of it that had to be computed when it was sent; 0 where no prompt waits."""
    seconds: float = 0.0
    """Time since it became the first."""
    requests: int = 0
    """Requests without a first token, this one counted."""


class PrefillQueues:
    """Engines compute prompts first come first served, so the oldest without a first token is the one under way."""

    def __init__(self) -> None:
        self._tokens: dict[Rank, dict[_Key, int]] = {}
        self._since: dict[Rank, float] = {}

    def enter(self, rank: Rank, key: _Key, tokens: int, now: float) -> None:
        """A request is sent to a rank. ``tokens``: what must be computed of its prompt."""
        queue = self._tokens.setdefault(rank, {})
        if not queue:
            self._since[rank] = now
        queue[key] = tokens

    def leave(self, rank: Rank, key: _Key, now: float) -> None:
        """The request has its first token, or has ended; again, or unknown: nothing happens."""
        queue = self._tokens.get(rank)
        if queue is None or key not in queue:
            return
        del queue[key]
        self._since[rank] = now
        if not queue:
            del self._tokens[rank], self._since[rank]

    def head(self, rank: Rank, now: float) -> Head:
        """The prompt that a rank is at."""
        queue = self._tokens.get(rank)
        if not queue:
            return Head()
        return Head(next(iter(queue.values())), max(0.0, now - self._since[rank]), len(queue))
