"""The order of requests that wait at the Scheduler for room on their cheapest rank.

An engine serves its queue in order: the first request blocks all behind it, and none can move to another engine. Here a
request that fits passes one that does not, and its rank is chosen when it leaves.

    queue.add(request, wait, now)                     # the policy returned a Wait
    for request in queue.late(now):                   # cannot meet its deadline
        ...refuse it
    for request, decided in queue.release(now, decide):
        ...book and dispatch it, before the next is decided
    queue.started(request)                            # it has its first token, or has ended
    queue.remove(request)                             # its caller has gone

Order: priority, then the fewest tokens of KV cache that the request adds; waiting time counts at AGING.

No request starves. The oldest request that has waited PATIENCE_S goes to its cheapest rank even without room: one at a
time, the next when it has started, or after STALL_S. A request behind k older ones therefore leaves within PATIENCE_S +
(k + 1) * (STALL_S + INTERVAL_S), whatever its size and priority, if ``release`` is called when due. Later requests do
not count, unless they have waited longer elsewhere.

A request is late if the expected wait makes it miss its deadline:

    now + (requests ahead + 1) * (mean interval between two releases) + own work > deadline

The mean covers about the last WINDOW releases and the time since the last one; below LEAST releases it is 0.
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
"""Tokens by which one second of waiting lowers a sort key. A prompt of 100,000 tokens passes a new one after 50 s,
although its patience ends far sooner. At 0 all long prompts would wait until then."""

PATIENCE_S = 10.0
"""Seconds after which a request is released whatever the state of its rank."""

STALL_S = 30.0
"""Seconds for which a request released without room delays the next one. Far above the time to first token on a full
rank, so it counts only if a caller never reports progress."""

INTERVAL_S = 0.02
"""Shortest time between two passes over the queue, seconds. Load changes with engine steps, which take as long."""

MAX_QUEUED_REQUESTS = 4096
"""Requests that may wait in one component."""

TRIES_PER_RANK, TRIES = 4, 64
"""Requests without room, for one rank and in all, after which a pass skips the others of that rank, or ends: a pass
takes milliseconds, however many requests wait. The next pass begins with the remaining ones."""

WINDOW, LEAST = 64, 8
"""Releases over which the mean interval is taken, and the fewest that form a mean."""

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
        """Latest time in seconds at which the computation of its prompt may begin."""
        return self.deadline - self.work_ms / 1e3

    @property
    def place(self) -> _Place:
        """Sort key. Independent of the current time, because all requests age alike."""
        return -self.priority, self.room_tokens + AGING * self.since


class RequestQueue(Generic[T]):
    """The queued requests of one component. Pure: every event is passed in with its time in seconds."""

    def __init__(self, max_queued_requests: int = MAX_QUEUED_REQUESTS) -> None:
        self.max_queued_requests = max_queued_requests
        self._queued: dict[T, _Queued] = {}
        # Sorted. The number separates equal sort keys.
        self._order: list[tuple[_Place, int, T]] = []
        self._ages: list[tuple[float, int, T]] = []
        self._numbers = itertools.count()
        self._forced: tuple[T, float] | None = None
        self._next_look = -math.inf
        self._look_again = False
        self._looked_to: tuple[_Place, int] | None = None
        self._gone, self._counted_from = 0.0, 0.0
        self._soonest = math.inf
        """Lower bound of every queued request's ``must_go``."""

    def __len__(self) -> int:
        """Returns the number of queued requests."""
        return len(self._queued)

    def __contains__(self, request: T) -> bool:
        """Returns whether a request is queued."""
        return request in self._queued

    @property
    def full(self) -> bool:
        """Whether no further request may wait."""
        return len(self._queued) >= self.max_queued_requests

    @property
    def oldest(self) -> T | None:
        """The request that has waited longest; None if none waits."""
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
        """Adds a request that has waited since ``since``. Returns False, and adds nothing, if the queue is full."""
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
        """Removes a request. Returns whether it was queued."""
        self.started(request)
        return self._drop(request)

    def started(self, request: T) -> None:
        """Notes that a released request has its first token or has ended."""
        if self._forced is not None and self._forced[0] == request:
            self._forced = None

    def is_late(self, request: T, now: float) -> bool:
        """Returns whether a queued request would miss its deadline."""
        queued = self._queued[request]
        ahead = bisect_left(self._order, (queued.place, queued.number))
        return now + (ahead + 1) * self._between_s(now) > queued.must_go

    def late(self, now: float) -> list[T]:
        """Returns the queued requests that would miss their deadline."""
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
        """Yields the requests that leave now with their decision: a Choice, or a Wait for one whose patience has ended.

        ``decide`` is called for one request after the other, in order; each result must reflect the releases before it.
        It may remove the request that it is called for.
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
        """Returns the time in seconds of the next pass if nothing happens before; infinity if none is needed."""
        if not self._queued:
            return math.inf
        again = self._next_look if self._look_again else math.inf
        patience = self._ages[0][0] + PATIENCE_S
        if self._forced is not None:
            patience = max(patience, self._forced[1] + STALL_S)
        return min(again, max(self._next_look, patience))

    def _impatient(self, now: float) -> T | None:
        """Returns the request to release whatever the state of its rank; None if there is none."""
        if self._forced is not None and now < self._forced[1] + STALL_S:
            return None
        since, _, oldest = self._ages[0]
        return oldest if now >= since + PATIENCE_S else None

    def _in_order(self, first: T | None) -> list[T]:
        """Returns ``first``, then the requests that the last pass did not reach, then the others, each in order."""
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
        """Updates a request that stays, whose sort key may have changed."""
        del self._order[bisect_left(self._order, (queued.place, queued.number))]
        queued.room_tokens, queued.work_ms, queued.rank = wait.room_tokens, wait.work_ms, wait.rank
        self._soonest = min(self._soonest, queued.must_go)
        insort(self._order, (queued.place, queued.number, request))

    def _count(self, now: float) -> None:
        self._gone += 1
        if self._gone >= 2 * WINDOW:
            self._gone, self._counted_from = self._gone / 2, (self._counted_from + now) / 2

    def _between_s(self, now: float) -> float:
        """Returns the mean interval between two releases, seconds; 0 if it is unknown."""
        return (now - self._counted_from) / self._gone if self._gone >= LEAST else 0.0
