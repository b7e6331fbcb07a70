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

import numpy as np
from kvrouter.scheduler.policies.interface import Amounts, Column

DISPATCH_S = 0.02
"""Time in seconds from the end of a request to the first step of its successor: its end is reported, the
next one is released and dispatched, and the engine ends the step under way."""


def capacity(slots: Amounts, seconds_in_flight: float) -> Amounts:
    """Returns the capacity of each rank in requests: its slots, and the waiting requests of its engine."""
    share = min(1.0, DISPATCH_S / seconds_in_flight) if seconds_in_flight > 0 else 1.0
    ahead: Amounts = np.floor(slots * share) if share else np.zeros_like(slots)
    return slots + ahead


def request_limits(capacity: Amounts, slots: Amounts, others: Column | None) -> Amounts:
    """Returns how many bookings each rank may have.

    Args:
        capacity: As ``capacity`` returns it.
        slots: Requests run at once by each rank; infinite where unknown.
        others: Further requests reported by its engine; None if there are none. They leave every rank a slot, so
            that a wrong report cannot keep it idle.
    """
    return capacity if others is None else capacity - np.minimum(others, np.maximum(slots - 1, 0))
