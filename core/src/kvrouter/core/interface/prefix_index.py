"""The prefix index.

Rules for every implementation:

- A rank has *entries*: engine hash → (place, copies in each tier). The *place* of a block is its sequence hash. Two
  engine hashes of a rank may have the same place. The block at the place is then resident while either of them is.
- ``stored`` puts a chain of blocks below the place of its parent, or at the start of a sequence. If the rank has an
  engine hash at another place, the engine hash moves: all its copies at the old place are released first, and its
  children keep their places. At the same place, its copies in the tier increase by one (COUNTED) or stay one (SET).
- ``removed`` decreases the copies in the tier by one (COUNTED) or to zero (SET). An entry without copies in any tier is
  dropped. The removal of a missing block is counted, and changes nothing. Blocks may be removed in any
  order, also parents before children.
- ``cleared`` drops every entry in the tier, or in all tiers for TIER_UNSPECIFIED. After the latter no block can be
  missing, so the rank is no longer partial.
- The overlap of a rank to a tier is the number of leading blocks of the prompt that are resident on the rank in that
  tier or a faster one. The first missing block ends it.
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

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from kvrouter.core.interface.events import ApplySummary
from kvrouter.core.interface.names import Rank, RankInfo


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
    """A shared memory bound of several indexes.

    Constructor: ``MemoryBudget(max_bytes=0)``; 0 is no bound.
    """

    @property
    def max_bytes(self) -> int:
        """Returns the bound, in bytes; 0 is no bound."""

    @property
    def used_bytes(self) -> int:
        """Returns the memory of all indexes of the budget, as of their last changes, in bytes."""


class PrefixIndex(Protocol):
    """The prefix index of one component: the resident blocks of each rank.

    Constructor: ``PrefixIndex(max_blocks=0, budget=None, check_digests=False)``. ``max_blocks`` bounds ``blocks`` of
    ``stats()``; 0 is no bound. ``budget`` is a MemoryBudget that bounds ``memory_bytes`` over all indexes that share
    it; None is no bound. If a ``stored`` event or a load exceeds a bound, the largest rank of the worker with the most
    blocks is evicted, and if that is not enough the rank that has grown. An evicted rank is emptied and partial, and
    its events only move the cursor, until it is replaced, starts a new incarnation, or an event clears all tiers.

    Any number of threads may call any method. Dumps, digests (also those of heartbeats) and statistics run concurrently
    with queries. Only changes of the index make a query wait, for at most one change.
    """

    def apply(self, batch: Any) -> ApplySummary:
        """Applies an ``EventBatch`` or an encoded KvEventBatch. Never raises because of its content.

        A new rank starts at event 0 of the batch's incarnation. A higher incarnation drops the rank's blocks and starts
        again at event 0.
        """

    def apply_ns(self, batch: Any) -> int | None:
        """Returns how long it takes to apply an ``EventBatch``, about, in ns; None if somebody uses the index."""

    def find_matches(self, local_hashes: bytes) -> bytes:
        """Returns the encoded FindMatchesResponse for a prompt, with every rank in order of (worker_id, dp_rank).

        Raises:
            ValueError: the number of bytes is not a multiple of 8.
        """

    def try_find_matches(self, local_hashes: bytes) -> bytes | None:
        """Returns the result of ``find_matches``, or None at once if the index is being changed."""

    def overlaps(self, local_hashes: bytes, tier: int = 1) -> bytes:
        """Returns the overlap to ``tier`` (a value of the enum Tier) of each slot, as packed little-endian u32.

        The result has one number per entry of ``slots()``.

        Raises:
            ValueError: the tier is unknown or TIER_UNSPECIFIED, or the number of bytes is not a multiple of 8.
        """

    def pooled(self, local_hashes: bytes) -> int:
        """Returns the leading blocks in shared storage, whichever ranks stored them.

        Raises:
            ValueError: the number of bytes is not a multiple of 8.
        """

    def slots(self) -> list[Rank | None]:
        """Returns the rank of each slot; None for a free slot, which the next new rank gets.

        A rank keeps its slot while it is in the index.
        """

    def cursor(self, rank: Rank) -> tuple[int, int] | None:
        """Returns (incarnation, next_event_id) of a rank; None if it is unknown."""

    def digest(self, rank: Rank) -> int | None:
        """Returns the digest of a rank's entries, defined at KvEventBatch.digest; None if the rank is unknown."""

    def is_evicted(self, rank: Rank) -> bool:
        """Returns whether a rank was emptied because the index reached a bound, and stores no blocks since."""

    def reset_rank(self, rank: Rank, incarnation: int, next_event_id: int, *, partial: bool = True) -> int:
        """Replaces a rank by an empty one with this cursor. Returns the number of entries dropped."""

    def remove_rank(self, rank: Rank) -> int:
        """Removes a rank and its cursor. Returns the number of entries dropped; 0 if the rank is unknown."""

    def dump_rank(self, rank: Rank, chunk_blocks: int = 4096) -> Iterator[bytes]:
        """Yields encoded RankState chunks of one rank, parents before children, the last one with ``last`` set.

        A known rank has at least one chunk, an unknown rank none. A block's parent_engine_hash is omitted if no entry
        is at the parent's place, and may be omitted if the block was loaded without it; sequence_hash and depth are
        always set. Cursor and blocks are those at the time of the call, whatever is applied meanwhile.

        Raises:
            ValueError: ``chunk_blocks`` is below 1.
        """

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

    def ranks(self) -> list[RankInfo]:
        """Returns all ranks, in order of (worker_id, dp_rank)."""

    def stats(self) -> IndexStats:
        """Returns the size of the index."""


