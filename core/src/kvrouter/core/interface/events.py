"""Batches of cache events, and the result of applying one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

from kvrouter.core.interface.names import Rank

MAX_EVENT_BLOCKS = 1 << 16
"""Maximum number of blocks in one event. A batch under 512 KiB cannot contain more."""


class RefusedBatch(ValueError):
    """Raised when a message is not an event batch, or is of another rank or block size than expected."""

    def __init__(self, reason: Literal["unparsable", "rank", "block_size"], detail: str) -> None:
        """Creates the error: ``reason`` is a label for metrics; ``detail`` has the expected and received values."""
        super().__init__(detail)
        self.reason = reason


class EventBatch(Protocol):
    """A parsed event batch with a valid envelope. ``PrefixIndex.apply`` validates its events.

    Constructor: ``EventBatch(data, rank=None, block_size=None)`` with an encoded KvEventBatch. Raises RefusedBatch if
    the bytes cannot be parsed, or if the batch has another rank or block size than the arguments.
    """

    @property
    def rank(self) -> Rank:
        """Returns the rank of the events."""

    @property
    def incarnation(self) -> int:
        """Returns the rank's incarnation."""

    @property
    def next_event_id(self) -> int:
        """Returns the id of the event after the batch, as the batch states it."""

    @property
    def reached(self) -> int:
        """Returns the higher of ``next_event_id`` and the highest event id plus one, at most 2^64 - 1."""

    @property
    def events(self) -> int:
        """Returns the number of events; 0 in a heartbeat."""

    @property
    def clears_all(self) -> bool:
        """Returns whether an event clears every tier."""

    @property
    def published_unix_ns(self) -> int:
        """Returns the time of publication, nanoseconds since 1970; 0 if unknown."""

    @property
    def memory_bytes(self) -> int:
        """Returns the estimated memory of the parsed batch and its encoded form, in bytes."""


@dataclass(frozen=True, slots=True)
class ApplySummary:
    """The result of applying one batch."""

    worker_id: int
    """Worker id of the rank; 0 if the batch could not be parsed."""
    dp_rank: int
    """Data-parallel rank; 0 if the batch could not be parsed."""
    applied: int = 0
    """Events applied. The cursor moved past these, ``rejected`` and ``unknown_parents``. Events of an evicted rank, and
    the event that caused the eviction, count as applied."""
    stored_blocks: int = 0
    """Blocks in the applied ``stored`` events, resident before or not; without those of an evicted rank."""
    removed_blocks: int = 0
    """Resident blocks in the applied ``removed`` events."""
    duplicates: int = 0
    """Events below the cursor. They are dropped."""
    fenced: int = 0
    """Events of an earlier incarnation. They are dropped. A batch without events counts as 1."""
    gap: tuple[int, int] | None = None
    """(expected id, received id) if ids are missing. That event and the rest of the batch are *not* applied, and the
    cursor stays at the expected id. If only next_event_id shows the gap, it is the received id, and all events of the
    batch are applied."""
    unknown_parents: int = 0
    """``stored`` events whose parent is not resident. They are skipped, the cursor moves on, and the rank is partial.
    Copies of their blocks are released, because these blocks are now at an unknown place."""
    unknown_removals: int = 0
    """Removed blocks without a copy."""
    rejected: tuple[str, ...] = ()
    """Reasons of rejected events, at most 16. The events are skipped, the cursor moves on, and the rank is partial."""
    unparsable: str = ""
    """Why the batch could not be parsed; nothing of it was applied. Empty if it could."""
    next_event_id: int = 0
    """The rank's cursor after the batch."""
    incarnation: int = 0
    """The rank's incarnation after the batch."""
    new_incarnation: bool = False
    """Whether the batch started a new incarnation of a known rank, whose older blocks were dropped."""
    digest_differs: bool = False
    """Whether the batch has a digest, ends at the rank's cursor, and its digest differs from the index's. Not checked
    (False) after a gap, for partial ranks, and for batches with events unless the index has ``check_digests`` set."""
    evicted_blocks: int | None = None
    """Entries dropped because the rank was evicted; None if it was not."""
    evicted_others: tuple[tuple[int, int, int], ...] = ()
    """Other ranks, evicted to make room: worker_id, dp_rank and the number of their dropped entries."""

    @property
    def is_plain(self) -> bool:
        """Returns whether all has its default but the rank, its cursor, and the applied events with their blocks."""
        plain = ApplySummary(self.worker_id, self.dp_rank, self.applied, self.stored_blocks, self.removed_blocks)
        return self == replace(plain, next_event_id=self.next_event_id, incarnation=self.incarnation)
