"""Learns from the requests of each conversation: how long outputs are, and how conversations go on, for metrics.

The expected length of an output is the mean over about the last WINDOW outputs of the conversation, or else of its
tenant, or else of the model: the first of these with LEAST outputs. Outputs that broke off do not count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

from kvrouter.scheduler.bookings.booking import Booked, Booking, Freed
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.metrics import SchedulerMetrics
from kvrouter.v1.common_pb2 import Stage

_PREFILL = Stage.STAGE_PREFILL

WINDOW, LEAST = 16, 3
"""Outputs over which a mean is taken, and the fewest that form one."""
MAX_TENANTS = 1024
"""Tenants whose outputs are remembered, over all components, and as many models."""


class _Conversation:
    __slots__ = ("ended_at", "output", "turns")

    def __init__(self) -> None:
        self.turns = 0
        self.ended_at: float | None = None
        """Seconds of the clock at the end of its last request."""
        self.output = _Mean()


class _Mean:
    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count, self.value = 0, 0.0

    def add(self, value: int) -> None:
        self.count = min(self.count + 1, WINDOW)
        self.value += (value - self.value) / self.count


T = TypeVar("T")


class _Recent(OrderedDict[Hashable, T]):
    """The most recently used values, by key."""

    def __init__(self, capacity: int, make: Callable[[], T]) -> None:
        super().__init__()
        self._capacity, self._make = capacity, make

    def use(self, key: Hashable) -> T:
        """Returns the value of a key, a new one if there is none."""
        value = self.get(key)
        if value is None:
            value = self[key] = self._make()
        self.move_to_end(key)
        if len(self) > self._capacity:
            self.popitem(last=False)
        return value


class Conversations:
    """The ``capacity`` most recent conversations. Counts the requests that this Scheduler booked."""

    def __init__(self, capacity: int, metrics: SchedulerMetrics, clock: Callable[[], float]) -> None:
        """Creates it. ``clock`` returns seconds."""
        self._metrics, self._clock = metrics, clock
        self._conversations: _Recent[_Conversation] = _Recent(capacity, _Conversation)
        self._tenants: _Recent[_Mean] = _Recent(MAX_TENANTS, _Mean)
        self._models: _Recent[_Mean] = _Recent(MAX_TENANTS, _Mean)

    def __len__(self) -> int:
        """Returns the number of conversations."""
        return len(self._conversations)

    def expected_output_tokens(self, pool: Pool, conversation: bytes, tenant: str) -> float:
        """Returns the expected length of an output; 0 if it is unknown."""
        known = self._conversations.get((pool.name, conversation))
        of_tenant, of_model = self._tenants.get((pool.name, tenant)), self._models.get(pool.model)
        for mean in (None if known is None else known.output, of_tenant, of_model):
            if mean is not None and mean.count >= LEAST:
                return mean.value
        return 0.0

    def follow(self, booking_table: BookingTable) -> None:
        """Subscribes to the beginning and the end of bookings."""
        booking_table.subscribe(Booked, lambda change: self._begun(change.booking))
        booking_table.subscribe(Freed, self._ended)

    def _begun(self, booking: Booking) -> None:
        if not self._is_turn(booking) or booking.key[1]:
            return
        conversation = self._conversations.use((booking.component, booking.conversation))
        conversation.turns += 1
        self._metrics.conversation_turns.observe(conversation.turns)
        if conversation.ended_at is not None:
            self._metrics.conversation_pauses.observe(self._clock() - conversation.ended_at)

    def _ended(self, change: Freed) -> None:
        booking, output_tokens = change.booking, change.output_tokens
        if booking is None or change.is_remote:
            return
        if output_tokens is not None and booking.key[2] != _PREFILL:
            if booking.expected_output_tokens:
                self._metrics.output_ratios.observe(output_tokens / booking.expected_output_tokens)
            self._models.use(booking.pool.model).add(output_tokens)
            self._tenants.use((booking.component, booking.tenant)).add(output_tokens)
        if not self._is_turn(booking):
            return
        conversation = self._conversations.use((booking.component, booking.conversation))
        conversation.ended_at = self._clock()
        if output_tokens is not None:
            conversation.output.add(output_tokens)
        if change.cached_tokens is not None and conversation.turns > 1:
            self._metrics.conversation_hits.observe(min(1.0, change.cached_tokens / booking.prompt.tokens))

    def _is_turn(self, booking: Booking) -> bool:
        """Returns whether this Scheduler booked it for a conversation, other than for the prefill."""
        return bool(booking.conversation and booking.outcome.decision_id) and booking.key[2] != _PREFILL
