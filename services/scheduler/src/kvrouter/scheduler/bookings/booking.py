"""A live booking: a request's load on a rank, and its owners among the Schedulers.

The booking table publishes its changes. A listener receives those of its kind, each after it has happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvrouter.core import Rank
from kvrouter.scheduler.identifiers import Key
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse

SchedulerIncarnation = tuple[int, str]
"""A Scheduler process: (incarnation, id)."""


class Placement(NamedTuple):
    """The rank on which a Scheduler booked a request, with the prefill tokens there."""

    rank: Rank
    prefill_tokens: int


@dataclass(slots=True, eq=False)
class Booking:
    """A live booking. Only the booking table and the leases change it."""

    key: Key
    pool: Pool = field(repr=False)
    prompt: Prompt
    """Without local hashes, unless overlaps are predicted."""
    placement: Placement
    """The placement at which its load counts, chosen by its greatest owner."""
    outcome: SelectWorkerResponse
    """The response to the selection."""
    audited: bool = False
    """Whether an Indexer predicted its overlap, for a comparison with the worker's count."""
    most_overlap_blocks: int = 0
    """Largest overlap of any rank, if ``audited``."""
    forecast_ms: float | None = None
    """Forecast time to its first token; None if it is unsuitable for latency calibration."""
    session_id: str = ""
    """Owning session at this Scheduler; empty for a lease."""
    lease_seconds: float = 0.0
    """Time until it expires after the last call about it, in seconds; unused in a session."""
    lease_until: float = 0.0
    conversation: bytes = b""
    """Digest of its conversation; empty for none."""
    prefilled: bool = False
    output_tokens: int = 0
    has_local_progress: bool = False
    """Whether its progress was reported here while only other Schedulers owned it, which learn it from here."""
    owners: dict[SchedulerIncarnation, Placement] = field(default_factory=dict)
    """Its owners, each with its choice of a placement."""

    @property
    def component(self) -> ComponentName:
        """Returns the component of its rank."""
        return self.pool.name

    @property
    def rank(self) -> Rank:
        """Returns the rank on which its load counts."""
        return self.placement.rank


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
    """None if the table had no booking of the key."""
    is_remote: bool
    """Whether another Scheduler announced it."""
    is_expired: bool
    """Whether its lease ran out."""
    cached_tokens: int | None
    """Prompt tokens found in the worker's cache; None if unknown."""


class SessionEnded(NamedTuple):
    """A session of this Scheduler did not return within its grace period. ``OwnerRemoved`` of each booking precedes."""

    session_id: str
    client_name: str
    bookings: Sequence[Booking]
    """The session's bookings."""


BookingChange = Booked | Moved | OwnerAdded | OwnerRemoved | PrefillCompleted | OutputGenerated | Freed | SessionEnded
