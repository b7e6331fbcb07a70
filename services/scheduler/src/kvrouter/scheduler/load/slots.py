"""Slots: how many requests the engine of a rank runs at once, and how many of them are free.

    free(w)   = slots(w) + ahead(w) - booked(w) - others(w)                  [requests]

    slots(w)  = max_sequences of the rank; unlimited where it is unknown     [requests]
    ahead(w)  = floor(slots(w) * min(1, DISPATCH_S / R)): ends during one dispatch
    R         = mean time in flight of the component's requests              [seconds]
    others(w) = requests reported by the engine beyond those booked, at most slots(w) - 1

An engine whose slots are all taken by booked requests has nothing to run in place of an ended one, until the next one
has been dispatched. With short requests this is a large part of its time. ``ahead`` requests therefore wait in the
engine. They delay the next request by ``ahead * R / slots``, which is DISPATCH_S at most.
"""

from __future__ import annotations

import math

import numpy as np
from kvrouter.core import Rank
from kvrouter.scheduler.policies.interface import Amounts, Column

DISPATCH_S = 0.02
"""Time in seconds from the end of a request to the first step of its successor: its end is reported, the
next one is released and dispatched, and the engine ends the step under way."""

WINDOW, LEAST = 64, 8
"""Requests over which the mean time in flight is taken, and the fewest that form a mean."""


class TimeInFlight:
    """Mean time from dispatch to end: request-seconds over ended requests (Little's law)."""

    def __init__(self) -> None:
        self.seconds = math.inf
        """The mean; infinite while too few requests have ended. It changes at every LEAST-th end only."""
        self._live = 0
        self._request_seconds = 0.0
        self._ended = 0.0
        self._until_mean = LEAST
        self._now = 0.0

    def began(self, now: float) -> None:
        """Records a dispatch."""
        self._request_seconds += self._live * (now - self._now)
        self._now = now
        self._live += 1

    def ended(self, now: float) -> None:
        """Records the end of a request."""
        self._request_seconds += self._live * (now - self._now)
        self._now = now
        self._live -= 1
        self._ended += 1
        self._until_mean -= 1
        if not self._until_mean:
            self._until_mean = LEAST
            self.seconds = self._request_seconds / self._ended
            if self._ended >= WINDOW:
                self._request_seconds, self._ended = self._request_seconds / 2, self._ended / 2


class BookingPeaks:
    """The recent peak of each rank's bookings.

    A report counts requests as they were some time before it arrives. Only an excess over every number of bookings
    since the report before the last is certain to be of others.
    """

    def __init__(self) -> None:
        self._peaks: dict[Rank, tuple[int, int]] = {}
        """Peak between the last two reports, and since the last."""

    def booked(self, rank: Rank, bookings: int) -> None:
        """Records a rank's number of bookings."""
        before, since = self._peaks.get(rank, (0, 0))
        if bookings > since:
            self._peaks[rank] = before, bookings

    def reported(self, rank: Rank, bookings: int) -> int:
        """Returns the peak since the report before the last, when another one arrives."""
        before, since = self._peaks.get(rank, (0, 0))
        self._peaks[rank] = since, bookings
        return max(before, since, bookings)

    def forget(self, rank: Rank) -> None:
        """Drops a rank."""
        self._peaks.pop(rank, None)


def capacity(slots: Amounts, seconds_in_flight: float) -> Amounts:
    """Returns the capacity of each rank in requests: its slots, and the waiting requests of its engine."""
    share = min(1.0, DISPATCH_S / seconds_in_flight) if seconds_in_flight > 0 else 1.0
    ahead: Amounts = np.floor(slots * share) if share else np.zeros_like(slots)
    return slots + ahead


def free_slots(capacity: Amounts, slots: Amounts, booked: Column, others: Column | None) -> Amounts:
    """Returns the free slots of each rank, 0 or less where there is none.

    Args:
        capacity: As ``capacity`` returns it.
        slots: Requests run at once by each rank; infinite where unknown.
        booked: Its bookings.
        others: Further requests reported by its engine; None if there are none. They leave every rank a slot, so
            that a wrong report cannot keep it idle.
    """
    free: Amounts = capacity - booked
    return free if others is None else free - np.minimum(others, np.maximum(slots - 1, 0))