class InvalidDump(ValueError):
    """Raised when a dump cannot be loaded; the message says why."""


class PredictedIndex(Protocol):
    """Predicted blocks of ranks, derived from the requests sent to them.

    Blocks are named by their sequence hashes, so a rank that holds a block holds those before it.

    Constructor: ``PredictedIndex(ttl_seconds=120.0, max_blocks=1 << 20, prune_ratio=0.8)``. The caller passes the time,
    in seconds of a monotonic clock; a time earlier than a previous one counts as the previous one. An entry
    (rank, place) expires ``ttl_seconds`` after a request with it was last recorded. When a call of ``record`` leads to
    more than ``max_blocks`` entries that are not expired, the least recently used are dropped until
    ``int(prune_ratio * max_blocks)`` are left; of entries used at the same time, deeper ones are dropped first.
    """

    def record(self, rank: Rank, sequence_hashes: bytes, now: float) -> None:
        """Records a request with these blocks, sent to the rank.

        Raises:
            MemoryError: there is no room. The rank has no blocks then.
        """

    def overlaps(self, sequence_hashes: bytes, now: float) -> dict[Rank, int]:
        """Returns the overlaps above 0 by rank, in blocks."""

    def last_use(self, rank: Rank, sequence_hashes: bytes, now: float) -> float | None:
        """Returns when the last of these blocks was last recorded for a rank; None if it has not all of them."""

    def forget_until(self, rank: Rank, at: float) -> int:
        """Drops a rank's entries that were last recorded at this time or before. Returns their number."""

    def keep_newest(self, rank: Rank, blocks: int) -> int:
        """Drops the least recently used of a rank's entries until so many are left. Returns the number dropped."""

    def blocks_of(self, rank: Rank) -> int:
        """Returns the number of a rank's entries, including expired ones not dropped yet."""

    def remove_rank(self, rank: Rank) -> int:
        """Removes a rank. Returns the number of entries dropped."""

    def expire(self, now: float) -> int:
        """Drops expired entries, which ``overlaps`` ignores in any case. Returns their number."""

    def __len__(self) -> int: ...
