"""Records the blocks of one rank for its publisher, and hands out the events to send.

A block is identified by its engine hash and positioned by its sequence hash, which chains the local hashes from the
start of the sequence. ``PrefixIndex`` defines the effect of stores and removals. An index that applied every event has
the same blocks and the same digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from kvrouter.core.interface.names import Scope
from kvrouter.v1.common_pb2 import CopyCounting, Tier

MAX_BATCH_BYTES = 480 << 10
"""Maximum size of the events in one batch, bytes; the rest up to the contract's 512 KiB is for the other fields."""

BatchHead = tuple[int, int, int, int, CopyCounting]
"""Fields of all batches of a rank: worker id, data-parallel rank, incarnation, block size, copy counting."""


BlockNote = tuple[Scope, int, bytes]
"""Scope, parts and engine hashes (packed little-endian u64) of blocks: their records in the contract lack scope and
parts."""


class PublisherError(Exception):
    """Base of the publisher SDK's exceptions."""


class InvalidEvent(PublisherError, ValueError):
    """A report of stored or removed blocks is inconsistent. Nothing of it was recorded or published."""


class UnknownParent(InvalidEvent):
    """Blocks were stored below a parent unknown to the rank. Nothing was recorded or published."""

    def __init__(self, parent: int) -> None:
        super().__init__(f"the parent {parent:#018x} is not resident: report it as stored before its children")
        self.parent = parent


class EventsGone(PublisherError):
    """Requested events are no longer stored or do not exist yet: fetch the rank's state instead."""


class RecorderCounts(NamedTuple):
    """Numbers of a recorder at one moment."""

    next_event_id: int
    """Number of events recorded; also the id of the next."""
    digest: int
    """Sum of the digest terms of all blocks, defined at KvEventBatch.digest."""
    blocks: int
    """Resident blocks, in any tier."""
    device_copies: int
    """Physical copies of blocks in device memory."""
    unknown_removals: int
    """Removed blocks not resident in their tier; such removals cause no event."""
    unplaced_blocks: int
    """Blocks of ``stored_in_tier`` without a place; they cause no event."""
    unsent_events: int
    """Untaken events in the log."""
    unsent_bytes: int
    """Encoded size of these events."""
    dropped_events: int
    """Events discarded by the bounds of the log before they were taken."""


class EventRecorder(Protocol):
    """Blocks of one rank in one incarnation, and the log of their events.

    Constructor: ``EventRecorder(head, max_events, max_bytes)``. Beyond ``max_events`` or ``max_bytes`` (encoded) the
    log discards its oldest events: taken ones first, then the others, which consumers notice as a gap in the ids.

    Engine hashes are unsigned 64-bit integers, tiers are those of the contract. An inconsistent report raises
    InvalidEvent and changes nothing. Callers serialize changes.
    """

    def counts(self) -> RecorderCounts:
        """Returns the current numbers."""

    def resident(self, engine_hashes: Sequence[int], tier: Tier) -> list[int]:
        """Returns the resident ones of these blocks in a tier.

        Raises:
            InvalidEvent: the tier is unknown.
        """

    def scope_of(self, engine_hash: int) -> Scope | None:
        """Returns the scope of a resident block; None if it is not resident."""

    def chunk(self, engine_hash: int, blocks: int) -> list[int]:
        """Returns the engine hashes of a chunk of at most ``blocks`` blocks up to this one, in order.

        The chunk begins after the last missing block. A block of several parts is a chunk by itself.
        """

    def stored(
        self,
        engine_hashes: Sequence[int],
        local_hashes: bytes,
        parent: int | None,
        tier: Tier,
        *,
        scope: Scope = ...,
        new_copies: bool = True,
        parts: int = 1,
    ) -> RecorderCounts:
        """Records a chain of blocks below ``parent``, or at the start of a sequence if it is None.

        ``local_hashes`` has ``parts`` hashes for each engine hash: an engine's block may consist of several blocks.
        Without ``new_copies``, blocks resident in the tier stay as they are. Returns the numbers after it.

        Raises:
            InvalidEvent: the lengths differ, a hash occurs twice or is the parent's, or the tier is unknown.
            UnknownParent: the parent is not resident.
        """

    def stored_in_tier(self, engine_hashes: Sequence[int], tier: Tier) -> RecorderCounts:
        """Records resident blocks in ``tier`` too. Returns the numbers after it.

        Blocks not resident, or whose parents are not, are counted in ``unplaced_blocks``: the index could not
        place them.

        Raises:
            InvalidEvent: the tier is unknown.
        """

    def removed(self, engine_hashes: Sequence[int], tier: Tier) -> RecorderCounts:
        """Records the removal of blocks, or one physical copy of each, from a tier. Returns the numbers after it.

        Raises:
            InvalidEvent: the tier is unknown.
        """

    def cleared(self, tier: Tier) -> RecorderCounts:
        """Records the removal of all blocks from a tier, or from all for TIER_UNSPECIFIED.

        Returns the numbers after it.

        Raises:
            InvalidEvent: the tier is unknown.
        """

    def begin(self) -> None:
        """Begins a group of reports. Its events wait for ``commit``."""

    def commit(self) -> None:
        """Ends the group: appends its events to the log."""

    def roll_back(self) -> None:
        """Undoes the group."""

    def take_batch(self, max_bytes: int) -> tuple[int, int, bytes]:
        """Takes the next events to send, at most ``max_bytes`` and MAX_BATCH_BYTES but at least one.

        Returns the id of the first event, the id after the last one, and an encoded KvEventBatch. After the last event
        of the log, both ids are the next event's, and the batch is a heartbeat.
        """

    def batches(self, from_event_id: int, until_event_id: int = 0) -> Iterator[bytes]:
        """Returns encoded batches with the events of the log from an id to below another, 0 for all.

        Later changes do not affect the batches. There are none if ``from_event_id`` is the next event's.

        Raises:
            EventsGone: the first event is not in the log.
        """

    def state_chunks(self, chunk_blocks: int = 4096) -> Iterator[bytes]:
        """Returns the blocks as of now as encoded GetRankStateResponses. Later changes do not affect them.

        Parents precede children. A parent is included only if it is still resident at the position that it had when its
        child was stored.
        """

    def dump(self, partial: bool, chunk_blocks: int = 4096) -> Iterator[bytes]:
        """Returns the blocks as of now as encoded RankState messages. Later changes do not affect them.

        They have the order of ``state_chunks``. ``partial`` says whether blocks may be missing.
        """

    def notes(self) -> list[BlockNote]:
        """Returns the notes on all blocks."""

    def load(self, chunks: Sequence[bytes]) -> None:
        """Fills an empty recorder from the chunks of a dump.

        Raises:
            ValueError: a chunk cannot be decoded.
        """

    def annotate(self, notes: Sequence[BlockNote]) -> None:
        """Applies notes to resident blocks; others are ignored."""
