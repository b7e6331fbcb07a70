"""A rate with a burst: amounts are taken from a bucket, which refills at the rate."""

from __future__ import annotations

import math
import time


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
