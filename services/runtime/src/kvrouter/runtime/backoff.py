"""Pauses between attempts at something that fails: decided without I/O."""

from __future__ import annotations

import random


class Backoff:
    """Each pause is about twice the one before, up to a bound, until an attempt succeeds.

    Pauses vary by half in either direction, so that processes that lost the same server do not come back in one moment.
    """

    def __init__(self, first_seconds: float, longest_seconds: float, rng: random.Random | None = None) -> None:
        self._first = first_seconds
        self._longest = longest_seconds
        self._rng = rng or random.Random()
        self.failures = 0
        """Attempts that failed in a row."""

    def failed(self) -> float:
        """Counts a failed attempt. Returns the seconds to wait before the next."""
        self.failures += 1
        # The exponent is bounded, so that years of failures do not overflow a float.
        pause = min(self._longest, self._first * 2.0 ** min(self.failures - 1, 32))
        return pause * self._rng.uniform(0.5, 1.5)

    def succeeded(self) -> int:
        """Ends the row. Returns how many attempts had failed."""
        failures, self.failures = self.failures, 0
        return failures
