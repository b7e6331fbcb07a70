"""The time by which a call must have answered."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock of this process, or none. It crosses the wire as the time that remains."""

    at: float | None
    """Seconds on ``time.monotonic``; None for no deadline."""

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The deadline that many seconds from this moment."""
        return cls(time.monotonic() + seconds)

    @classmethod
    def never(cls) -> Deadline:
        """No deadline."""
        return cls(None)

    def remaining(self) -> float | None:
        """Seconds left, 0 once it has passed; None without a deadline. Suits ``asyncio.timeout`` and gRPC alike."""
        return None if self.at is None else max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether it has passed."""
        return self.at is not None and time.monotonic() >= self.at

    def within(self, seconds: float) -> Deadline:
        """The sooner of this deadline and one that many seconds away, to bound a call that is made on the way."""
        limit = Deadline.after(seconds)
        return limit if self.at is None or limit.at is None or limit.at < self.at else self

    def or_after(self, seconds: float) -> Deadline:
        """The same deadline, or where there is none, one that many seconds from this moment."""
        return Deadline.after(seconds) if self.at is None else self
