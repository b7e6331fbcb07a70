"""When a component's requests are split over its Schedulers, rather than decided by one.

One deciding Scheduler sees all of a component's load the moment it is booked; several see each other's late, or not at
all. So requests are split only where an operator says so, or while the Scheduler says that it cannot keep up: for
FIRST_S after it last said so. If it says so again within as long of having all requests back, the next time is twice as
long, up to LONGEST_S, so that a load that is too much for one does not swing to and fro.
"""

from __future__ import annotations

import math

FIRST_S = 60.0
"""Seconds of sharding after the last advice."""

LONGEST_S = 3600.0
"""Most that they grow to."""


class Sharding:
    """Whether one component is sharded. Pure: it is handed every event, with its time in seconds."""

    def __init__(self, requested: bool | None) -> None:
        """``wanted``: always, never, or None for when it is advised."""
        self._requested = requested
        self._seconds = FIRST_S
        self._until = -math.inf

    def advise(self, now: float) -> None:
        """The component's Scheduler says that it cannot keep up."""
        if now >= self._until:
            returned = now < self._until + self._seconds
            self._seconds = min(2 * self._seconds, LONGEST_S) if returned else FIRST_S
        self._until = now + self._seconds

    def active(self, now: float) -> bool:
        """Whether requests are split."""
        return now < self._until if self._requested is None else self._requested
