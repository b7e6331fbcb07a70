"""What the core does: the interface that the Rust core and the Python reference both have.

Hashes travel packed: ``bytes`` of little-endian u64, or any contiguous buffer of bytes or of unsigned 64-bit integers.
Whatever takes them raises TypeError for anything else. Ranks are pairs ``(worker_id, dp_rank)``.

The prefix index, in terms that every implementation must keep:

- A rank holds *entries*: engine hash → (place, copies in each tier). The *place* of a block is its sequence hash: the
  chain of local hashes from the start of the sequence. Two engine hashes may have one place; both then hold it.
- ``stored`` gives a chain of blocks places below its parent's place (or at the root). An engine hash that the rank
  holds at another place moves: all copies at the old place are released first. Its children keep their places. Held at
  the same place, the copies in that tier rise by one (COUNTED) or stay at one (SET).
- ``removed`` lowers the copies in the tier by one (COUNTED), or to none (SET); an entry without copies in any tier is
  gone. Removing what is not held is counted and changes nothing. Blocks may go in any order, parents before children.
- ``cleared`` drops every entry in the tier, or in all tiers for TIER_UNSPECIFIED. The latter leaves nothing to be
  missing: the rank is partial no more.
- The overlap of a rank to a tier is the number of leading blocks of the prompt whose places it holds in that tier or in
  a faster one. A hole ends it.
- In stores and removals TIER_UNSPECIFIED reads as TIER_DEVICE. A copy counting other than SET reads as COUNTED.
- An event is rejected that names no change or an unknown tier; a store of no blocks, of unlike numbers of engine and
  local hashes, with an engine hash twice or equal to the parent's, or to a depth past u32; a removal of no blocks; more
  than ``MAX_EVENT_BLOCKS`` blocks; and event id 2^64 - 1, which the cursor cannot pass: it stays there. A removal may
  name a hash twice: two copies. Unknown fields are ignored.
- A batch that says ``next_event_id`` above the id after its last event (or above the cursor, in a heartbeat) reports
  events that were lost: a gap. One below is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

Rank = tuple[int, int]
"""(worker_id, dp_rank)"""

MAX_EVENT_BLOCKS = 1 << 16
"""Blocks in one event at most; a batch under 512 KiB cannot hold more."""

TokenBuffer = bytes | bytearray | memoryview | Sequence[int]
"""Token ids: a list or array of ints, or a contiguous buffer of 32-bit integers (``bytes`` are little-endian u32)."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What besides its tokens decides whether a block may be shared."""

    lora_name: str = ""
    """LoRA adapter; empty for the base model."""
    cache_salt: str = ""
    """Salt that keeps a client's cache apart; empty for none."""
    tenant: str = ""
    """Tenant whose cache is kept apart; empty for none."""


class RefusedBatch(ValueError):
    """A message is not the event batch that it should be."""

    def __init__(self, reason: Literal["unparsable", "rank", "block_size"], detail: str) -> None:
        """``reason`` is a label for metrics; ``detail`` says what was expected and what was received."""
        super().__init__(detail)
        self.reason = reason


class EventBatch(Protocol):
    """An event batch that was parsed and validated as a whole; ``PrefixIndex.apply`` judges its events.

    Made by ``EventBatch(data, rank=None, block_size=None)`` from an encoded KvEventBatch. Raises RefusedBatch if the
    bytes are none, or if the batch is of another rank or block size than those given.
    """

    @property
    def rank(self) -> Rank:
        """The rank whose events these are."""
        ...

    @property
    def incarnation(self) -> int:
        """The rank's incarnation."""
        ...

    @property
    def next_event_id(self) -> int:
        """Id of the event after the batch, as the batch names it."""
        ...

    @property
    def reached(self) -> int:
        """The higher of ``next_event_id`` and the id after the highest in the batch, 2^64 - 1 at most."""
        ...

    @property
    def events(self) -> int:
        """Number of events; 0 in a heartbeat."""
        ...

    @property
    def clears_all(self) -> bool:
        """Whether an event clears every tier."""
        ...

    @property
    def published_unix_ns(self) -> int:
        """When it was published, nanoseconds since 1970; 0 if unknown."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Estimate of the memory of the parsed batch with its encoded form."""
        ...


