"""Conversation affinity: the next request of a conversation goes to the rank of the previous one.

That rank has the conversation's blocks. If it is gone, busy or not allowed, the policy chooses among all candidates,
and the conversation stays with its choice.
"""

from __future__ import annotations

from collections import OrderedDict

from kvrouter.core import Rank
from kvrouter.scheduler.bookings.booking import Booked, Moved
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.v1.names import ComponentName

_Key = tuple[ComponentName, bytes]


class Affinity:
    """The ranks of the ``capacity`` most recent conversations."""

    def __init__(self, capacity: int) -> None:
        """A ``capacity`` of 0 remembers none."""
        self._capacity = capacity
        self._ranks: OrderedDict[_Key, Rank] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of conversations."""
        return len(self._ranks)

    def rank(self, component: ComponentName, conversation: bytes) -> Rank | None:
        """Returns the rank of a conversation (its digest); None if it has none."""
        return self._ranks.get((component, conversation)) if conversation else None

    def follow(self, booking_table: BookingTable) -> None:
        """Subscribes to new and moved bookings, to record their ranks."""
        booking_table.subscribe(Booked, self._placed)
        booking_table.subscribe(Moved, self._placed)

    def _placed(self, change: Booked | Moved) -> None:
        booking = change.booking
        if not booking.conversation:
            return
        key = (booking.component, booking.conversation)
        self._ranks[key] = booking.rank
        self._ranks.move_to_end(key)
        if len(self._ranks) > self._capacity:
            self._ranks.popitem(last=False)
