"""Pauses between attempts."""

from __future__ import annotations

import random


class Backoff:
    """A pause, doubled after each consecutive failure, up to a maximum.

    Pauses vary randomly by half in either direction, so processes that lost the same server do not all return at
    one moment.
    """

    def __init__(self, first_seconds: float, longest_seconds: float, rng: random.Random | None = None) -> None:
        self._first = first_seconds
        self._longest = longest_seconds
        # The shared source: each request has a backoff, and to seed a source takes a hundredth of a request's time.
        self._uniform = random.uniform if rng is None else rng.uniform
        self.failures = 0
        """Number of consecutive failures."""

    def failed(self) -> float:
        """Records a failed attempt. Returns the seconds to wait before the next one."""
        self.failures += 1
        # The exponent is limited, so that years of failures do not overflow a float.
        pause = min(self._longest, self._first * 2.0 ** min(self.failures - 1, 32))
        return pause * self._uniform(0.5, 1.5)

    def succeeded(self) -> int:
        """Records a successful attempt. Returns how many consecutive attempts had failed before."""
        failures, self.failures = self.failures, 0
        return failures
