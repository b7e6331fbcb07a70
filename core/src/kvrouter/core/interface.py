"""The interface of the core, which the Rust core and the Python reference both implement.

Hashes are passed packed: ``bytes`` of little-endian u64, or any contiguous buffer of bytes or of unsigned 64-bit
integers. Functions that take them raise TypeError for anything else. Ranks are pairs ``(worker_id, dp_rank)``.

Rules of the prefix index for every implementation:

- A rank has *entries*: engine hash → (place, copies in each tier). The *place* of a block is its sequence hash. Two
  engine hashes of a rank may have the same place. The block at the place is then resident while either of them is.
- ``stored`` puts a chain of blocks below the place of its parent, or at the start of a sequence. If the rank has an
  engine hash at another place, the engine hash moves: all its copies at the old place are released first, and its
  children keep their places. At the same place, its copies in the tier increase by one (COUNTED) or stay one (SET).
- ``removed`` decreases the copies in the tier by one (COUNTED) or to zero (SET). An entry without copies in any tier is
  dropped. The removal of a block that is not resident is counted, and changes nothing. Blocks may be removed in any
  order, also parents before children.
- ``cleared`` drops every entry in the tier, or in all tiers for TIER_UNSPECIFIED. After the latter no block can be
  missing, so the rank is no longer partial.
- The overlap of a rank to a tier is the number of leading blocks of the prompt that are resident on the rank in that
  tier or a faster one. The first block that is missing ends it.
- In ``stored`` and ``removed``, TIER_UNSPECIFIED means TIER_DEVICE. A copy counting other than SET means COUNTED.
- These events are rejected: an event without a change, with an unknown tier, or with more than ``MAX_EVENT_BLOCKS``
  blocks; a ``stored`` without blocks, with different numbers of engine and local hashes, with the same engine hash
  twice, with an engine hash equal to the parent's, or with a depth above u32; a ``removed`` without blocks; and event
  id 2^64 - 1, because the cursor cannot pass it. A ``removed`` may name a hash twice, for two copies. Unknown fields
  are ignored.
- If the ``next_event_id`` of a batch is above the id after its last event, or in a heartbeat above the cursor, events
  were lost: a gap. A lower ``next_event_id`` is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

Rank = tuple[int, int]
"""(worker_id, dp_rank)"""

MAX_EVENT_BLOCKS = 1 << 16
"""Maximum number of blocks in one event. A batch under 512 KiB cannot contain more."""

TokenBuffer = bytes | bytearray | memoryview | Sequence[int]
"""Token ids: a list or array of ints, or a contiguous buffer of 32-bit integers (``bytes`` are little-endian u32)."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What besides its tokens decides whether a block may be shared."""

    lora_name: str = ""
    """Name of the LoRA adapter; empty for the base model."""
    cache_salt: str = ""
    """Salt that separates a client's cache from others; empty for none."""
    tenant: str = ""
    """Tenant whose cache is separate from others; empty for none."""


class RefusedBatch(ValueError):
    """Raised when a message is not an event batch, or is of another rank or block size than expected."""

    def __init__(self, reason: Literal["unparsable", "rank", "block_size"], detail: str) -> None:
        """Creates the error: ``reason`` is a label for metrics; ``detail`` says what was expected and received."""
        super().__init__(detail)
        self.reason = reason


class NotATokenId(ValueError):
    """Raised when an element of a JSON array is not an integer from 0 to 2^32 - 1."""

    def __init__(self, index: int) -> None:
        """Creates the error: ``index`` is the number of the element, from 0."""
        super().__init__(f"expected an integer from 0 to 2^32 - 1 as element {index}")
        self.index = index


