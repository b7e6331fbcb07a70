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
from kvrouter.scheduler.load.booked_load import SlotManager
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse

SchedulerIncarnation = tuple[int, str]
"""A Scheduler process: (incarnation, id). If two booked a request on different ranks, the greater one's rank counts."""


class Place(NamedTuple):
    """Where a Scheduler booked a request."""

    rank: Rank
    prefill_tokens: int


@dataclass(slots=True)
class Record:
    """A live booking."""

    key: Key
    component: ComponentName
    slots: SlotManager = field(repr=False)
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
    owners: dict[SchedulerIncarnation, Place | None] = field(default_factory=dict)
    """The Schedulers that hold it; None stands for the place where it is booked."""


class Records:
    """Live bookings by key, and the keys that were freed. A booking is released exactly once."""

    def __init__(self, here: SchedulerIncarnation, released: Callable[[Record], None], *, tombstones: int) -> None:
        """Nothing is booked.

        Args:
            here: Life of this Scheduler.
            released: Is told of each booking that goes.
            tombstones: Freed keys that are remembered.
        """
        self.here = here
        self._released = released
        self._records: dict[Key, Record] = {}
        # Whether a key was freed, or only dropped: with its owner, by a Scheduler that nothing told of its end.
        self._gone: OrderedDict[Key, bool] = OrderedDict()
        self._max_gone = tombstones

    def __len__(self) -> int:
        """Live bookings."""
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        """Every live booking, as they are at this moment."""
        return iter(list(self._records.values()))

    def get(self, key: Key) -> Record | None:
        """The live booking of a key."""
        return self._records.get(key)

    def is_here(self, record: Record) -> bool:
        """Whether this Scheduler holds it."""
        return self.here in record.owners

    def is_gone(self, key: Key) -> bool:
        """Whether the key is remembered as freed or dropped."""
        return key in self._gone

    def was_freed(self, key: Key) -> bool:
        """Whether the key is remembered as freed."""
        return self._gone.get(key, False)

    def freed(self) -> list[Key]:
        """The keys that are remembered as freed, oldest first."""
        return [key for key, freed in self._gone.items() if freed]

    def add(self, record: Record, owner: SchedulerIncarnation) -> None:
        """Takes a booking in that is booked in its slots and held by one Scheduler."""
        self._gone.pop(record.key, None)
        self._records[record.key] = record
        record.owners[owner] = None

    def add_owner(self, record: Record, owner: SchedulerIncarnation, place: Place) -> None:
        """A Scheduler holds a live booking, at that place."""
        if len(record.owners) == 1:
            (only,) = record.owners
            record.owners[only] = self.place(record, only)
        record.owners[owner] = place
        self._settle(record)

    def place(self, record: Record, owner: SchedulerIncarnation) -> Place:
        """Where one of its holders has a live booking."""
        return record.owners.get(owner) or _place_of(record)

    def remove_owner(self, key: Key, owner: SchedulerIncarnation) -> Record | None:
        """A Scheduler holds a booking no longer; with its last holder it is dropped. Returns it if that held it."""
        record = self._records.get(key)
        if record is None or owner not in record.owners:
            return None
        del record.owners[owner]
        if record.owners:
            self._settle(record)
        else:
            self._remember(key, freed=False)
            self._release(record)
        return record

    def prefill_complete(self, record: Record) -> None:
        """The prompt of a live booking is computed."""
        record.prefilled = True
        record.slots.prefill_complete(record.key)

    def generated(self, record: Record, output_tokens: int) -> None:
        """A live booking has generated so many tokens."""
        record.output_tokens = max(record.output_tokens, output_tokens)
        record.slots.output_tokens(record.key, record.output_tokens)

    def free(self, key: Key) -> Record | None:
        """A booking has ended. A key that is unknown is remembered all the same."""
        self._remember(key, freed=True)
        record = self._records.get(key)
        if record is not None:
            self._release(record)
        return record

    def _release(self, record: Record) -> None:
        del self._records[record.key]
        record.slots.free(record.key)
        self._released(record)

    def _remember(self, key: Key, *, freed: bool) -> None:
        self._gone[key] = freed or self._gone.get(key, False)
        self._gone.move_to_end(key)
        if len(self._gone) > self._max_gone:
            self._gone.popitem(last=False)

    def _settle(self, record: Record) -> None:
        """Books it where the greatest of its holders has it."""
        place = record.owners[max(record.owners)]
        if place is None or place == _place_of(record):
            return
        booking = booking_of(record)
        record.slots.free(record.key)
        prompt = Prompt(booking.prompt_tokens, b"", booking.sequence_hashes)
        record.slots.book(record.key, place.rank, prompt, place.prefill_tokens)
        if record.prefilled:
            record.slots.prefill_complete(record.key)
        record.slots.output_tokens(record.key, record.output_tokens)


def booking_of(record: Record) -> Booking:
    """The load of a live booking.

    Raises:
        LookupError: it is not live.
    """
    booking = record.slots.booking(record.key)
    if booking is None:
        raise LookupError(f"{record.key} is not booked")
    return booking


def _place_of(record: Record) -> Place:
    booking = booking_of(record)
    return Place(booking.rank, booking.prefill_tokens)
