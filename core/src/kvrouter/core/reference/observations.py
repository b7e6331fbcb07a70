"""The observations of a histogram."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Observations:
    """Counts by bucket, and the sum. ``bounds`` are the upper bounds of the buckets, in ascending order."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Observations by bucket; the last one has no upper bound."""
        self.sum = 0.0
        """Sum of all observations."""

    def observe(self, total: float, count: int = 1) -> None:
        """Adds so many equal observations, given their sum."""
        self.sum += total
        self.counts[bisect_left(self._bounds, total / count)] += count
