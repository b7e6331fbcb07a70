"""Budgets of work: in one pass of the event loop, for what a peer sends without progress, and at a rate with a burst.

A pass of the event loop runs all ready callbacks. While messages wait in a socket, reading the next one does not
return to the loop, and a thousand ready connections are one pass. Readers take a turn for each message, so leases,
probes and new connections get theirs between passes. Turns are granted in the order in which they were asked for.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary

PASS_US = 4_000
"""Work of one pass, microseconds of CPU time as estimated by the readers: a short request waits for less than 5 ms
behind others' long messages."""


class LoopBudget:
    """Work the current pass of one event loop may still do; see the beginning of the module.

    It must not refer to its loop, which would never be freed then.
    """

    def __init__(self, pass_us: int = PASS_US) -> None:
        self._pass_us = pass_us
        self._left_us = pass_us
        self._is_pass_open = False
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()

    async def turn(self, cost_us: int) -> None:
        """Waits for a pass with room for some work. Work beyond the budget of a whole pass gets a pass of its own.

        Args:
            cost_us: Estimated CPU time of the work, microseconds.
        """
        if self.take(cost_us):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A cancelled reader's share of the pass stays unused.
        self._waiting.append((lambda: None if turn.done() else turn.set_result(None), cost_us))
        await turn

    def take(self, cost_us: int) -> bool:
        """Takes a turn in this pass if nobody waits and there is room for the work; returns whether it did."""
        return not self._waiting and self._spend(cost_us)

    def call(self, cost_us: int, work: Callable[[], None]) -> None:
        """Does some work as soon as it is its turn. An error of work that waited is reported to the event loop."""
        if self.take(cost_us):
            work()
        else:
            self._waiting.append((work, cost_us))

    def _spend(self, cost_us: int) -> bool:
        """Takes a part of this pass if there is room, or if it is the first; returns whether it did."""
        has_room = cost_us <= self._left_us or self._left_us == self._pass_us
        if has_room:
            self._left_us -= cost_us
        # To notice the end of a pass takes another one, so passes with little work are not told apart.
        if not self._is_pass_open and (not has_room or self._left_us < self._pass_us / 2):
            self._is_pass_open = True
            asyncio.get_running_loop().call_soon(self._begin_pass)
        return has_room

    def _begin_pass(self) -> None:
        self._is_pass_open = False
        self._left_us = self._pass_us
        while self._waiting and self._spend(self._waiting[0][1]):
            work, _ = self._waiting.popleft()
            try:
                work()
            except Exception as error:
                # Those behind it must still get their turns.
                asyncio.get_running_loop().call_exception_handler({"message": "work failed", "exception": error})


_budgets: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopBudget] = WeakKeyDictionary()


def loop_budget() -> LoopBudget:
    """Returns the budget of the running event loop, which all its readers share."""
    loop = asyncio.get_running_loop()
    budget = _budgets.get(loop)
    if budget is None:
        budget = _budgets[loop] = LoopBudget()
    return budget


class FloodBudget:
    """An amount of fruitless items a peer may send in an interval. Fruitful ones win some of it back.

    The clock is read only when the budget is used up, so an item of an honest peer costs an addition.
    """

    __slots__ = ("_clock", "_filled", "_left", "_seconds", "_size")

    def __init__(self, size: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts with the whole budget.

        Args:
            size: Items accepted in an interval.
            seconds: Length of the interval, seconds.
            clock: Returns the time, seconds.
        """
        self._size = size
        self._seconds = seconds
        self._clock = clock
        self._left = size
        self._filled = clock()

    def spend(self, items: int = 1) -> bool:
        """Uses items of the budget; a negative number restores some. Returns False if the peer is flooding."""
        self._left = min(self._size, self._left - items)
        if self._left >= 0:
            return True
        now = self._clock()
        if now - self._filled < self._seconds:
            return False
        self._filled = now
        self._left = self._size - items
        return self._left >= 0

    def earn(self, items: int) -> None:
        """Restores a part of the budget, because the peer made progress."""
        self._left = min(self._size, self._left + items)


class TokenBucket:
    """A bucket of ``burst`` units, refilled by ``per_second``. It may be overdrawn."""

    __slots__ = ("_burst", "_filled_at", "_level", "_lowest", "_per_second")

    def __init__(self, per_second: float, burst: float, most_overdrawn: float = math.inf) -> None:
        """Creates a full bucket, whose level never falls below ``-most_overdrawn``."""
        self._per_second = per_second
        self._burst = burst
        self._lowest = -most_overdrawn
        self._level = burst
        self._filled_at = time.monotonic()

    def level(self) -> float:
        """Returns the units left; negative if it is overdrawn."""
        now = time.monotonic()
        self._level = min(self._burst, self._level + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        return self._level

    def take(self, amount: float = 1.0) -> float:
        """Takes an amount, and returns the seconds until the bucket is no longer overdrawn; 0 if it is not."""
        self._level = max(self._lowest, self.level() - amount)
        return max(0.0, -self._level / self._per_second)

    def try_take(self) -> bool:
        """Takes one unit if there is one, and returns whether there was."""
        if self.level() < 1:
            return False
        self._level -= 1
        return True
