"""The changes of the booking table. A listener receives those of its kind, each after it has happened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvrouter.scheduler.bookings.booking import Booking, SchedulerIncarnation
from kvrouter.scheduler.identifiers import Key


class Booked(NamedTuple):
    """A booking is new in the table. Its first owner follows as ``OwnerAdded``."""

    booking: Booking


class Moved(NamedTuple):
    """The load of a booking counts on another rank, or with other prefill tokens."""

    booking: Booking


class OwnerAdded(NamedTuple):
    """A Scheduler owns a booking, or has another session or lease own it."""

    booking: Booking
    owner: SchedulerIncarnation


class OwnerRemoved(NamedTuple):
    """A Scheduler owns a booking no longer. Without owners it has left the table."""

    booking: Booking
    owner: SchedulerIncarnation


class PrefillCompleted(NamedTuple):
    """The prompt of a booking is computed. Reports at this Scheduler may repeat it."""

    booking: Booking
    is_remote: bool
    """Whether another Scheduler announced it."""


class OutputGenerated(NamedTuple):
    """A booking has generated tokens. Reports at this Scheduler may repeat it."""

    booking: Booking
    is_remote: bool
    """Whether another Scheduler announced it."""


class Freed(NamedTuple):
    """A booking has ended."""

    key: Key
    booking: Booking | None
    """None if the table had no booking of that key."""
    is_remote: bool
    """Whether another Scheduler announced it."""
    is_expired: bool
    """Whether its lease ran out."""
    cached_tokens: int | None
    """Prompt tokens that the worker found in its cache; None if unknown."""


class SessionEnded(NamedTuple):
    """A session of this Scheduler did not return within its grace. ``OwnerRemoved`` came before, for each booking."""

    session_id: str
    client_name: str
    bookings: Sequence[Booking]
    """What the session owned."""


BookingChange = Booked | Moved | OwnerAdded | OwnerRemoved | PrefillCompleted | OutputGenerated | Freed | SessionEnded
