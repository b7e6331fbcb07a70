"""Deadlines of calls."""

from __future__ import annotations

import time

import msgspec

ANSWER_SECONDS = 0.5
"""The rest of a deadline that is kept for the answer, so the client learns why its request was not served."""


class Deadline(msgspec.Struct, frozen=True):
    """A point on this process's monotonic clock, or none. It is sent to other processes as remaining time."""

    at: float | None
    """Seconds of ``time.monotonic``; None for no deadline."""

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Returns the deadline a number of seconds from now."""
        return cls(time.monotonic() + seconds)

    @staticmethod
    def never() -> Deadline:
        """Returns the absence of a deadline."""
        return _NEVER

    def remaining(self) -> float | None:
        """Returns the seconds left: 0 once it has passed, None without a deadline."""
        if self.at is None:
            return None
        left = self.at - time.monotonic()
        return left if left > 0 else 0.0  # max() takes ten times as long.

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
        at = time.monotonic() + seconds
        return Deadline(at) if self.at is None or at < self.at else self

    def or_after(self, seconds: float) -> Deadline:
        """Returns this deadline, or if there is none, one a number of seconds from now."""
        return Deadline.after(seconds) if self.at is None else self


_NEVER = Deadline(None)
