"""Requests that wait in the router for the rank where they are cheapest.

An engine's queue is first come first served: its head holds up all behind it, and what is in it cannot go elsewhere.
Here a request that fits passes one that does not, and where each goes is decided when it can go.

    queue.add(request, wait, now)                     # the policy said Wait
    for request in queue.late(now):                   # cannot make its deadline
        ...refuse it
    for request, decided in queue.release(now, decide):
        ...book and send it, before the next is looked at
    queue.started(request)                            # it got its first token, or has ended
    queue.remove(request)                             # its caller has gone

Order: priority, then who needs least KV cache, which is what all here wait for; waiting counts, at AGING.

Nobody starves. The oldest of those that have waited PATIENCE goes to its cheapest rank even if that has no room: one at
a time, the next when it has started, or has not for STALL. A request that finds k older ones here is therefore gone
after PATIENCE + (k + 1) * (STALL + INTERVAL) at the latest, whatever its need and its priority, as long as ``release``
is called when it is due. What comes later does not count, unless it has waited longer elsewhere.

A request is late if it would miss its deadline by what is known of the wait:

    now + (those ahead + 1) * (mean time between two that went) + own work > deadline

The mean is over the last WINDOW or so, with the time since the last one; with fewer than LEAST it is taken for 0.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvrouter.core import Rank
from kvrouter.scheduler.policies.interface import Choice, Wait

AGING = 2000.0
"""Tokens of room that a second of waiting is worth. A prompt of 100,000 tokens passes one that has just come when it
has waited 50 s; far sooner its patience ends. At 0 long prompts would all wait for that."""

PATIENCE_S = 10.0
"""Seconds after which a request goes whatever its rank's state."""

STALL_S = 30.0
"""Seconds that one sent without room keeps the next from being. Far above a first token on a full rank, so that it only
counts where a caller never tells."""

INTERVAL_S = 0.02
"""Least time between two looks at all that is held: load changes with the steps of engines, which take as long."""

MAX_QUEUED_REQUESTS = 4096
"""Requests that may wait in one component."""

TRIES_PER_RANK, TRIES = 4, 64
"""Requests that a look finds to have no room, at one rank and in all, before it takes the others for the same: a look
takes milliseconds however many wait. Those beyond ``TRIES`` are next in the look that follows."""

WINDOW, LEAST = 64, 8
"""Releases that the mean time between two is taken over, and the fewest that make a mean."""

T = TypeVar("T", bound=Hashable)


_Place = tuple[int, float]


@dataclass(slots=True)
class _Queued:
    number: int
    since: float
    deadline: float
    priority: int
    room_tokens: int
    work_ms: float
    rank: Rank | None

    @property
    def must_go(self) -> float:
        """When its prompt must begin to be computed, seconds."""
        return self.deadline - self.work_ms / 1e3

    @property
    def place(self) -> _Place:
        """Where it is in the order. The time of asking makes no difference: all age alike."""
        return -self.priority, self.room_tokens + AGING * self.since


