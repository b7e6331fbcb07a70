"""Which ranks want their worker's state, and when each may be fetched: decided without I/O.

A rank that could not be repaired is tried again after a pause that doubles, with jitter, so that ranks whose worker
came back do not ask in one moment. Whole states of one rank are fetched two seconds apart at least: a worker that
publishes nonsense all the time costs its own rank, not the Indexer.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from kvrouter.core import Rank

_FIRST_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 30.0
_STATE_SPACING_SECONDS = 2.0
_REMEMBERED = 4096  # fetches; more only if so many are within that time


@dataclass(slots=True)
class _Want:
    reason: str
    due: float
    failures: int = 0
    fresh: bool = False
    """Whether the worker has registered since its rank was last tried."""


class Wanted:
    """Ranks that wait for repair. Times are seconds of one monotonic clock."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._wants: dict[Rank, _Want] = {}
        self._queue: list[tuple[float, Rank]] = []
        # A heap of when ranks are due. An entry that its rank's want does not confirm is skipped, and so is one of a
        # rank under repair, which is queued again when that ends.
        self._active: dict[Rank, _Want] = {}
        self._state_fetched: dict[Rank, float] = {}

    def __len__(self) -> int:
        """Ranks that wait or are being repaired."""
        return len(self._wants.keys() | self._active.keys())

    def add(self, rank: Rank, reason: str, now: float) -> None:
        """A rank wants repair, at once unless it failed before; one that waits keeps its first reason."""
        want = self._wants.get(rank)
        if want is None:
            self._queue_up(rank, _Want(reason, now, fresh=reason == "registered"))
        elif reason == "registered":
            # The worker is back: what failed before says nothing.
            self._queue_up(rank, _Want(want.reason, now, fresh=True))

    def take(self, now: float) -> tuple[Rank, str] | None:
        """The next rank to repair, and why; ``done`` or ``failed`` must follow. None if none is due."""
        due = self._next_due()
        if due is None or due > now:
            return None
        _, rank = heapq.heappop(self._queue)
        self._active[rank] = self._wants.pop(rank)
        return rank, self._active[rank].reason

    def pause(self, now: float) -> float | None:
        """Seconds until the next rank is due; None if none waits."""
        due = self._next_due()
        return None if due is None else max(0.0, due - now)

    def failing(self, rank: Rank) -> bool:
        """Whether the last try at a rank failed."""
        want = self._wants.get(rank) or self._active.get(rank)
        return want is not None and want.failures > 0

    def failures(self, rank: Rank) -> int:
        """Tries at a rank that failed in a row."""
        want = self._wants.get(rank) or self._active.get(rank)
        return want.failures if want is not None else 0

    def may_fetch_state(self, rank: Rank, now: float) -> bool:
        """Whether the whole state of a rank may be fetched again so soon; if so, it counts as fetched."""
        if len(self._state_fetched) >= _REMEMBERED:
            recent = {each: at for each, at in self._state_fetched.items() if now - at < _STATE_SPACING_SECONDS}
            self._state_fetched = recent
        if now - self._state_fetched.get(rank, -_STATE_SPACING_SECONDS) < _STATE_SPACING_SECONDS:
            return False
        self._state_fetched[rank] = now
        return True

    def done(self, rank: Rank) -> None:
        """A rank was repaired. What was asked for meanwhile stays."""
        self._active.pop(rank, None)
        if rank in self._wants:
            self._queue_up(rank, self._wants[rank])

    def failed(self, rank: Rank, now: float) -> None:
        """A rank was not repaired; it waits for the next try, unless its worker has registered meanwhile."""
        want = self._active.pop(rank, None)
        if want is None:
            return
        meanwhile = self._wants.get(rank)
        if meanwhile is not None and meanwhile.fresh:
            self._queue_up(rank, meanwhile)
            return
        want.failures += 1
        pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** min(want.failures - 1, 10))
        want.due = now + pause * self._rng.uniform(0.5, 1.5)
        self._queue_up(rank, want)

    def _queue_up(self, rank: Rank, want: _Want) -> None:
        self._wants[rank] = want
        heapq.heappush(self._queue, (want.due, rank))

    def _next_due(self) -> float | None:
        while self._queue:
            due, rank = self._queue[0]
            want = self._wants.get(rank)
            if want is not None and want.due == due and rank not in self._active:
                return due
            heapq.heappop(self._queue)
        return None
