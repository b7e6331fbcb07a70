"""Deadlines of calls, and pauses between attempts."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

ANSWER_SECONDS = 0.5
"""The rest of a deadline that is kept for the answer, so the client learns why its request was not served."""


@dataclass(slots=True)
class Deadline:
    """A point on this process's monotonic clock, or none. It is sent to other processes as remaining time."""

    at: float | None
    """Seconds of ``time.monotonic``; None for no deadline."""

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Returns the deadline a number of seconds from now."""
        return cls(time.monotonic() + seconds)

    @classmethod
    def never(cls) -> Deadline:
        """Returns the absence of a deadline."""
        return cls(None)

    def remaining(self) -> float | None:
        """Returns the seconds left: 0 once it has passed, None without a deadline."""
        return None if self.at is None else max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self.at is not None and time.monotonic() >= self.at

    def before_answer(self) -> float | None:
        """Returns the seconds left for waiting, the rest being kept for the answer: None without a deadline."""
        remaining = self.remaining()
        return None if remaining is None else max(0.0, remaining - ANSWER_SECONDS)

    def within(self, seconds: float) -> Deadline:
        """Returns the earlier of this deadline and one a number of seconds from now, to limit a nested call."""
        limit = Deadline.after(seconds)
        return limit if self.at is None or limit.at is None or limit.at < self.at else self

    def or_after(self, seconds: float) -> Deadline:
        """Returns this deadline, or if there is none, one a number of seconds from now."""
        return Deadline.after(seconds) if self.at is None else self


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