class EventBatch(Protocol):
    """A parsed event batch with a valid envelope. ``PrefixIndex.apply`` validates its events.

    Constructor: ``EventBatch(data, rank=None, block_size=None)`` with an encoded KvEventBatch. Raises RefusedBatch if
    the bytes cannot be parsed, or if the batch has another rank or block size than the arguments.
    """

    @property
    def rank(self) -> Rank:
        """Returns the rank of the events."""
        ...

    @property
    def incarnation(self) -> int:
        """Returns the rank's incarnation."""
        ...

    @property
    def next_event_id(self) -> int:
        """Returns the id of the event after the batch, as the batch states it."""
        ...

    @property
    def reached(self) -> int:
        """Returns the higher of ``next_event_id`` and the highest event id plus one, at most 2^64 - 1."""
        ...

    @property
    def events(self) -> int:
        """Returns the number of events; 0 in a heartbeat."""
        ...

    @property
    def clears_all(self) -> bool:
        """Returns whether an event clears every tier."""
        ...

    @property
    def published_unix_ns(self) -> int:
        """Returns the time of publication, nanoseconds since 1970; 0 if unknown."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Returns the estimated memory of the parsed batch and its encoded form, in bytes."""
        ...


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
    """Blocks in the applied ``removed`` events that were resident."""
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
    Copies of the blocks that they name are released, because these blocks are now at an unknown place."""
    unknown_removals: int = 0
    """Removed blocks that were not resident."""
    rejected: tuple[str, ...] = ()
    """Reasons of rejected events, at most 16. The events are skipped, the cursor moves on, and the rank is partial."""
    unparsable: str = ""
    """Why the batch could not be parsed; nothing of it was applied. Empty if it could."""
    next_event_id: int = 0
    """The rank's cursor after the batch."""
    incarnation: int = 0
    """The rank's incarnation after the batch."""
    new_incarnation: bool = False
    """Whether the batch started a new incarnation of a known rank, so that the rank's older blocks were dropped."""
    digest_differs: bool = False
    """Whether the batch has a digest, ends at the rank's cursor, and its digest differs from the index's. Not checked
    (False) after a gap, for partial ranks, and for batches with events unless the index has ``check_digests`` set."""
    evicted_blocks: int | None = None
    """Entries dropped because the rank was evicted; None if it was not."""


class RankInfo(NamedTuple):
    """State of one rank in the index."""

    worker_id: int
    dp_rank: int
    incarnation: int
    next_event_id: int
    blocks: int
    """Number of entries: (engine hash, tier) pairs."""
    memory_bytes: int
    """Estimated memory that the removal of this rank would free."""
    partial: bool
    """Whether blocks may be missing."""
    evicted: bool = False
    """Whether the rank was emptied because the index reached a bound, and stores no blocks since."""


class IndexStats(NamedTuple):
    """Size of an index."""

    ranks: int
    blocks: int
    """Number of entries over all ranks: (rank, engine hash, tier)."""
    distinct_blocks: int
    """Number of distinct places. Blocks that were loaded without all their ancestors may not be counted."""
    memory_bytes: int
    """Memory used by the index, by its own accounting."""


class MemoryBudget(Protocol):
    """A memory bound that several indexes share.

    Constructor: ``MemoryBudget(max_bytes=0)``; 0 is no bound.
    """

    @property
    def max_bytes(self) -> int:
        """Returns the bound, in bytes; 0 is no bound."""
        ...

    @property
    def used_bytes(self) -> int:
        """Returns the memory of all indexes that share the budget, as of their last changes, in bytes."""
        ...


