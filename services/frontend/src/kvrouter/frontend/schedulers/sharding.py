"""Decides when a component's requests are sharded over its Schedulers.

One deciding Scheduler accounts for all of a component's load at the moment of booking. Several learn of each other's
load late or never. Requests are therefore sharded only if an operator requests it, or for FIRST_S after a Scheduler
last reported overload. If it reports overload again within the same time after sharding ended, the next time is twice
as long, up to LONGEST_S. This keeps a load that is too much for one Scheduler from switching back and forth.
"""

from __future__ import annotations

import math

FIRST_S = 60.0
"""Seconds of sharding after the last overload report."""

LONGEST_S = 3600.0
"""Maximum of the growing time, seconds."""


class Sharding:
    """Whether one component is sharded. Pure: the caller passes the time of each event in seconds."""

    def __init__(self, requested: bool | None) -> None:
        """``requested`` is True for always, False for never, None to follow the Scheduler's advice."""
        self._requested = requested
        self._seconds = FIRST_S
        self._until = -math.inf

    def advise(self, now: float) -> None:
        """Records that the component's Scheduler reports overload."""
        if now >= self._until:
            returned = now < self._until + self._seconds
            self._seconds = min(2 * self._seconds, LONGEST_S) if returned else FIRST_S
        self._until = now + self._seconds

    def active(self, now: float) -> bool:
        """Returns whether requests are sharded."""
        return now < self._until if self._requested is None else self._requested
