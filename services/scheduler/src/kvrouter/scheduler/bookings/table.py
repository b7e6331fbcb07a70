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

from kvrouter.core import Booking, Rank
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
class LiveBooking:
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

    def __init__(self, here: SchedulerIncarnation, released: Callable[[LiveBooking], None], *, tombstones: int) -> None:
        """Nothing is booked.

        Args:
            here: Life of this Scheduler.
            released: Is told of each booking that goes.
            tombstones: Freed keys that are remembered.
        """
        self.here = here
        self._released = released
        self._booking_table: dict[Key, LiveBooking] = {}
        # Whether a key was freed, or only dropped: with its owner, by a Scheduler that nothing told of its end.
        self._gone: OrderedDict[Key, bool] = OrderedDict()
        self._max_gone = tombstones

    def __len__(self) -> int:
        """Live bookings."""
        return len(self._booking_table)

    def __iter__(self) -> Iterator[LiveBooking]:
        """Every live booking, as they are at this moment."""
        return iter(list(self._booking_table.values()))

    def get(self, key: Key) -> LiveBooking | None:
        """The live booking of a key."""
        return self._booking_table.get(key)

    def is_here(self, live_booking: LiveBooking) -> bool:
        """Whether this Scheduler holds it."""
        return self.here in live_booking.owners

    def is_gone(self, key: Key) -> bool:
        """Whether the key is remembered as freed or dropped."""
        return key in self._gone

    def was_freed(self, key: Key) -> bool:
        """Whether the key is remembered as freed."""
        return self._gone.get(key, False)

    def freed(self) -> list[Key]:
        """The keys that are remembered as freed, oldest first."""
        return [key for key, freed in self._gone.items() if freed]

    def add(self, live_booking: LiveBooking, owner: SchedulerIncarnation) -> None:
        """Takes a booking in that is booked in its slots and held by one Scheduler."""
        self._gone.pop(live_booking.key, None)
        self._booking_table[live_booking.key] = live_booking
        live_booking.owners[owner] = None

    def add_owner(self, live_booking: LiveBooking, owner: SchedulerIncarnation, place: Placement) -> None:
        """A Scheduler holds a live booking, at that place."""
        if len(live_booking.owners) == 1:
            (only,) = live_booking.owners
            live_booking.owners[only] = self.place(live_booking, only)
        live_booking.owners[owner] = place
        self._settle(live_booking)

    def place(self, live_booking: LiveBooking, owner: SchedulerIncarnation) -> Placement:
        """Where one of its holders has a live booking."""
        return live_booking.owners.get(owner) or _place_of(live_booking)

    def remove_owner(self, key: Key, owner: SchedulerIncarnation) -> LiveBooking | None:
        """A Scheduler holds a booking no longer; with its last holder it is dropped. Returns it if that held it."""
        live_booking = self._booking_table.get(key)
        if live_booking is None or owner not in live_booking.owners:
            return None
        del live_booking.owners[owner]
        if live_booking.owners:
            self._settle(live_booking)
        else:
            self._remember(key, freed=False)
            self._release(live_booking)
        return live_booking

    def prefill_complete(self, live_booking: LiveBooking) -> None:
        """The prompt of a live booking is computed."""
        live_booking.prefilled = True
        live_booking.booked_load.prefill_complete(live_booking.key)

    def generated(self, live_booking: LiveBooking, output_tokens: int) -> None:
        """A live booking has generated so many tokens."""
        live_booking.output_tokens = max(live_booking.output_tokens, output_tokens)
        live_booking.booked_load.output_tokens(live_booking.key, live_booking.output_tokens)

    def free(self, key: Key) -> LiveBooking | None:
        """A booking has ended. A key that is unknown is remembered all the same."""
        self._remember(key, freed=True)
        live_booking = self._booking_table.get(key)
        if live_booking is not None:
            self._release(live_booking)
        return live_booking

    def _release(self, live_booking: LiveBooking) -> None:
        del self._booking_table[live_booking.key]
        live_booking.booked_load.free(live_booking.key)
        self._released(live_booking)

    def _remember(self, key: Key, *, freed: bool) -> None:
        self._gone[key] = freed or self._gone.get(key, False)
        self._gone.move_to_end(key)
        if len(self._gone) > self._max_gone:
            self._gone.popitem(last=False)

    def _settle(self, live_booking: LiveBooking) -> None:
        """Books it where the greatest of its holders has it."""
        place = live_booking.owners[max(live_booking.owners)]
        if place is None or place == _place_of(live_booking):
            return
        booking = booking_of(live_booking)
        live_booking.booked_load.free(live_booking.key)
        prompt = Prompt(booking.prompt_tokens, b"", booking.sequence_hashes)
        live_booking.booked_load.book(live_booking.key, place.rank, prompt, place.prefill_tokens)
        if live_booking.prefilled:
            live_booking.booked_load.prefill_complete(live_booking.key)
        live_booking.booked_load.output_tokens(live_booking.key, live_booking.output_tokens)


def booking_of(live_booking: LiveBooking) -> Booking:
    """The load of a live booking.

    Raises:
        LookupError: it is not live.
    """
    booking = live_booking.booked_load.booking(live_booking.key)
    if booking is None:
        raise LookupError(f"{live_booking.key} is not booked")
    return booking


def _place_of(live_booking: LiveBooking) -> Placement:
    booking = booking_of(live_booking)
    return Placement(booking.rank, booking.prefill_tokens)
