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
    """A Scheduler now owns a booking, or owns it through another session or lease."""

    booking: Booking
    owner: SchedulerIncarnation


class OwnerRemoved(NamedTuple):
    """A Scheduler no longer owns a booking. A booking without owners has left the table."""

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
    """A session of this Scheduler did not return within its grace period. ``OwnerRemoved`` of each booking precedes."""

    session_id: str
    client_name: str
    bookings: Sequence[Booking]
    """Keys of the bookings that the session owned."""


BookingChange = Booked | Moved | OwnerAdded | OwnerRemoved | PrefillCompleted | OutputGenerated | Freed | SessionEnded
