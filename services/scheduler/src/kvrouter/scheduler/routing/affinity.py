"""Conversation affinity: the next request of a conversation goes to the rank of the previous one.

That rank has the conversation's blocks. If it is gone, busy or not allowed, the policy chooses among all candidates,
and the conversation stays with its choice. Many requests at once are no conversation: some applications send one
constant name for all of their users.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from kvrouter.core import Rank
from kvrouter.scheduler.bookings.booking import Booked, Booking, Freed, Moved, OwnerRemoved
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.v1.names import ComponentName

_Key = tuple[ComponentName, bytes]

MOST_RUNNING = 8
"""Requests of a conversation in flight above which it has no rank. An agent and its subagents run a few at once."""


class Affinity:
    """The ranks of the ``capacity`` most recent conversations."""

    def __init__(self, capacity: int) -> None:
        """A ``capacity`` of 0 remembers none."""
        self._capacity = capacity
        self._ranks: OrderedDict[_Key, Rank] = OrderedDict()
        self._running: Counter[_Key] = Counter()

    def __len__(self) -> int:
        """Returns the number of conversations."""
        return len(self._ranks)

    def rank(self, component: ComponentName, conversation: bytes) -> Rank | None:
        """Returns the rank of a conversation (its digest); None if it has none, or too many requests in flight."""
        key = component, conversation
        return self._ranks.get(key) if conversation and self._running[key] <= MOST_RUNNING else None

    def follow(self, booking_table: BookingTable) -> None:
        """Subscribes to bookings, to record their ranks and to count those in flight."""
        booking_table.subscribe(Booked, self._begun)
        booking_table.subscribe(Moved, self._placed)
        booking_table.subscribe(Freed, lambda change: self._ended(change.booking))
        booking_table.subscribe(OwnerRemoved, self._left)

    def _begun(self, change: Booked) -> None:
        if change.booking.conversation:
            self._running[change.booking.component, change.booking.conversation] += 1
        self._placed(change)

    def _left(self, change: OwnerRemoved) -> None:
        if not change.booking.owners:
            self._ended(change.booking)

    def _ended(self, booking: Booking | None) -> None:
        if booking is None or not booking.conversation:
            return
        key = booking.component, booking.conversation
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]

    def _placed(self, change: Booked | Moved) -> None:
        booking = change.booking
        if not booking.conversation:
            return
        key = booking.component, booking.conversation
        self._ranks[key] = booking.rank
        self._ranks.move_to_end(key)
        if len(self._ranks) > self._capacity:
            self._ranks.popitem(last=False)
