"""How recently the cached blocks of each rank were used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvrouter.core.interface.names import Rank


class CachedRank(NamedTuple):
    """A rank with a KV cache."""

    rank: Rank
    incarnation: int
    """Incarnation of its cache, u64. Another one starts empty."""
    total_blocks: int
    """Blocks of its cache; 0 if unknown."""


class CacheRecency(Protocol):
    """Estimates from booked prompts what the next block on each rank of a component evicts.

    Constructor: ``CacheRecency(rank_sample=1024, max_sample=1 << 20, history_sample=1 << 16)``. Each rank is taken as
    an LRU cache of the blocks of its prompts, of which a sample is kept: those whose hash has as many trailing zero
    bits as necessary to keep ``rank_sample`` blocks for the mean rank, and ``max_sample`` for all. A second sample, of
    at most ``history_sample`` blocks, covers four times the blocks of all caches, on whatever rank they were used: it
    shows how often an idle block is used again.

    The chance that a block is used again after it has been idle for a time a is

        reused(a) / (reused(a) + idle(a) + 1)

    with ``reused(a)`` uses of a block after an idle time of at least a, and ``idle(a)`` blocks that were idle for at
    least a and not used again, whether or not they are still in the sample. Both counts are halved whenever as many
    blocks have left the full sample as it holds. Idle times are counted in 64 bins of half an octave, from 1 ms, and
    the chance is interpolated between them. Idle blocks are counted every 5 s.

    Times are seconds of one clock, which never goes backwards: an earlier time counts as the latest one.
    """

    def set_ranks(self, ranks: Sequence[CachedRank]) -> None:
        """Replaces the ranks, in the order of the columns. A known rank of the same incarnation keeps its blocks.

        The sample gets coarser if the caches become larger in all, and never finer.

        Raises:
            ValueError: a number is negative or too large.
        """

    def record(self, rank: Rank, sequence_hashes: bytes, now: float) -> None:
        """Records the use of a prompt's blocks on a rank. On an unknown rank they count as used all the same.

        Raises:
            ValueError: the number of bytes of the sequence hashes is not a multiple of 8.
        """

    def reuse_chance(self, now: float) -> bytes:
        """Returns a row of float64: by rank, the mean chance over the blocks of its cache that one is used again.

        Blocks without content count as 0, and so does a rank whose number of blocks is unknown. The chance is renewed
        after 1 s, of at most 16 ranks in each call, in turns. The row is the same object as before while its numbers
        are the same.
        """

    def __len__(self) -> int:
        """Returns the number of sampled blocks, over all ranks and the history."""
