"""Accounts for the load of the requests in flight on the ranks of one component."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np
from kvrouter.core import ActiveSequences, BookingRequest, CachedRank, CacheRecency, LoadColumns, Rank
from kvrouter.scheduler.identifiers import Key
from kvrouter.scheduler.load.latency import LatencyCalibration
from kvrouter.scheduler.load.prefill_times import PrefillTimes
from kvrouter.scheduler.load.slots import BookingPeaks, TimeInFlight
from kvrouter.scheduler.load.tier_loads import ExpectedLoad, TierLoads
from kvrouter.scheduler.policies.interface import Amounts, Column
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.scheduler.request.remote_prefill import PrefillFactors
from kvrouter.v1.common_pb2 import Stage
from kvrouter.v1.errors import TooLarge
from numpy.typing import NDArray

# Read once: looking up an enum value by name takes a microsecond, for each candidate.
_PREFILL = Stage.STAGE_PREFILL
_REQUESTS = 2
"""Place of the requests among the core's columns of load."""


@dataclass(frozen=True, slots=True)
class Accounting:
    """Rules for counting load."""

    track_active_blocks: bool = True
    """Whether blocks of requests in flight count. Never in the prefill stage, which leaves no blocks in use."""
    assume_kv_reuse: bool = True
    """Whether requests share equal blocks; otherwise each request counts its own."""
    track_output_blocks: bool = True
    """Whether blocks filled by output count."""