@dataclass(frozen=True, slots=True)
class ApplySummary:
    """What one batch did to the index."""

    worker_id: int
    """The rank's worker; 0 if the batch could not be parsed."""
    dp_rank: int
    """The rank."""
    applied: int = 0
    """Events applied; the cursor moved by these and by ``rejected`` and ``unknown_parents``. Events of a rank over
    bound, and the one that took it there, count here."""
    stored_blocks: int = 0
    """Blocks in the stores that were applied, held before or not; without those of a rank over bound."""
    removed_blocks: int = 0
    """Blocks in the removals that were applied and were held."""
    duplicates: int = 0
    """Events below the cursor, dropped."""
    fenced: int = 0
    """Events of an older incarnation, dropped; a batch without events counts 1."""
    gap: tuple[int, int] | None = None
    """(id expected, id found) where ids were missing: that event and the rest of the batch are *not* applied, and the
    cursor stays before them. Where only next_event_id shows that ids are missing, it is the id found, and all events of
    the batch are applied."""
    unknown_parents: int = 0
    """Stores whose parent is not held: skipped, the cursor moves on, the rank is partial from then on. Blocks that they
    name are released where they were held: they are somewhere else, and it is not known where."""
    unknown_removals: int = 0
    """Removed blocks that were not held."""
    rejected: tuple[str, ...] = ()
    """Why events were refused (at most 16 reasons): they are skipped, the cursor moves on, the rank is partial."""
    unparsable: str = ""
    """Why the batch as a whole could not be read; nothing of it was applied."""
    next_event_id: int = 0
    """The rank's cursor after the batch."""
    incarnation: int = 0
    """The rank's incarnation after the batch."""
    new_incarnation: bool = False
    """Whether the batch began a new incarnation of a rank that was known, so that older blocks were dropped."""
    digest_differs: bool = False
    """Whether the batch carries a digest, ends at the rank's cursor, and the digest is not that of the index. Left
    unchecked (False) after a gap, for partial ranks, and for batches with events unless the index was made with
    check_digests."""
    evicted_blocks: int | None = None
    """Entries dropped because the rank took the index over a bound, and was emptied; None if it did not."""


class RankInfo(NamedTuple):
    """State of one rank in the index."""

    worker_id: int
    dp_rank: int
    incarnation: int
    next_event_id: int
    blocks: int
    """Entries held: (engine hash, tier) pairs."""
    memory_bytes: int
    """Estimate of the memory that would be free without this rank."""
    partial: bool
    """Whether blocks may be missing."""
    evicted: bool = False
    """Whether it was emptied because it took the index over a bound, and takes no blocks since."""


class IndexStats(NamedTuple):
    """Size of an index."""

    ranks: int
    blocks: int
    """Entries over all ranks: (rank, engine hash, tier)."""
    distinct_blocks: int
    """Distinct places. Blocks that were loaded without all of their ancestors may be left out."""
    memory_bytes: int
    """Memory in use by the index, from its own accounting."""


class MemoryBudget(Protocol):
    """A bound on the memory of several indexes together.

    Made by ``MemoryBudget(max_bytes=0)``; 0 is no bound.
    """

    @property
    def max_bytes(self) -> int:
        """The bound; 0 is none."""
        ...

    @property
    def used_bytes(self) -> int:
        """Memory of all indexes that share the budget, as of their last changes."""
        ...


