"""Remembers for each conversation the blocks of its last request, the length of its outputs, and its turns.

The next request extends the prompt of the last one, and finds it in the rank's cache even where no index shows it: the
policy counts these blocks as overlap, weighs them against the load there, and may leave the rank. Some applications
send one constant name for all of their users. Their requests do not extend each other, or many run at once: neither
gives an affinity.

The expected length of an output is the mean over about the last WINDOW outputs of the conversation, or else of its
tenant, or else of the model: the first of these with LEAST outputs. Outputs that broke off do not count.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

from kvrouter.core import Rank
from kvrouter.scheduler.bookings.booking import Booked, Booking, Freed, Moved, OwnerRemoved
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.metrics import SchedulerMetrics
from kvrouter.scheduler.request.prompt import HASH_BYTES, Prompt
from kvrouter.v1.common_pb2 import Stage
from kvrouter.v1.names import ComponentName

_PREFILL = Stage.STAGE_PREFILL

MOST_RUNNING = 8
"""Requests of a conversation in flight above which it has no rank. An agent and its subagents run a few at once."""
WINDOW, LEAST = 16, 3
"""Outputs over which a mean is taken, and the fewest that form one."""
MAX_TENANTS = 1024
"""Tenants whose outputs are remembered, over all components, and as many models."""


class HeldBlocks(NamedTuple):
    """Leading blocks of a conversation's next prompt, on the rank of its last request."""

    rank: Rank
    incarnation: int
    """Incarnation of the rank that computed them."""
    blocks: int


class _Conversation:
    __slots__ = ("ended_at", "held", "last_hash", "output", "turns")

    def __init__(self) -> None:
        self.held: HeldBlocks | None = None
        self.last_hash = b""
        """Sequence hash of the last of these blocks."""
        self.turns = 0
        self.ended_at: float | None = None
        """Seconds of the clock at the end of its last request."""
        self.output = _Mean()


class _Mean:
    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count, self.value = 0, 0.0

    def add(self, value: int) -> None:
        if self.count < WINDOW:
            self.count += 1
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
        if value is not None:
            self.move_to_end(key)
            return value
        value = self[key] = self._make()
        if len(self) > self._capacity:
            self.popitem(last=False)
        return value


class Conversations:
    """The ``capacity`` most recent conversations; 0 remembers none. Counts the requests that this Scheduler booked."""

    def __init__(self, capacity: int, metrics: SchedulerMetrics, clock: Callable[[], float]) -> None:
        """Creates it. ``clock`` returns seconds."""
        self._metrics, self._clock = metrics, clock
        self._conversations: _Recent[_Conversation] = _Recent(capacity, _Conversation)
        self._running: Counter[tuple[ComponentName, bytes]] = Counter()
        """Requests in flight of each conversation, at all Schedulers."""
        self._tenants: _Recent[_Mean] = _Recent(MAX_TENANTS, _Mean)
        self._models: _Recent[_Mean] = _Recent(MAX_TENANTS, _Mean)

    def __len__(self) -> int:
        """Returns the number of conversations."""
        return len(self._conversations)

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
        known = self._conversations.get(key) if conversation else None
        if known is None or known.held is None or self._running[key] > MOST_RUNNING:
            return None
        end = known.held.blocks * HASH_BYTES
        return known.held if prompt.sequence_hashes[end - HASH_BYTES : end] == known.last_hash else None

    def expected_output_tokens(self, pool: Pool, conversation: bytes, tenant: str) -> float:
        """Returns the expected length of an output; 0 if it is unknown."""
        known = self._conversations.get((pool.name, conversation)) if conversation else None
        of_tenant, of_model = self._tenants.get((pool.name, tenant)), self._models.get(pool.model)
        for mean in (None if known is None else known.output, of_tenant, of_model):
            if mean is not None and mean.count >= LEAST:
                return mean.value
        return 0.0

    def follow(self, booking_table: BookingTable) -> None:
        """Subscribes to bookings, to record their ranks, to count those in flight, and to learn from their end."""
        booking_table.subscribe(Booked, self._begun)
        booking_table.subscribe(Moved, self._moved)
        booking_table.subscribe(Freed, self._ended)
        booking_table.subscribe(OwnerRemoved, self._left)

    def _begun(self, change: Booked) -> None:
        booking = change.booking
        if not booking.conversation:
            return
        self._running[booking.component, booking.conversation] += 1
        conversation = self._placed(booking)
        if not _is_turn(booking) or booking.key[1]:
            return
        conversation.turns += 1
        self._metrics.conversation_turns.observe(conversation.turns)
        if conversation.ended_at is not None:
            self._metrics.conversation_pauses.observe(self._clock() - conversation.ended_at)

    def _moved(self, change: Moved) -> None:
        if change.booking.conversation:
            self._placed(change.booking)

    def _placed(self, booking: Booking) -> _Conversation:
        """Returns a booking's conversation, which leaves its prompt on the rank of the booking."""
        conversation = self._conversations.use((booking.component, booking.conversation))
        candidate = booking.pool.worker_set.candidate(booking.rank)
        if candidate is not None and booking.prompt.blocks:
            conversation.held = HeldBlocks(booking.rank, candidate.incarnation, booking.prompt.blocks)
            conversation.last_hash = booking.prompt.sequence_hashes[-HASH_BYTES:]
        return conversation

    def _left(self, change: OwnerRemoved) -> None:
        if change.booking.conversation and not change.booking.owners:
            self._stopped(change.booking)

    def _stopped(self, booking: Booking) -> None:
        key = booking.component, booking.conversation
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]

    def _ended(self, change: Freed) -> None:
        booking, output_tokens = change.booking, change.output_tokens
        if booking is None:
            return
        if booking.conversation:
            self._stopped(booking)
        if change.is_remote:
            return
        if output_tokens is not None and booking.key[2] != _PREFILL:
            if booking.expected_output_tokens:
                self._metrics.output_ratios.observe(output_tokens / booking.expected_output_tokens)
            self._models.use(booking.pool.model).add(output_tokens)
            self._tenants.use((booking.pool.name, booking.tenant)).add(output_tokens)
        if not booking.conversation or not _is_turn(booking):
            return
        conversation = self._conversations.use((booking.component, booking.conversation))
        conversation.ended_at = self._clock()
        if output_tokens is not None:
            conversation.output.add(output_tokens)
        if change.cached_tokens is not None and conversation.turns > 1:
            self._metrics.conversation_hits.observe(min(1.0, change.cached_tokens / booking.prompt.tokens))


def _is_turn(booking: Booking) -> bool:
    """Returns whether this Scheduler booked a conversation's request, other than for the prefill."""
    return bool(booking.outcome.decision_id) and booking.key[2] != _PREFILL