class RequestQueue(Generic[T]):
    """The requests held of one component. Pure: it is handed every event, with its time in seconds."""

    def __init__(self, max_queued_requests: int = MAX_QUEUED_REQUESTS) -> None:
        self.max_queued_requests = max_queued_requests
        self._queued: dict[T, _Queued] = {}
        # Sorted; the number keeps those apart that are equal otherwise.
        self._order: list[tuple[_Place, int, T]] = []
        self._ages: list[tuple[float, int, T]] = []
        self._numbers = itertools.count()
        self._forced: tuple[T, float] | None = None
        self._next_look = -math.inf
        self._look_again = False
        self._looked_to: tuple[_Place, int] | None = None
        self._gone, self._counted_from = 0.0, 0.0
        self._soonest = math.inf
        """No one must go before that."""

    def __len__(self) -> int:
        """Requests held."""
        return len(self._queued)

    def __contains__(self, request: T) -> bool:
        """Whether it is held."""
        return request in self._queued

    @property
    def full(self) -> bool:
        """Whether as many wait as may."""
        return len(self._queued) >= self.max_queued_requests

    @property
    def oldest(self) -> T | None:
        """The one that has waited longest."""
        return self._ages[0][2] if self._ages else None

    def add(
        self,
        request: T,
        wait: Wait,
        now: float,
        *,
        since: float | None = None,
        deadline: float = math.inf,
        priority: int = 0,
    ) -> bool:
        """Takes a request in that waits ``since`` then. Returns False, and does not, if as many wait as may."""
        if self.full:
            return False
        if not self._queued:
            self._gone, self._counted_from = 0.0, now
        since = now if since is None else since
        queued = _Queued(next(self._numbers), since, deadline, priority, wait.room_tokens, wait.work_ms, wait.rank)
        self._queued[request] = queued
        self._soonest = min(self._soonest, queued.must_go)
        insort(self._order, (queued.place, queued.number, request))
        insort(self._ages, (since, queued.number, request))
        return True

    def remove(self, request: T) -> bool:
        """Forgets a request. Returns whether it was held."""
        self.started(request)
        return self._drop(request)

    def started(self, request: T) -> None:
        """A request that was sent has got its first token, or has ended."""
        if self._forced is not None and self._forced[0] == request:
            self._forced = None

    def is_late(self, request: T, now: float) -> bool:
        """Whether one that is held would miss its deadline."""
        queued = self._queued[request]
        ahead = bisect_left(self._order, (queued.place, queued.number))
        return now + (ahead + 1) * self._between_s(now) > queued.must_go

    def late(self, now: float) -> list[T]:
        """Those that would miss their deadline."""
        between = self._between_s(now)
        found: list[T] = []
        if now + len(self._queued) * between <= self._soonest:
            return found
        self._soonest = math.inf
        for index, (_, _, request) in enumerate(self._order):
            must_go = self._queued[request].must_go
            if now + (index - len(found) + 1) * between > must_go:
                found.append(request)
            else:
                self._soonest = min(self._soonest, must_go)
        return found

    def release(self, now: float, decide: Callable[[T], Choice | Wait]) -> Iterator[tuple[T, Choice | Wait]]:
        """Those that go now, each with the decision on it: a Choice, or the Hold of one whose patience has ended.

        ``decide`` is asked of one after the other, in order; what it says must reflect those that went before. It may
        remove the one that it is asked about.
        """
        if not self._queued:
            return
        if now < self._next_look:
            self._look_again = True
            return
        self._next_look, self._look_again = now + INTERVAL_S, False
        impatient = self._impatient(now)
        without_room: Counter[Rank | None] = Counter()
        for request in self._in_order(impatient):
            queued = self._queued.get(request)
            if queued is None or (without_room[queued.rank] >= TRIES_PER_RANK and queued.rank and request != impatient):
                continue
            decided = decide(request)
            if request not in self._queued:
                continue
            if isinstance(decided, Wait):
                self._keep_queued(request, queued, decided)
                if request != impatient:
                    without_room[queued.rank] += 1
                    if without_room.total() >= TRIES:
                        self._looked_to, self._look_again = (queued.place, queued.number + 1), True
                        return
                    continue
                self._forced = (request, now)
            self._drop(request)
            self._count(now)
            yield request, decided
        self._looked_to = None

    def next_due(self) -> float:
        """When to release though nothing happens, seconds; infinity if never."""
        if not self._queued:
            return math.inf
        again = self._next_look if self._look_again else math.inf
        patience = self._ages[0][0] + PATIENCE_S
        if self._forced is not None:
            patience = max(patience, self._forced[1] + STALL_S)
        return min(again, max(self._next_look, patience))

    def _impatient(self, now: float) -> T | None:
        """The one that goes whatever its rank's state."""
        if self._forced is not None and now < self._forced[1] + STALL_S:
            return None
        since, _, oldest = self._ages[0]
        return oldest if now >= since + PATIENCE_S else None

    def _in_order(self, first: T | None) -> list[T]:
        """``first``, then those that the last look did not come to, then the others, each in order."""
        start = 0 if self._looked_to is None else bisect_left(self._order, self._looked_to)
        requests = [request for _, _, request in self._order[start:] + self._order[:start]]
        return requests if first is None else [first, *requests]

    def _drop(self, request: T) -> bool:
        queued = self._queued.pop(request, None)
        if queued is None:
            return False
        del self._order[bisect_left(self._order, (queued.place, queued.number))]
        del self._ages[bisect_left(self._ages, (queued.since, queued.number))]
        return True

    def _keep_queued(self, request: T, queued: _Queued, wait: Wait) -> None:
        """What makes its place may have changed."""
        del self._order[bisect_left(self._order, (queued.place, queued.number))]
        queued.room_tokens, queued.work_ms, queued.rank = wait.room_tokens, wait.work_ms, wait.rank
        self._soonest = min(self._soonest, queued.must_go)
        insort(self._order, (queued.place, queued.number, request))

    def _count(self, now: float) -> None:
        self._gone += 1
        if self._gone >= 2 * WINDOW:
            self._gone, self._counted_from = self._gone / 2, (self._counted_from + now) / 2

    def _between_s(self, now: float) -> float:
        """Mean time between two that go, seconds; 0 where it is not known."""
        return (now - self._counted_from) / self._gone if self._gone >= LEAST else 0.0
