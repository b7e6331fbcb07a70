"""Conversation affinity: what the last request of a conversation left on its rank.

The next request extends its prompt, and finds it in the rank's cache even where no index shows it: the policy counts
these blocks as overlap, weighs them against the load there, and may leave the rank. Some applications send one
constant name for all of their users. Their requests do not extend each other, or many run at once: neither gives an
affinity.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

from kvrouter.core import Rank
from kvrouter.scheduler.bookings.booking import Booked, Booking, Freed, Moved, OwnerRemoved
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.request.prompt import HASH_BYTES, Prompt
from kvrouter.v1.names import ComponentName

_Key = tuple[ComponentName, bytes]

MOST_RUNNING = 8
"""Requests of a conversation in flight above which it has no rank. An agent and its subagents run a few at once."""


class HeldBlocks(NamedTuple):
    """Leading blocks of a conversation's next prompt, on the rank of its last request."""

    rank: Rank
    incarnation: int
    """Incarnation of the rank that computed them."""
    blocks: int


class _LastRequest(NamedTuple):
    held: HeldBlocks
    last_hash: bytes
    """Sequence hash of its last full block."""


class Affinity:
    """The last request of each of the ``capacity`` most recent conversations."""

    def __init__(self, capacity: int) -> None:
        """A ``capacity`` of 0 remembers none."""
        self._capacity = capacity
        self._last: OrderedDict[_Key, _LastRequest] = OrderedDict()
        self._running: Counter[_Key] = Counter()

    def __len__(self) -> int:
        """Returns the number of conversations."""
        return len(self._last)

    def held(self, component: ComponentName, conversation: bytes, prompt: Prompt) -> HeldBlocks | None:
        """Returns what the last request of a conversation left for the next prompt.

        Args:
            component: The component.
            conversation: Digest of the conversation; empty for none.
            prompt: The next prompt.

        Returns:
            None if it does not extend the last one, or if too many requests are in flight.
        """
        key = component, conversation
        last = self._last.get(key) if conversation else None
        if last is None or self._running[key] > MOST_RUNNING:
            return None
        end = last.held.blocks * HASH_BYTES
        return last.held if prompt.sequence_hashes[end - HASH_BYTES : end] == last.last_hash else None

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
        if not booking.conversation or not booking.prompt.blocks:
            return
        candidate = booking.pool.worker_set.candidate(booking.rank)
        if candidate is None:
            return
        key = booking.component, booking.conversation
        held = HeldBlocks(booking.rank, candidate.incarnation, booking.prompt.blocks)
        self._last[key] = _LastRequest(held, booking.prompt.sequence_hashes[-HASH_BYTES:])
        self._last.move_to_end(key)
        if len(self._last) > self._capacity:
            self._last.popitem(last=False)
