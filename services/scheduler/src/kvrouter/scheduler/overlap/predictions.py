"""Predicted blocks: of ranks that send no events, of all ranks (approximate mode), or of content without known ids.

A rank is assumed to hold the blocks of each request booked on it, for ``ttl_seconds``, until the cached tokens of its
engine show that it has evicted them. A new incarnation of a rank starts without blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from kvrouter.core import PredictedIndex, Rank
from kvrouter.scheduler.bookings.booking import Booked, Booking, Freed, Moved
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.overlap.evictions import EvictionCheck
from kvrouter.scheduler.overlap.indexer_query import NO_RANKS, Overlaps
from kvrouter.scheduler.policies.interface import Amounts
from kvrouter.scheduler.request.prompt import HASH_BYTES, Prompt
from kvrouter.scheduler.workers.candidates import Candidate, ListedRanks
from kvrouter.v1.names import ComponentName


@dataclass(frozen=True, slots=True)
class PredictionLimits:
    """Bounds of the predicted blocks."""

    ttl_seconds: float = 120.0
    """Time for which a block is predicted after its last use."""
    max_blocks: int = 1 << 20
    """Maximum number of blocks over all ranks of a component; above it the least recently used are evicted."""
    prune_ratio: float = 0.99
    """Remaining share of ``max_blocks`` after an eviction, which takes a tenth of a microsecond for each block."""


_LONG_HASHES = 4096 * HASH_BYTES
"""Hashes that take about a millisecond to record."""


@dataclass(slots=True)
class _Prediction:
    pool: Pool = field(repr=False)
    index: PredictedIndex = field(repr=False)
    evictions: EvictionCheck = field(default_factory=EvictionCheck, repr=False)
    incarnations: dict[Rank, int] = field(default_factory=dict)
    """Incarnation of each rank's blocks."""
    listed: ListedRanks = NO_RANKS
    """The same; another object after each change, as a key of caches."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.pool.booked_load.block_size

    def reuse_chance(self, now: float) -> Amounts:
        """Returns the chance that a block of each rank is used again, in order of rank; 0 for new incarnations."""
        chance, known = self.evictions.reuse_chance, self.incarnations
        ranks = [(each.rank, each.incarnation) for each in self.pool.candidates]
        return np.array([chance(rank, now) if known.get(rank) == number else 0.0 for rank, number in ranks])


@dataclass(eq=False)
class Predictions:
    """Predicts overlaps for every component. ``clock`` returns seconds.

    ``everywhere`` predicts those of all ranks; otherwise of those that publish no events, and of prompts with content
    whose id only the engine knows. ``later`` calls a function soon: it records the blocks of a long prompt, unless
    an overlap is asked for first.
    """

    limits: PredictionLimits
    clock: Callable[[], float]
    everywhere: bool = True
    later: Callable[[Callable[[], None]], object] = lambda record: record()
    _waiting: Callable[[], None] | None = field(default=None, init=False)
    """Records the blocks of the last long prompt, unless they are recorded."""
    _predicted: dict[ComponentName, _Prediction] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        """Returns the number of predicted blocks over all ranks."""
        return sum(len(each.index) for each in self._predicted.values())

    @property
    def most_blocks(self) -> int:
        """Largest number of predicted blocks of one component."""
        return max((len(each.index) for each in self._predicted.values()), default=0)

    def some_of(self, pool: Pool) -> bool:
        """Returns whether the blocks of any rank are predicted."""
        return self.everywhere or bool(pool.worker_set.without_events)

    def concern(self, pool: Pool, prompt: Prompt) -> bool:
        """Returns whether blocks of a prompt are predicted on any rank."""
        return self.everywhere or prompt.indexed_blocks is not None or self.some_of(pool)

    def all_of(self, pool: Pool) -> bool:
        """Returns whether those of every rank are predicted, so that no Indexer knows more."""
        return self.everywhere or len(pool.worker_set.without_events) == len(pool.candidates)

    def overlaps(self, pool: Pool, prompt: Prompt) -> Overlaps:
        """Returns the predicted leading blocks of a prompt on each rank."""
        if self._waiting is not None:
            self._record_waiting()
        predicted = self._of(pool)
        listed = predicted.listed
        blocks = np.zeros(len(listed.place_of), np.int64)
        reusable = prompt.sequence_hashes[: prompt.reusable_blocks(predicted.block_size) * HASH_BYTES]
        held = predicted.index.overlaps(reusable, self.clock())
        for rank, overlap in held.items():
            blocks[listed.place_of[rank]] = overlap
        return Overlaps(listed, blocks)

    def follow(self, booking_table: BookingTable) -> None:
        """Subscribes to bookings, to record their blocks for their ranks, and to learn which of these were evicted."""
        booking_table.subscribe(Booked, self._booked)
        booking_table.subscribe(Moved, self._moved)
        booking_table.subscribe(Freed, self._freed)

    def _booked(self, change: Booked) -> None:
        self._place(change.booking, is_new=True)

    def _moved(self, change: Moved) -> None:
        booking = change.booking
        predicted = self._predicted.get(booking.pool.name)
        if predicted is not None:
            predicted.evictions.move(booking.key)
        self._place(booking, is_new=False)

    def _place(self, booking: Booking, *, is_new: bool) -> None:
        pool, prompt, rank = booking.pool, booking.prompt, booking.placement.rank
        if not prompt.local_hashes:
            return
        candidate = pool.worker_set.candidate(rank)
        if candidate is None:
            return
        if self.everywhere or not candidate.publishes_events or prompt.indexed_blocks is not None:
            if self._waiting is not None:
                self._record_waiting()
            predicted, now = self._of(pool), self.clock()
            if predicted.incarnations.get(rank) != candidate.incarnation:
                self._begin_incarnation(pool, predicted, candidate)
            if is_new and prompt.indexed_blocks is None:
                # The prefix that the rank is predicted to hold.
                blocks, last_use = booking.outcome.overlap_blocks, None
                if blocks:
                    last_use = predicted.index.last_use(rank, prompt.sequence_hashes[: blocks * HASH_BYTES], now)
                predicted.evictions.begin(booking.key, rank, now, last_use, blocks * predicted.block_size)
            if len(prompt.sequence_hashes) < _LONG_HASHES:
                self._record(predicted, rank, prompt)
            else:
                self._waiting = partial(self._record, predicted, rank, prompt)
                self.later(self._record_waiting)

    def _freed(self, change: Freed) -> None:
        booking = change.booking
        predicted = None if booking is None else self._predicted.get(booking.pool.name)
        if booking is None or predicted is None:
            return
        rank = booking.placement.rank
        evicted_until = predicted.evictions.end(booking.key, rank, change.cached_tokens, booking.prompt.tokens)
        if evicted_until is not None:
            self._record_waiting()  # Its blocks count among those used since the eviction.
            predicted.index.forget_until(rank, evicted_until)
            left = predicted.index.blocks_of(rank) * predicted.block_size
            predicted.evictions.limit(rank, left, self.clock() + self.limits.ttl_seconds)

    def _record_waiting(self) -> None:
        record, self._waiting = self._waiting, None
        if record is not None:
            record()

    def _begin_incarnation(self, pool: Pool, predicted: _Prediction, candidate: Candidate) -> None:
        """Drops the earlier blocks of a rank, whose incarnation is new."""
        self._forget_gone(pool, predicted)
        predicted.index.remove_rank(candidate.rank)
        predicted.evictions.forget(candidate.rank)
        predicted.incarnations[candidate.rank] = candidate.incarnation
        _list(predicted)

    def _record(self, predicted: _Prediction, rank: Rank, prompt: Prompt) -> None:
        """Records the blocks of a request booked on a rank."""
        now = self.clock()
        predicted.index.record(rank, prompt.sequence_hashes, now)
        most = predicted.evictions.most_tokens(rank, now)
        if most is not None:
            predicted.index.keep_newest(rank, most // predicted.block_size)

    def expire(self) -> None:
        """Drops blocks older than ``ttl_seconds``, and sets the chances of reuse that evictions show."""
        self._record_waiting()
        now = self.clock()
        for predicted in self._predicted.values():
            predicted.index.expire(now)
            predicted.pool.booked_load.set_reuse_chance(predicted.reuse_chance(now))

    def _of(self, pool: Pool) -> _Prediction:
        predicted = self._predicted.get(pool.name)
        # Another pool of the name has blocks of another size, to which the predictions do not apply.
        if predicted is None or predicted.pool is not pool:
            limits = self.limits
            index = PredictedIndex(limits.ttl_seconds, limits.max_blocks, limits.prune_ratio)
            predicted = self._predicted[pool.name] = _Prediction(pool, index)
        return predicted

    def _forget_gone(self, pool: Pool, predicted: _Prediction) -> None:
        if len(predicted.incarnations) <= 2 * len(pool.candidates):
            return
        for rank in predicted.incarnations.keys() - {candidate.rank for candidate in pool.candidates}:
            predicted.index.remove_rank(rank)
            predicted.evictions.forget(rank)
            del predicted.incarnations[rank]


def _list(predicted: _Prediction) -> None:
    ranks = sorted(predicted.incarnations)
    predicted.listed = ListedRanks(ranks, np.array([predicted.incarnations[rank] for rank in ranks], np.uint64))