class Heads(NamedTuple):
    """The prompts under computation, as columns of shape (ranks,), in the order given to ``show``."""

    tokens: NDArray[np.int64]
    """Uncached tokens at dispatch; 0 if no prompt waits."""
    requests: NDArray[np.int64]
    """Requests without a first token, including these."""
    since: NDArray[np.float64]
    """Seconds of the clock at which each became the first; infinite if no prompt waits."""
    now: float
    """Seconds of the clock at which the heads were read."""

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Seconds since each became the first; 0 if no prompt waits. Computed on demand: few policies need it."""
        seconds: NDArray[np.float64] = np.maximum(self.now - self.since, 0.0)
        return seconds


class PrefillQueues:
    """Tracks prompts by rank. Engines compute them in order of arrival, so the oldest one is being computed."""

    def __init__(self) -> None:
        self._queues: dict[Rank, dict[Key, int]] = {}
        self._since: dict[Rank, float] = {}
        self.show(())

    def show(self, ranks: Sequence[Rank]) -> None:
        """Sets the ranks of the columns and their order."""
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._tokens, self._requests = np.zeros(len(ranks), np.int64), np.zeros(len(ranks), np.int64)
        self._first_since = np.full(len(ranks), np.inf)
        self._is_read = False
        for rank in self._queues:
            self._update(rank)

    def enter(self, rank: Rank, key: Key, tokens: int, now: float) -> None:
        """Adds a dispatched request with its uncached prompt tokens."""
        queue = self._queues.setdefault(rank, {})
        if not queue:
            self._since[rank] = now
        queue[key] = tokens
        self._update(rank)

    def leave(self, rank: Rank, key: Key, now: float) -> None:
        """Removes a request after its first token or its end. An unknown request changes nothing."""
        queue = self._queues.get(rank)
        if queue is None or key not in queue:
            return
        del queue[key]
        self._since[rank] = now
        if not queue:
            del self._queues[rank], self._since[rank]
        self._update(rank)

    def waiting(self, rank: Rank) -> int:
        """Returns the number of requests of a rank without a first token."""
        return len(self._queues.get(rank, ()))

    def heads(self, now: float) -> Heads:
        """Returns the prompts under computation on the shown ranks."""
        # A change copies the columns if they were read, so that a reader's do not change.
        self._is_read = True
        return Heads(self._tokens, self._requests, self._first_since, now)

    def _update(self, rank: Rank) -> None:
        place = self._places.get(rank)
        if place is None:
            return
        if self._is_read:
            self._is_read = False
            self._tokens, self._requests = self._tokens.copy(), self._requests.copy()
            self._first_since = self._first_since.copy()
        queue = self._queues.get(rank)
        self._tokens[place] = next(iter(queue.values())) if queue else 0
        self._requests[place] = len(queue) if queue else 0
        self._first_since[place] = self._since.get(rank, np.inf)


class RankLoad(NamedTuple):
    """Load of one rank."""

    active_blocks: int = 0
    """Distinct blocks of requests in flight."""
    prefill_tokens: int = 0
    """Prefill tokens booked and not computed."""
    requests: int = 0
    """Booked sequences."""


class Loads(NamedTuple):
    """Load as columns of shape (ranks,), in the order of the registered ranks."""

    active_blocks: Column
    """With the request to place, if there is one."""
    prefill_tokens: Column
    requests: Column
    leading_active_blocks: Column
    """Leading active blocks of the request to place."""
    heads: Heads


@dataclass(eq=False)
class BookedLoad:
    """Books requests on ranks. Exact under any order of calls; see ``kvrouter.core.ActiveSequences``.

    An unregistered rank keeps its load until its bookings are freed: the lease of a worker can expire
    while its requests continue.
    """

    block_size: int
    accounting: Accounting
    _: KW_ONLY
    max_bookings: int = 1 << 20
    clock: Callable[[], float] = time.monotonic
    """Returns seconds of a monotonic clock."""

    def __post_init__(self) -> None:
        # The booking table remembers freed keys, over all components.
        self._sequences = ActiveSequences(self.block_size, max_bookings=self.max_bookings, tombstones=0)
        self._recency = CacheRecency()
        self._knows_caches = False
        """Whether the size of any rank's cache is known. Otherwise no chance of reuse is."""
        self._registered: frozenset[Rank] = frozenset()
        self._places: tuple[tuple[Rank, ...], NDArray[np.intp] | None] | None = None
        """The ranks known to the core, and the indexes of the registered ones; None if they all are."""
        self._bookings: dict[Rank, int] = {}
        self._further: dict[Key, int] = {}
        """Sequences beyond the first one of each booking that has several."""
        self._further_of: dict[Rank, int] = {}
        """Their sum by rank."""
        self._prefills = PrefillQueues()
        self.latency_calibration = LatencyCalibration()
        self.prefill_times = PrefillTimes()
        self.tier_loads = TierLoads()
        self._learners = (self.latency_calibration, self.prefill_times, self.tier_loads)
        """Each of them learns from first tokens."""
        self.time_in_flight = TimeInFlight()
        self._peaks = BookingPeaks()

    def __len__(self) -> int:
        """Returns the number of live bookings."""
        return len(self._sequences)

    def set_ranks(self, registered: Sequence[CachedRank]) -> None:
        """Replaces the registered ranks, in order of rank."""
        self._recency.set_ranks(registered)
        self._knows_caches = any(cached.total_blocks for cached in registered)
        before, self._registered = self._registered, frozenset(cached.rank for cached in registered)
        for rank in self._registered - before:
            self._sequences.add_rank(rank)
        for rank in before - self._registered:
            self._forget_if_idle(rank)
        self._prefills.show(sorted(self._registered))
        self.tier_loads.set_ranks(cached.rank for cached in registered)
        self._places = None

    def loads(self, prompt: Prompt | None = None, stage: Stage = Stage.STAGE_WHOLE) -> Loads:
        """Returns the load of the registered ranks, in order of rank; given a prompt, with its blocks added."""
        if prompt is None or not self.tracks_blocks(stage):
            columns, added = self._sequences.loads(), 0
        elif self.accounting.assume_kv_reuse:
            columns, added = self._sequences.loads(prompt.sequence_hashes, prompt.tokens), 0
        else:
            columns, added = self._sequences.loads(), -(-prompt.tokens // self.block_size)
        active, prefill, requests, leading = self._registered_of(columns)
        heads = self._prefills.heads(self.clock())
        return Loads(active + added if added else active, prefill, requests, leading, heads)

    def columns(self) -> Column:
        """Returns the rows of ``loads`` without a prompt: active blocks, prefill tokens, requests, leading blocks."""
        return self._registered_of(self._sequences.loads())

    def reuse_chance(self) -> Amounts:
        """Returns the mean chance over each registered rank's KV cache that a block is used again, in order of rank."""
        return np.ndarray((len(self._registered),), np.float64, self._recency.reuse_chance(self.clock()))

    def relative_latency(self) -> Amounts:
        """Returns how slow each registered rank is, relative to the component, in order of rank."""
        return self.latency_calibration.relative.column(self.clock())

    def most_booked(self, rank: Rank) -> int:
        """Returns the most booked sequences of a rank since the report before the last, when another one arrives."""
        return self._peaks.reported(rank, self._booked(rank))

    def load_by_rank(self) -> dict[Rank, RankLoad]:
        """Returns the load of every rank with a registration or bookings, for display."""
        return {
            rank: RankLoad(active, prefill, requests + self._further_of.get(rank, 0))
            for rank, active, prefill, requests, _ in self._sequences.loads().rows()
        }

    def _registered_of(self, columns: LoadColumns) -> Column:
        """Returns the columns of registered ranks as rows; the core also knows ranks with bookings only."""
        known = columns.ranks
        rows: Column = np.ndarray((4, len(known)), np.int64, columns.packed)
        if self._further_of:
            rows = rows.copy()
            rows[_REQUESTS] += np.array([self._further_of.get(rank, 0) for rank in known], np.int64)
        if self._places is None or self._places[0] is not known:
            registered = [place for place, rank in enumerate(known) if rank in self._registered]
            self._places = (known, None if len(registered) == len(known) else np.array(registered, np.intp))
        places = self._places[1]
        return rows if places is None else rows[:, places]

    def book(
        self, key: Key, rank: Rank, prompt: Prompt, prefill_tokens: int, *, forecast_ms: float | None = None
    ) -> bool:
        """Books a request. Returns False, and changes nothing, if the key is booked.

        Args:
            key: Key of the booking.
            rank: Rank of the request.
            prompt: The prompt.
            prefill_tokens: Prompt tokens to compute there.
            forecast_ms: Forecast time to first token, if it is suitable for latency calibration.

        Raises:
            TooLarge: the maximum number of bookings is reached.
        """
        request = BookingRequest(
            key=key,
            rank=rank,
            sequence_hashes=prompt.sequence_hashes,
            prompt_tokens=prompt.tokens,
            prefill_tokens=prefill_tokens,
            track_blocks=self.tracks_blocks(key[2]),
            unique_blocks=not self.accounting.assume_kv_reuse,
        )
        if rank not in self._registered:
            self._sequences.add_rank(rank)
        try:
            booked = self._sequences.book(request)
            if booked:
                self._bookings[rank] = self._bookings.get(rank, 0) + 1
                if prompt.sequences > 1:
                    self._further[key] = prompt.sequences - 1
                    self._further_of[rank] = self._further_of.get(rank, 0) + prompt.sequences - 1
                self._peaks.booked(rank, self._booked(rank))
                now = self.clock()
                if self._knows_caches:
                    self._recency.record(rank, prompt.sequence_hashes, now)
                self.time_in_flight.began(now)
                if prefill_tokens:
                    self._prefills.enter(rank, key, prefill_tokens, now)
                if forecast_ms is not None:
                    self.latency_calibration.expect(key, rank, forecast_ms, now)
        except OverflowError as error:
            raise TooLarge(
                f"no further booking is possible: {error}",
                advice="Free the bookings of requests that have ended.",
                retry_after_ms=1000,
            ) from None
        finally:
            self._forget_if_idle(rank)
        return booked

    def measure_prefill(self, key: Key, rank: Rank, prefill_tokens: int) -> None:
        """Measures the time to the first token of a booking made now, if its rank computes no other prompt."""
        if prefill_tokens and self._prefills.waiting(rank) == 1:
            self.prefill_times.expect(key, prefill_tokens, self.clock())

    def measure_load(self, key: Key, load: ExpectedLoad) -> None:
        """Measures the load of a booking made now by the time to its first token."""
        self.tier_loads.expect(key, load, self.clock())

    def load_factors(self) -> Amounts:
        """Returns measured over modelled load times: a row for each lower tier, with the ranks in order."""
        return self.tier_loads.factors(self.clock())

    def prefill_factors(self) -> PrefillFactors:
        """Returns the measured times to compute and to receive prompts, over those of the models."""
        return self.prefill_times.factors(self.clock())

    def handed_over(self, measured_ms: float, modelled: float) -> None:
        """Measures the end of a hand-over, given its modelled time; both in ms."""
        self.prefill_times.handed_over(measured_ms, modelled, self.clock())

    def tracks_blocks(self, stage: int) -> bool:
        """Returns whether the blocks of a booking of the stage count as active."""
        return self.accounting.track_active_blocks and stage != _PREFILL

    def prefill_complete(self, key: Key) -> bool:
        """Records the end of the prefill. Returns whether the booking is live."""
        rank = self._sequences.rank(key)
        if rank is None:
            return False
        now = self.clock()
        self._prefills.leave(rank, key, now)
        for learner in self._learners:
            learner.first_token(key, now)
        return self._sequences.prefill_complete(key)

    def output_tokens(self, key: Key, tokens: int) -> bool:
        """Notes the total number of output tokens so far. Returns whether the booking is live."""
        if not self.accounting.track_output_blocks:
            return self._sequences.rank(key) is not None
        return self._sequences.output_tokens(key, tokens)

    def free(self, key: Key, *, prefilled: bool = False) -> bool:
        """Frees a booking. Returns whether it was live.

        Args:
            key: Key of the booking.
            prefilled: Whether its prompt is computed as well, as ``prefill_complete`` notes it.
        """
        rank = self._sequences.rank(key)
        if rank is None:
            return False
        now = self.clock()
        self._sequences.free(key)
        self.time_in_flight.ended(now)
        self._prefills.leave(rank, key, now)
        for learner in self._learners:
            if prefilled:
                learner.first_token(key, now)
            else:
                learner.forget(key)
        if further := self._further.pop(key, 0):
            self._further_of[rank] -= further
            if not self._further_of[rank]:
                del self._further_of[rank]
        left = self._bookings[rank] - 1
        if left:
            self._bookings[rank] = left
        else:
            del self._bookings[rank]
            self._forget_if_idle(rank)
        return True

    def _booked(self, rank: Rank) -> int:
        """Returns the number of booked sequences of a rank."""
        return self._bookings.get(rank, 0) + self._further_of.get(rank, 0)

    def _forget_if_idle(self, rank: Rank) -> None:
        if rank not in self._registered and rank not in self._bookings:
            self._sequences.remove_rank(rank)
            self._peaks.forget(rank)