class PrefixIndex(Protocol):
    """Who holds which blocks, for the ranks of one component.

    Made by ``PrefixIndex(max_blocks=0, budget=None, check_digests=False)``. ``max_blocks`` bounds ``blocks`` of
    ``stats()``; 0 is no bound. ``budget`` is a MemoryBudget that bounds ``memory_bytes`` over all indexes which share
    it; None is no bound. A rank whose store or load ends above a bound is evicted: emptied and partial, and its events
    move the cursor only, until it is replaced, begins a new incarnation, or an event clears all its tiers.

    Any number of threads may call any method. Dumps, digests and statistics run beside queries, digests of heartbeats
    included; only changes of the index make a query wait, for one change at most.
    """

    def apply(self, batch: Any) -> ApplySummary:
        """Applies a KvEventBatch: an ``EventBatch`` or encoded. Never raises for what the bytes contain.

        A new rank starts at event 0 of the batch's incarnation; a higher incarnation drops the rank's
        blocks and starts again at event 0.
        """
        ...

    def find_matches(self, local_hashes: bytes) -> bytes:
        """The encoded FindMatchesResponse for a prompt: every rank of the index, in order of (worker_id, dp_rank).

        Raises:
            ValueError: the bytes are no whole number of hashes.
        """
        ...

    def try_find_matches(self, local_hashes: bytes) -> bytes | None:
        """As ``find_matches``; None if the index is being changed: for callers that must not wait."""
        ...

    def overlaps(self, local_hashes: bytes, tier: int = 1) -> bytes:
        """Overlap to ``tier`` (a value of the enum Tier) by slot: packed little-endian u32, as many as ``slots()``.

        Raises:
            ValueError: there is no such tier (TIER_UNSPECIFIED is none), or the bytes are no whole number of hashes.
        """
        ...

    def overlaps_of_tokens(self, token_ids: TokenBuffer, block_size: int, scope: Scope = ..., tier: int = 1) -> bytes:
        """As ``overlaps``, from tokens."""
        ...

    def slots(self) -> list[Rank | None]:
        """The rank behind each slot; None for a slot that is free, which the next rank takes.

        A rank keeps its slot while it is in the index.
        """
        ...

    def cursor(self, rank: Rank) -> tuple[int, int] | None:
        """(incarnation, next_event_id) of a rank; None if it is unknown."""
        ...

    def digest(self, rank: Rank) -> int | None:
        """Digest of a rank's entries as KvEventBatch.digest defines it; None if the rank is unknown."""
        ...

    def is_evicted(self, rank: Rank) -> bool:
        """Whether a rank was emptied because it took the index over a bound, and takes no blocks since."""
        ...

    def reset_rank(self, rank: Rank, incarnation: int, next_event_id: int, *, partial: bool = True) -> int:
        """Replaces a rank by an empty one with that cursor. Returns the entries dropped."""
        ...

    def remove_rank(self, rank: Rank) -> int:
        """Forgets a rank and its cursor. Returns the entries dropped; 0 if it is unknown."""
        ...

    def mark_partial(self, rank: Rank, partial: bool) -> None:
        """Marks whether a rank's blocks may be fewer than it holds. Unknown ranks are left alone.

        A rank over bound stays partial all the same.
        """
        ...

    def dump_rank(self, rank: Rank, chunk_blocks: int = 4096) -> Iterator[bytes]:
        """Encoded RankState chunks of one rank, parents before children, the last one marked; one chunk at least.

        A block's parent_engine_hash is left out where no held entry is at the parent's place, and may be where the
        block came from a dump that left it out; sequence_hash and depth are always there. The cursor and the blocks
        are those of the call, whatever is applied while the chunks are read. An unknown rank gives nothing.

        Raises:
            ValueError: ``chunk_blocks`` is below 1.
        """
        ...

    def load_rank(self, chunks: Iterable[bytes]) -> int:
        """Replaces a rank by a dump, atomically. Returns its entries.

        Digest, counting and whether blocks are missing are those of the last chunk. A block without a
        parent_engine_hash is taken to be at its sequence_hash; at depth 0 that is its local hash.

        Raises:
            InvalidDump: the chunks cannot be parsed, disagree on rank or cursor, lack a last one or go on after it, or
                do not match their digest; or a block comes twice, names a parent that did not come before it, is
                elsewhere than its parent and local hash say, or has no copies, or an unknown tier, or a tier twice.
                The index is then unchanged.
        """
        ...

    def ranks(self) -> list[RankInfo]:
        """All ranks, in order of (worker_id, dp_rank)."""
        ...

    def stats(self) -> IndexStats:
        """Size of the index."""
        ...


class InvalidDump(ValueError):
    """A dump cannot be loaded; the message says why."""


class PredictedIndex(Protocol):
    """Blocks that ranks are predicted to hold, from where requests were sent: the approximate mode.

    Made by ``PredictedIndex(ttl_seconds=120.0, max_blocks=1 << 20, prune_ratio=0.8)``. Time is handed in, seconds of a
    monotonic clock; an earlier time than one handed in before counts as that one. An entry (rank, place) lives while it
    is less than ``ttl_seconds`` since a request with it was last recorded. When a record leads to more than
    ``max_blocks`` entries, expired ones not counted, the least recently used go until ``int(prune_ratio * max_blocks)``
    are left; of entries used at the same time, deeper ones go first.
    """

    def record(self, rank: Rank, local_hashes: bytes, now: float) -> None:
        """A request with these blocks was sent to the rank."""
        ...

    def overlaps(self, local_hashes: bytes, now: float) -> dict[Rank, int]:
        """Overlap of every rank that has one above 0."""
        ...

    def remove_rank(self, rank: Rank) -> int:
        """Forgets a rank. Returns the entries dropped."""
        ...

    def expire(self, now: float) -> int:
        """Drops what is too old. Returns how many entries; ``overlaps`` never counts such entries, dropped or not."""
        ...

    def __len__(self) -> int: ...