class PrefixIndex(Protocol):
    """The prefix index of one component: the resident blocks of each rank.

    Constructor: ``PrefixIndex(max_blocks=0, budget=None, check_digests=False)``. ``max_blocks`` bounds ``blocks`` of
    ``stats()``; 0 is no bound. ``budget`` is a MemoryBudget that bounds ``memory_bytes`` over all indexes that share
    it; None is no bound. A rank whose ``stored`` event or load exceeds a bound is evicted: it is emptied and partial,
    and its events only move the cursor, until it is replaced, starts a new incarnation, or an event clears all tiers.

    Any number of threads may call any method. Dumps, digests (also those of heartbeats) and statistics run concurrently
    with queries. Only changes of the index make a query wait, for at most one change.
    """

    def apply(self, batch: Any) -> ApplySummary:
        """Applies an ``EventBatch`` or an encoded KvEventBatch. Never raises because of its content.

        A new rank starts at event 0 of the batch's incarnation. A higher incarnation drops the rank's blocks and starts
        again at event 0.
        """
        ...

    def applies_at_once(self, batch: Any) -> bool:
        """Returns whether to apply an ``EventBatch`` takes microseconds: it is small, and nobody uses the index."""
        ...

    def find_matches(self, local_hashes: bytes) -> bytes:
        """Returns the encoded FindMatchesResponse for a prompt, with every rank in order of (worker_id, dp_rank).

        Raises:
            ValueError: the number of bytes is not a multiple of 8.
        """
        ...

    def try_find_matches(self, local_hashes: bytes) -> bytes | None:
        """Returns what ``find_matches`` returns, or None at once if the index is being changed."""
        ...

    def overlaps(self, local_hashes: bytes, tier: int = 1) -> bytes:
        """Returns the overlap to ``tier`` (a value of the enum Tier) of each slot, as packed little-endian u32.

        The result has one number per entry of ``slots()``.

        Raises:
            ValueError: the tier is unknown or TIER_UNSPECIFIED, or the number of bytes is not a multiple of 8.
        """
        ...

    def overlaps_of_tokens(self, token_ids: TokenBuffer, block_size: int, scope: Scope = ..., tier: int = 1) -> bytes:
        """Returns ``overlaps`` of the hashes of tokens."""
        ...

    def slots(self) -> list[Rank | None]:
        """Returns the rank of each slot; None for a free slot, which the next new rank gets.

        A rank keeps its slot while it is in the index.
        """
        ...

    def cursor(self, rank: Rank) -> tuple[int, int] | None:
        """Returns (incarnation, next_event_id) of a rank; None if it is unknown."""
        ...

    def digest(self, rank: Rank) -> int | None:
        """Returns the digest of a rank's entries, defined at KvEventBatch.digest; None if the rank is unknown."""
        ...

    def is_evicted(self, rank: Rank) -> bool:
        """Returns whether a rank was emptied because the index reached a bound, and stores no blocks since."""
        ...

    def reset_rank(self, rank: Rank, incarnation: int, next_event_id: int, *, partial: bool = True) -> int:
        """Replaces a rank by an empty one with this cursor. Returns the number of entries dropped."""
        ...

    def remove_rank(self, rank: Rank) -> int:
        """Removes a rank and its cursor. Returns the number of entries dropped; 0 if the rank is unknown."""
        ...

    def mark_partial(self, rank: Rank, partial: bool) -> None:
        """Sets whether blocks of a rank may be missing. Ignores unknown ranks. An evicted rank stays partial."""
        ...

    def dump_rank(self, rank: Rank, chunk_blocks: int = 4096) -> Iterator[bytes]:
        """Yields encoded RankState chunks of one rank, parents before children, the last one with ``last`` set.

        A known rank has at least one chunk, an unknown rank none. A block's parent_engine_hash is omitted if no entry
        is at the parent's place, and may be omitted if the block was loaded without it; sequence_hash and depth are
        always set. Cursor and blocks are those at the time of the call, whatever is applied meanwhile.

        Raises:
            ValueError: ``chunk_blocks`` is below 1.
        """
        ...

    def load_rank(self, chunks: Iterable[bytes]) -> int:
        """Replaces a rank by a dump, atomically. Returns the number of its entries.

        Digest, copy counting and ``partial`` are taken from the last chunk. The place of a block without a
        parent_engine_hash is its sequence_hash; at depth 0 that is its local hash.

        Raises:
            InvalidDump: the chunks cannot be parsed, differ in rank or cursor, have no last one or continue after it,
                or do not match their digest; or a block appears twice, appears before its parent, has another sequence
                hash or depth than follows from its parent and local hash, has no copies, has an unknown tier, or has a
                tier twice. The index is then unchanged.
        """
        ...

    def ranks(self) -> list[RankInfo]:
        """Returns all ranks, in order of (worker_id, dp_rank)."""
        ...

    def stats(self) -> IndexStats:
        """Returns the size of the index."""
        ...


