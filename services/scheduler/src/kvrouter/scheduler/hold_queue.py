"""Requests that wait in the router for the rank where they are cheapest.

An engine's queue is first come first served: its head holds up all behind it, and what is in it cannot go elsewhere.
Here a request that fits passes one that does not, and where each goes is decided when it can go.

    queue.add(request, hold, now)                     # the policy said Hold
    for request, decided in queue.release(now, decide):
        ...book and send it, before the next is looked at
    queue.started(request)                            # it got its first token
    queue.remove(request)                             # its caller has gone

Order: least work first, where waiting counts as work done, at AGING of the time waited. The oldest of those that have
waited PATIENCE is sent to its cheapest rank even if that has no room; one at a time, the next when it has started.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvrouter.scheduler.policies.interface import Choice, Hold

AGING = 0.1
"""ms of work that a ms of waiting is worth. A prompt of 100,000 tokens (5 s) passes one that has just come when it has
waited 50 s; far sooner its patience ends. At 0 order would be by work alone, and long prompts would starve."""

PATIENCE_S = 10.0
"""Seconds after which a request goes whatever its rank's state."""

INTERVAL_S = 0.02
"""Least time between two looks at all that is held: load changes with the steps of engines, which take as long."""

MAX_HELD = 4096
"""Requests that may wait; the next goes to its rank at once."""

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class _Held:
    since: float
    work_ms: float


class HoldQueue(Generic[T]):
    """The requests held of one component. Pure: it is handed every event, with its time in seconds."""

    def __init__(self, max_held: int = MAX_HELD) -> None:
        self._max_held = max_held
        self._held: dict[T, _Held] = {}
        self._forced: T | None = None
        self._next_look = -math.inf
        self._look_again = False

    def __len__(self) -> int:
        """Requests held."""
        return len(self._held)

    def add(self, request: T, hold: Hold, now: float) -> bool:
        """Takes a request in. Returns False, and does not, if as many wait as may."""
        if len(self._held) >= self._max_held:
            return False
        self._held[request] = _Held(now, hold.work_ms)
        return True

    def remove(self, request: T) -> bool:
        """Forgets a request. Returns whether it was held."""
        self.started(request)
        return self._held.pop(request, None) is not None

    def started(self, request: T) -> None:
        """A request that was sent has got its first token, or has ended."""
        if self._forced == request:
            self._forced = None

    def release(self, now: float, decide: Callable[[T], Choice | Hold]) -> Iterator[tuple[T, Choice | Hold]]:
        """Those that go now, each with the decision on it: a Choice, or the Hold of one whose patience has ended.

        ``decide`` is asked for each that is held, in order; what it says of one must reflect those that went before.
        """
        if not self._held:
            return
        if now < self._next_look:
            self._look_again = True
            return
        self._next_look, self._look_again = now + INTERVAL_S, False
        in_order = sorted(
            self._held,
            key=lambda request: self._held[request].work_ms - AGING * 1e3 * (now - self._held[request].since),
        )
        for request in in_order:
            held = self._held.get(request)
            if held is None:
                continue
            decided = decide(request)
            if isinstance(decided, Hold):
                held.work_ms = decided.work_ms
                if not self._must_go(request, held, now):
                    continue
                self._forced = request
            del self._held[request]
            yield request, decided

    def _must_go(self, request: T, held: _Held, now: float) -> bool:
        if self._forced is not None or now < held.since + PATIENCE_S:
            return False
        return request == next(iter(self._held))

    def next_due(self) -> float:
        """When to release though nothing happens, seconds; infinity if never."""
        if not self._held:
            return math.inf
        again = self._next_look if self._look_again else math.inf
        if self._forced is not None:
            return again
        oldest = next(iter(self._held.values()))
        return min(again, max(self._next_look, oldest.since + PATIENCE_S))
