"""Every live booking that this Scheduler counts, whoever holds it.

A booking lives while one Scheduler or more hold it and nobody has freed it. What is heard of it merges by maximum, in
any order and however often: booked < prefilled < freed, and the highest number of output tokens. Its load is therefore
counted once, whether it was booked here, heard of, or both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvrouter.core import Booking as CountedBooking
from kvrouter.core import Rank
from kvrouter.scheduler.identifiers import Key
from kvrouter.scheduler.load.booked_load import BookedLoad
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse

SchedulerIncarnation = tuple[int, str]
"""A Scheduler process: (incarnation, id). If two booked a request on different ranks, the greater one's rank counts."""


class Placement(NamedTuple):
    """Where a Scheduler booked a request."""

    rank: Rank
    prefill_tokens: int


@dataclass(slots=True)
class Booking:
    """A live booking."""

    key: Key
    component: ComponentName
    booked_load: BookedLoad = field(repr=False)
    outcome: SelectWorkerResponse
    """What the selection answered."""
    audited: bool
    """Whether its overlap was predicted by an Indexer, so that the worker's count can be held against it."""
    session_id: str = ""
    """Session here that owns it; empty for a lease."""
    lease_seconds: float = 0.0
    """Time for which it lives after the last call that named it; without meaning in a session."""
    lease_until: float = 0.0
    local_hashes: bytes = field(default=b"", repr=False)
    """Its full blocks, where they are needed for predictions."""
    conversation: bytes = b""
    """Digest of its conversation; empty for none."""
    prefilled: bool = False
    output_tokens: int = 0
    announced: bool = False
    """Whether its progress was told here though other Schedulers held it: they may have heard of it from here alone."""
    owners: dict[SchedulerIncarnation, Placement | None] = field(default_factory=dict)
    """The Schedulers that hold it; None stands for the place where it is booked."""


class BookingTable:
    """Live bookings by key, and the keys that were freed. A booking is released exactly once."""

    def __init__(self, here: SchedulerIncarnation, released: Callable[[Booking], None], *, tombstones: int) -> None:
        """Nothing is booked.

        Args:
            here: Life of this Scheduler.
            released: Is told of each booking that goes.
            tombstones: Freed keys that are remembered.
        """
        self.here = here
        self._released = released
        self._booking_table: dict[Key, Booking] = {}
        # Whether a key was freed, or only dropped: with its owner, by a Scheduler that nothing told of its end.
        self._gone: OrderedDict[Key, bool] = OrderedDict()
        self._max_gone = tombstones

    def __len__(self) -> int:
        """Live bookings."""
        return len(self._booking_table)

    def __iter__(self) -> Iterator[Booking]:
        """Every live booking, as they are at this moment."""
        return iter(list(self._booking_table.values()))

    def get(self, key: Key) -> Booking | None:
        """The live booking of a key."""
        return self._booking_table.get(key)

    def is_here(self, booking: Booking) -> bool:
        """Whether this Scheduler holds it."""
        return self.here in booking.owners

    def is_gone(self, key: Key) -> bool:
        """Whether the key is remembered as freed or dropped."""
        return key in self._gone

    def was_freed(self, key: Key) -> bool:
        """Whether the key is remembered as freed."""
        return self._gone.get(key, False)

    def freed(self) -> list[Key]:
        """The keys that are remembered as freed, oldest first."""
        return [key for key, freed in self._gone.items() if freed]

    def add(self, booking: Booking, owner: SchedulerIncarnation) -> None:
        """Takes a booking in that is booked in its slots and held by one Scheduler."""
        self._gone.pop(booking.key, None)
        self._booking_table[booking.key] = booking
        booking.owners[owner] = None

    def add_owner(self, booking: Booking, owner: SchedulerIncarnation, place: Placement) -> None:
        """A Scheduler holds a live booking, at that place."""
        if len(booking.owners) == 1:
            (only,) = booking.owners
            booking.owners[only] = self.place(booking, only)
        booking.owners[owner] = place
        self._settle(booking)

    def place(self, booking: Booking, owner: SchedulerIncarnation) -> Placement:
        """Where one of its holders has a live booking."""
        return booking.owners.get(owner) or _place_of(booking)

    def remove_owner(self, key: Key, owner: SchedulerIncarnation) -> Booking | None:
        """A Scheduler holds a booking no longer; with its last holder it is dropped. Returns it if that held it."""
        booking = self._booking_table.get(key)
        if booking is None or owner not in booking.owners:
            return None
        del booking.owners[owner]
        if booking.owners:
            self._settle(booking)
        else:
            self._remember(key, freed=False)
            self._release(booking)
        return booking

    def prefill_complete(self, booking: Booking) -> None:
        """The prompt of a live booking is computed."""
        booking.prefilled = True
        booking.booked_load.prefill_complete(booking.key)

    def generated(self, booking: Booking, output_tokens: int) -> None:
        """A live booking has generated so many tokens."""
        booking.output_tokens = max(booking.output_tokens, output_tokens)
        booking.booked_load.output_tokens(booking.key, booking.output_tokens)

    def free(self, key: Key) -> Booking | None:
        """A booking has ended. A key that is unknown is remembered all the same."""
        self._remember(key, freed=True)
        booking = self._booking_table.get(key)
        if booking is not None:
            self._release(booking)
        return booking

    def _release(self, booking: Booking) -> None:
        del self._booking_table[booking.key]
        booking.booked_load.free(booking.key)
        self._released(booking)

    def _remember(self, key: Key, *, freed: bool) -> None:
        self._gone[key] = freed or self._gone.get(key, False)
        self._gone.move_to_end(key)
        if len(self._gone) > self._max_gone:
            self._gone.popitem(last=False)

    def _settle(self, booking: Booking) -> None:
        """Books it where the greatest of its holders has it."""
        place = booking.owners[max(booking.owners)]
        if place is None or place == _place_of(booking):
            return
        counted = booking_of(booking)
        booking.booked_load.free(booking.key)
        prompt = Prompt(counted.prompt_tokens, b"", counted.sequence_hashes)
        booking.booked_load.book(booking.key, place.rank, prompt, place.prefill_tokens)
        if booking.prefilled:
            booking.booked_load.prefill_complete(booking.key)
        booking.booked_load.output_tokens(booking.key, booking.output_tokens)


def booking_of(booking: Booking) -> CountedBooking:
    """The load of a live booking.

    Raises:
        LookupError: it is not live.
    """
    counted = booking.booked_load.booking(booking.key)
    if counted is None:
        raise LookupError(f"{booking.key} is not booked")
    return counted


def _place_of(booking: Booking) -> Placement:
    counted = booking_of(booking)
    return Placement(counted.rank, counted.prefill_tokens)