class InvalidDump(ValueError):
    """Raised when a dump cannot be loaded; the message says why."""


class PredictedIndex(Protocol):
    """Predicted blocks of ranks, derived from the requests sent to them.

    Constructor: ``PredictedIndex(ttl_seconds=120.0, max_blocks=1 << 20, prune_ratio=0.8)``. The caller passes the time,
    in seconds of a monotonic clock; a time earlier than a previous one counts as the previous one. An entry
    (rank, place) expires ``ttl_seconds`` after a request with it was last recorded. When a call of ``record`` leads to
    more than ``max_blocks`` entries that are not expired, the least recently used are dropped until
    ``int(prune_ratio * max_blocks)`` are left; of entries used at the same time, deeper ones are dropped first.
    """

    def record(self, rank: Rank, local_hashes: bytes, now: float) -> None:
        """Records that a request with these blocks was sent to the rank."""
        ...

    def overlaps(self, local_hashes: bytes, now: float) -> dict[Rank, int]:
        """Returns the overlaps above 0 by rank, in blocks."""
        ...

    def remove_rank(self, rank: Rank) -> int:
        """Removes a rank. Returns the number of entries dropped."""
        ...

    def expire(self, now: float) -> int:
        """Drops expired entries, which ``overlaps`` ignores in any case. Returns their number."""
        ...

    def __len__(self) -> int: ...


class LoadColumns(NamedTuple):
    """Load of ranks as columns of signed 64-bit integers (format ``q``): entry i of each belongs to ``ranks[i]``.

    A sum above 2^63 - 1 is given as 2^63 - 1.
    """

    ranks: tuple[Rank, ...]
    """In order of (worker_id, dp_rank). The native core returns the same tuple until the ranks change."""
    packed: memoryview
    """The four columns one after the other: one buffer is read faster than four."""

    @property
    def active_blocks(self) -> memoryview:
        """Distinct blocks of the requests in flight and of the given request, if any."""
        return self._column(0)

    @property
    def prefill_tokens(self) -> memoryview:
        """Prompt tokens that are booked and not yet computed, without those of the given request."""
        return self._column(1)

    @property
    def requests(self) -> memoryview:
        """Live bookings."""
        return self._column(2)

    @property
    def leading_active_blocks(self) -> memoryview:
        """Leading blocks of the given request that are active on the rank; 0 without a request."""
        return self._column(3)

    def rows(self) -> Iterator[tuple[Rank, int, int, int, int]]:
        """Iterates over the ranks, each with its numbers in the order of the columns."""
        return zip(self.ranks, *map(self._column, range(4)), strict=True)

    def _column(self, number: int) -> memoryview:
        count = len(self.ranks)
        return self.packed[number * count : (number + 1) * count]


class ForecastModel(Protocol):
    """The cost terms of routing mode ``forecast``, whose policy has the formula and passes the parameters.

    Constructor, by name: ``prefill`` and ``decode``, three coefficients each, the highest power first;
    ``default_budget``, ``base``, ``crowd``, ``shortage_ms``, ``room``, ``output_tokens``, ``fit_tokens``. Only the
    native core has it: without that the policy computes the terms itself.
    """

    def terms(
        self,
        request: tuple[int, int, float, float],
        head_since: Any,
        relative_latency: Any,
        columns: tuple[Any, ...],
    ) -> bytes:
        """Returns rows of float64, each with an entry for each candidate.

        Args:
            request: (prompt tokens, block size, latency calibration, seconds of the clock).
            head_since: A buffer of float64, the seconds at which each candidate began to compute a prompt.
            relative_latency: A buffer of float64, the relative latency of each candidate.
            columns: Nine buffers of int64, columns of a scheduling context: overlap blocks, leading active blocks,
                active blocks, active requests, total blocks, tokens per step, prefill tokens, prefill requests, and
                tokens of the prompt being computed.

        Returns:
            Nine rows: time to first token, batch, work, output, shortage and own work, each in ms; the factor for the
            rank's speed in the first; tokens to compute; and 1 where the first token may be used for latency
            calibration, else 0.

        Raises:
            ValueError: there is no prompt, or the columns differ in length.
        """
        ...