class LoadColumns(NamedTuple):
    """Load of ranks, as columns of signed 64-bit words (format ``q``): entry i of each speaks of ``ranks[i]``.

    A sum that goes past a word reads as 2^63 - 1.
    """

    ranks: tuple[Rank, ...]
    """In order of (worker_id, dp_rank). The native core gives the same tuple until other ranks are there."""
    active_blocks: memoryview
    """Distinct blocks of requests in flight, with those of the given request, if any."""
    prefill_tokens: memoryview
    """Prefill tokens booked and not done, without those of the given request."""
    requests: memoryview
    """Bookings that are not freed."""
    leading_active_blocks: memoryview
    """Leading blocks of the given request that are active there; 0 if none was given."""


@dataclass(frozen=True, slots=True)
class BookingRequest:
    """What ``ActiveSequences.book`` counts on a rank. It is read and not kept."""

    key: tuple[str, int, int]
    """(request_id, attempt, stage)"""
    rank: Rank
    sequence_hashes: bytes = field(repr=False)
    """Sequence hashes of the prompt's full blocks."""
    prompt_tokens: int
    prefill_tokens: int
    """Prompt tokens that the rank must compute: those not held when the request was booked."""
    track_blocks: bool = True
    """Whether its blocks count as active."""
    unique_blocks: bool = False
    """Whether its blocks are taken as shared with no other request's."""


class ActiveSequences(Protocol):
    """Load that requests in flight put on the ranks of one component: exact under any order of calls.

    Made by ``ActiveSequences(block_size, max_bookings=1 << 20, tombstones=1 << 16)``. A booking is booked, then
    prefilled, then freed; states merge by maximum, so that a call which comes late or twice changes nothing. Freed keys
    are kept, the newest ``tombstones`` of them (a key freed again is new again), and are not booked again.

    Active blocks of a rank are the distinct full blocks (by sequence hash) of its tracked bookings, and for each
    booking ``ceil((prompt + output tokens) / block_size) - prompt_tokens // block_size`` private ones (for a booking of
    unique blocks, all of them are private).
    """

    def add_rank(self, rank: Rank) -> None:
        """Makes a rank known, with no load; a known one is left alone."""
        ...

    def remove_rank(self, rank: Rank) -> list[tuple[str, int, int]]:
        """Forgets a rank. Its bookings are freed; their keys are returned, in the order in which they were booked."""
        ...

    def book(self, booking: BookingRequest) -> bool:
        """Books. Returns False, and changes nothing, if the key is booked already or was freed.

        A key whose prefill_complete or output_tokens came before the booking is not remembered for that: only frees
        are.

        Raises:
            KeyError: the rank is unknown.
            OverflowError: there are ``max_bookings`` already.
            ValueError: the bytes of the sequence hashes are no whole number, or a number of tokens is negative.
        """
        ...

    def rank(self, key: tuple[str, int, int]) -> Rank | None:
        """Returns the rank of a live booking; None if the key is not booked."""
        ...

    def prefill_complete(self, key: tuple[str, int, int]) -> bool:
        """The prompt is computed: its prefill tokens count no more. Returns whether the booking is live."""
        ...

    def output_tokens(self, key: tuple[str, int, int], tokens: int) -> bool:
        """``tokens`` have been generated in all; a lower number than before changes nothing.

        Returns whether the booking is live.
        """
        ...

    def free(self, key: tuple[str, int, int]) -> bool:
        """Releases a booking. Returns whether it was live; an unknown key is remembered as freed all the same."""
        ...

    def loads(self, sequence_hashes: bytes = b"", prompt_tokens: int = 0) -> LoadColumns:
        """Load of every rank; given a prompt, with its blocks (and its partial tail) added to ``active_blocks``.

        Raises:
            ValueError: the bytes of the sequence hashes are no whole number.
        """
        ...

    def __len__(self) -> int:
        """Live bookings."""
        ...
