"""Which rank a conversation is at: its next request goes there, while the rank is healthy and not busy.

The rank that a request of the conversation was booked on last is the one that has its blocks. Where that rank is gone,
busy or not allowed, the policy chooses among all, and the conversation stays at its choice.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from kvrouter.core import Rank
from kvrouter.scheduler.bookings.changes import Booked, BookingChange, Moved
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import RoutingRequest

_Key = tuple[ComponentName, bytes]


class Affinity:
    """The ranks of the conversations heard of last, ``capacity`` of them."""

    def __init__(self, capacity: int) -> None:
        """A ``capacity`` of 0 remembers none."""
        self._capacity = capacity
        self._ranks: OrderedDict[_Key, Rank] = OrderedDict()

    def __len__(self) -> int:
        """Conversations that are remembered."""
        return len(self._ranks)

    def rank(self, component: ComponentName, conversation: bytes) -> Rank | None:
        """Returns the rank of a conversation, as ``conversation_of`` names it; None where it has none."""
        return self._ranks.get((component, conversation)) if conversation else None

    def receive(self, change: BookingChange) -> None:
        """Notes the rank of a new booking, or of one that moved."""
        if isinstance(change, Booked | Moved):
            booking = change.booking
            self.note(booking.component, booking.conversation, booking.rank)

    def note(self, component: ComponentName, conversation: bytes, rank: Rank) -> None:
        """A request was booked on a rank, of a conversation as ``conversation_of`` names it."""
        if not conversation:
            return
        key = (component, conversation)
        self._ranks[key] = rank
        self._ranks.move_to_end(key)
        if len(self._ranks) > self._capacity:
            self._ranks.popitem(last=False)


def conversation_of(request: RoutingRequest) -> bytes:
    """The digest of a request's conversation, 16 bytes; empty where it is of none."""
    if not request.conversation_id:
        return b""
    # A digest, so that an id of any length takes as much memory; tenants name their conversations independently.
    tenant, conversation = request.scope.tenant.encode(), request.conversation_id.encode()
    return blake2b(len(tenant).to_bytes(8, "little") + tenant + conversation, digest_size=16).digest()