@dataclass(frozen=True, slots=True)
class BookingRequest:
    """What ``ActiveSequences.book`` counts on a rank. It is read and not kept."""

    key: tuple[str, int, int]
    """(request_id, attempt, stage)"""
    rank: Rank
    sequence_hashes: bytes = field(repr=False)
    """Packed sequence hashes of the prompt's full blocks."""
    prompt_tokens: int
    prefill_tokens: int
    """Prompt tokens that the rank must compute: those that were not resident when the request was booked."""
    track_blocks: bool = True
    """Whether its blocks count as active."""
    unique_blocks: bool = False
    """Whether to assume that it shares no block with another request."""


class ActiveSequences(Protocol):
    """The load of the requests in flight on the ranks of one component, exact for any order of calls.

    Constructor: ``ActiveSequences(block_size, max_bookings=1 << 20, tombstones=1 << 16)``. A booking is booked, then
    prefilled, then freed, and never goes back, so that a late or duplicate call changes nothing. The newest
    ``tombstones`` freed keys are kept, and cannot be booked again. Freeing a key again makes it the newest.

    The active blocks of a rank are the distinct full blocks (by sequence hash) of its tracked bookings, plus for each
    of these ``ceil((prompt + output tokens) / block_size) - prompt_tokens // block_size`` private blocks. If a booking
    has unique blocks, all its blocks are private.
    """

    def add_rank(self, rank: Rank) -> None:
        """Adds a rank without load. Does nothing if the rank is known."""
        ...

    def remove_rank(self, rank: Rank) -> list[tuple[str, int, int]]:
        """Removes a rank and frees its bookings. Returns their keys, in the order in which they were booked."""
        ...

    def book(self, booking: BookingRequest) -> bool:
        """Adds a booking. Returns False, and changes nothing, if the key is booked already or was freed.

        Calls of ``prefill_complete`` and ``output_tokens`` before the booking have no effect on it; ``free`` has.

        Raises:
            KeyError: the rank is unknown.
            OverflowError: there are ``max_bookings`` bookings already.
            ValueError: the number of bytes of the sequence hashes is not a multiple of 8, or a number of tokens is
                negative.
        """
        ...

    def rank(self, key: tuple[str, int, int]) -> Rank | None:
        """Returns the rank of a live booking; None if the key is not booked."""
        ...

    def prefill_complete(self, key: tuple[str, int, int]) -> bool:
        """Records that the prompt is computed, which ends its prefill tokens. Returns whether the booking is live."""
        ...

    def output_tokens(self, key: tuple[str, int, int], tokens: int) -> bool:
        """Sets the total number of generated tokens; a lower number than before changes nothing.

        Returns whether the booking is live.
        """
        ...

    def free(self, key: tuple[str, int, int]) -> bool:
        """Frees a booking. Returns whether it was live. An unknown key gets a tombstone too."""
        ...

    def loads(self, sequence_hashes: bytes = b"", prompt_tokens: int = 0) -> LoadColumns:
        """Returns the load of every rank. The blocks of a given prompt, with its partial one, count as active.

        Raises:
            ValueError: the number of bytes of the sequence hashes is not a multiple of 8.
        """
        ...

    def __len__(self) -> int:
        """Returns the number of live bookings."""
        ...
