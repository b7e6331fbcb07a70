"""Bounds the work a peer can cause without moving anything forward."""

from __future__ import annotations

import time
from collections.abc import Callable


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
        """Uses a part of the budget. Returns False if the peer is flooding."""
        self._left -= items
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
        left = self._left + items
        self._left = min(self._size, left)
