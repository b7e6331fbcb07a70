"""A live booking: a request's load on a rank, and its owners among the Schedulers.

The booking table publishes its changes. A listener receives those of its kind, each after it has happened.

A booking is converted from and to the messages of replication here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from kvrouter.core import Rank
from kvrouter.runtime.booking_updates import Key, key_message
from kvrouter.runtime.requests import pack_sequence_hashes
from kvrouter.scheduler.identifiers import component_message, rank_message, rank_of
from kvrouter.scheduler.load.booked_load import NOTHING, Expected
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.request.prompt import MAX_SEQUENCES, Prompt
from kvrouter.v1.common_pb2 import LowerTiers
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import ReassertBooking, SelectWorkerResponse
from kvrouter.v1.sync_pb2 import AddRequest

SchedulerIncarnation = tuple[int, str]
"""A Scheduler process: (incarnation, id)."""


class Placement(msgspec.Struct, frozen=True):
    """The rank on which a Scheduler booked a request, with the prefill tokens there."""

    rank: Rank
    prefill_tokens: int


class Booking(msgspec.Struct, eq=False):
    """A live booking. Only the booking table and its ownership change it."""

    key: Key
    pool: Pool
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
    expected: Expected = NOTHING
    """What its first token will show, if this Scheduler booked it."""
    session_id: str = ""
    """Owning session at this Scheduler; empty for a lease."""
    lease_seconds: float = 0.0
    """Time until it expires after the last call about it, in seconds; unused in a session."""
    lease_until: float = 0.0
    conversation: bytes = b""
    """Digest of its conversation; empty for none."""
    tenant: str = ""
    """Whose request it is, as far as this Scheduler booked it."""
    expected_output_tokens: float = 0.0
    """Expected length of its output; 0 if unknown."""
    prefilled: bool = False
    output_tokens: int = 0
    has_local_progress: bool = False
    """Whether its progress was reported here while only other Schedulers owned it, which learn it from here."""
    owners: dict[SchedulerIncarnation, Placement] = msgspec.field(default_factory=dict)
    """Its owners, each with its choice of a placement."""

    @property
    def component(self) -> ComponentName:
        """Returns the component of its rank."""
        return self.pool.name

    @property
    def rank(self) -> Rank:
        """Returns the rank on which its load counts."""
        return self.placement.rank


class Booked(msgspec.Struct, frozen=True):
    """A booking is new in the table, with its first owner."""

    booking: Booking
    owner: SchedulerIncarnation


class Moved(msgspec.Struct, frozen=True):
    """The load of a booking counts on another rank, or with other prefill tokens."""

    booking: Booking


class OwnerAdded(msgspec.Struct, frozen=True):
    """Another Scheduler owns a booking, or the same one through another session or lease."""

    booking: Booking
    owner: SchedulerIncarnation


class OwnerRemoved(msgspec.Struct, frozen=True):
    """A Scheduler no longer owns a booking. A booking without owners has left the table."""

    booking: Booking
    owner: SchedulerIncarnation


class PrefillCompleted(msgspec.Struct, frozen=True):
    """The prompt of a booking is computed. Reports at this Scheduler may repeat it."""

    booking: Booking
    is_remote: bool
    """Whether another Scheduler announced it."""


class OutputGenerated(msgspec.Struct, frozen=True):
    """A booking has generated tokens. Reports at this Scheduler may repeat it."""

    booking: Booking
    is_remote: bool
    """Whether another Scheduler announced it."""


class Freed(msgspec.Struct, frozen=True):
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
    lower_cached_tokens: LowerTiers | None = None
    """Those of them from below device memory; None if there are none, or if unknown."""
    output_tokens: int | None = None
    """Length of its output; None if that broke off, or if unknown."""


class SessionEnded(msgspec.Struct, frozen=True):
    """A session of this Scheduler did not return within its grace period. ``OwnerRemoved`` of each booking precedes."""

    session_id: str
    client_name: str
    bookings: Sequence[Booking]
    """The session's bookings."""


BookingChange = Booked | Moved | OwnerAdded | OwnerRemoved | PrefillCompleted | OutputGenerated | Freed | SessionEnded


def add_request(booking: Booking, placement: Placement, now: float) -> AddRequest:
    """Returns an owner's announcement of a booking at ``placement``. ``now`` is in seconds."""
    lease_until_unix_ns = None if booking.session_id else time.time_ns() + int((booking.lease_until - now) * 1e9)
    return AddRequest(
        booking=key_message(booking.key),
        rank=rank_message(placement.rank),
        sequence_hashes=booking.prompt.sequence_hashes,
        local_hashes=booking.prompt.local_hashes,
        prompt_tokens=booking.prompt.tokens,
        prefill_tokens=placement.prefill_tokens,
        overlap_blocks=booking.outcome.overlap_blocks,
        session_id=booking.session_id,
        lease_until_unix_ns=lease_until_unix_ns,
        tracks_active_blocks=booking.pool.booked_load.tracks_blocks(booking.key[2]),
        conversation=booking.conversation,
        sequences=booking.prompt.sequences if booking.prompt.sequences > 1 else None,
    )


def placement_of(announced: ReassertBooking | AddRequest) -> Placement:
    """Returns where another Scheduler or its client has a booking."""
    return Placement(rank_of(announced), min(announced.prefill_tokens, announced.prompt_tokens))


def replicated_booking(pool: Pool, key: Key, announced: ReassertBooking | AddRequest) -> Booking:
    """Returns a booking as another Scheduler or its client describes it, without owners.

    Raises:
        BadRequest: the hashes do not fit the prompt, as where blocks have another size.
    """
    local_hashes, conversation = b"", b""
    if isinstance(announced, AddRequest):
        hashes, local_hashes = announced.sequence_hashes, announced.local_hashes
        conversation = announced.conversation
    else:
        hashes = pack_sequence_hashes(announced)
    block_size = pool.booked_load.block_size
    if announced.prompt_tokens == 0 or len(hashes) != 8 * (announced.prompt_tokens // block_size):
        raise BadRequest(
            f"expected {announced.prompt_tokens // block_size} hashes of 8 bytes for {announced.prompt_tokens} prompt "
            f"tokens in blocks of {block_size}, received {len(hashes)} bytes",
            field="sequence_hashes",
            advice="Send one hash for each full block of the prompt.",
        )
    prompt = Prompt(
        announced.prompt_tokens,
        local_hashes if len(local_hashes) == len(hashes) else b"",
        hashes,
        sequences=min(max(1, announced.sequences), MAX_SEQUENCES),
    )
    placement = placement_of(announced)
    candidate = pool.worker_set.candidate(placement.rank)
    outcome = SelectWorkerResponse(
        rank=announced.rank,
        endpoint="" if candidate is None else candidate.endpoint,
        overlap_blocks=max(0, announced.prompt_tokens - announced.prefill_tokens) // block_size,
        prompt_blocks=prompt.blocks,
        prefill_tokens=placement.prefill_tokens,
        component=component_message(pool.name),
        role=pool.role,
    )
    return Booking(key, pool, prompt, placement, outcome, conversation=conversation)
