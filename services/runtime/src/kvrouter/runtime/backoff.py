"""Computes the pauses between attempts at something that fails, without I/O."""

from __future__ import annotations

import random


class Backoff:
    """A pause that doubles after each consecutive failure, up to a maximum.

    Pauses vary randomly by half in either direction, so that processes that lost the same server do not all return at
    one moment.
    """

    def __init__(self, first_seconds: float, longest_seconds: float, rng: random.Random | None = None) -> None:
        self._first = first_seconds
        self._longest = longest_seconds
        self._rng = rng or random.Random()
        self.failures = 0
        """Number of consecutive failures."""

    def failed(self) -> float:
        """Records a failed attempt. Returns the seconds to wait before the next one."""
        self.failures += 1
        # The exponent is limited, so that years of failures do not overflow a float.
        pause = min(self._longest, self._first * 2.0 ** min(self.failures - 1, 32))
        return pause * self._rng.uniform(0.5, 1.5)

    def succeeded(self) -> int:
        """Records a successful attempt. Returns how many consecutive attempts had failed before."""
        failures, self.failures = self.failures, 0
        return failures
