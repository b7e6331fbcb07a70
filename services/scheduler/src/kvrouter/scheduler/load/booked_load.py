"""Accounts for the load of the requests in flight on the ranks of one component."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import msgspec
import numpy as np
from kvrouter.core import ActiveSequences, CachedRank, CacheRecency, LatencyCalibration, Rank, Speed
from kvrouter.runtime.booking_updates import Key
from kvrouter.scheduler.load.prefill_times import PrefillTimes
from kvrouter.scheduler.load.tier_loads import ExpectedLoad, TierLoads
from kvrouter.scheduler.policies.interface import Amounts
from kvrouter.scheduler.policies.loads import Loads, RankLoad
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.scheduler.request.remote_prefill import PrefillFactors
from kvrouter.v1.common_pb2 import Stage
from kvrouter.v1.errors import TooLarge
from numpy.typing import NDArray

# Read once: looking up an enum value by name takes a microsecond, for each candidate.
_PREFILL = Stage.STAGE_PREFILL
_HISTORY_BLOCKS = 1 << 14
"""Sample of blocks that shows how often an idle one is used again. A prompt of 128k tokens adds some 500 of its 8,192
blocks to it, at 50 to 150 ns each."""


@dataclass(frozen=True, slots=True)
class Accounting:
    """Rules for counting load."""

    track_active_blocks: bool = True
    """Whether blocks of requests in flight count. Never in the prefill stage, which leaves no blocks in use."""
    assume_kv_reuse: bool = True
    """Whether requests share equal blocks; otherwise each request counts its own."""
    track_output_blocks: bool = True
    """Whether blocks filled by output count."""


class Expected(msgspec.Struct, frozen=True):
    """Properties of a dispatch that its first token will show."""

    forecast_ms: float | None = None
    """Forecast time to first token; None if it is unsuitable for latency calibration."""
    computes: bool = False
    """Whether the rank computes its part of the prompt and loads nothing."""
    load: ExpectedLoad | None = None
    """Blocks to load before; None if there are none, or if there is no forecast."""


NOTHING = Expected()


class _Dispatched(msgspec.Struct, frozen=True):
    """A dispatch whose first token is still to come."""

    at: float
    """Seconds of the clock."""
    expected: Expected
    alone_tokens: int
    """Prompt tokens to compute on a rank without another prompt; 0 if it has one."""
    speed: Speed
    """Speed of the rank as it was known then."""


class _Row:
    """The numbers of the last row that the core packed, which is the same object until a number changes."""

    __slots__ = ("_numbers", "_packed")

    def __init__(self) -> None:
        self._packed, self._numbers = b"", np.zeros(0)

    def of(self, packed: bytes) -> Amounts:
        """Returns the numbers in packed bytes."""
        if packed is not self._packed:
            self._packed, self._numbers = packed, np.frombuffer(packed)
        return self._numbers


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
        self._recency = CacheRecency(history_sample=_HISTORY_BLOCKS)
        self._knows_caches = False
        """Whether the size of any rank's cache is known. Otherwise chances of reuse are those that are set."""
        self._set_chance: Amounts = np.zeros(0)
        self._chance, self._latency = _Row(), _Row()
        self._registered: frozenset[Rank] = frozenset()
        self._known: tuple[Rank, ...] = ()
        """The ranks known to the core: it also knows those that have nothing but bookings."""
        self._places: NDArray[np.intp] | None = None
        """The indexes of the registered ones; None if they all are."""
        self.latency_calibration = LatencyCalibration()
        self.prefill_times = PrefillTimes()
        self.tier_loads = TierLoads()
        self._expected: dict[Key, _Dispatched] = {}
        """What the first tokens will show, by the booking that still waits for one."""

    def __len__(self) -> int:
        """Returns the number of live bookings."""
        return len(self._sequences)

    def set_ranks(self, registered: Sequence[CachedRank]) -> None:
        """Replaces the registered ranks, in order of rank."""
        self._recency.set_ranks(registered)
        self.latency_calibration.set_ranks(registered)
        self._knows_caches = any(cached.total_blocks for cached in registered)
        self._set_chance = np.zeros(len(registered))
        before, self._registered = self._registered, frozenset(cached.rank for cached in registered)
        for rank in self._registered - before:
            self._sequences.add_rank(rank)
        for rank in before - self._registered:
            self._forget_if_idle(rank)
        self.tier_loads.set_ranks(cached.rank for cached in registered)
        self._locate(())

    def loads(self, prompt: Prompt | None = None, stage: Stage = Stage.STAGE_WHOLE) -> Loads:
        """Returns the load of the registered ranks, in order of rank; given a prompt, with its blocks added."""
        hashes, tokens, added = b"", 0, 0
        if prompt is not None and self.tracks_blocks(stage):
            if self.accounting.assume_kv_reuse:
                hashes, tokens = prompt.sequence_hashes, prompt.tokens
            else:
                added = -(-prompt.tokens // self.block_size)
        known, packed = self._sequences.loads(hashes, tokens)
        loads = Loads(packed, self.clock())
        if known is not self._known:
            self._locate(known)
        if self._places is not None:
            loads = loads.at(self._places)
        if added:
            loads = Loads((loads.active_blocks + added).tobytes() + loads.rows[1:].tobytes(), loads.now)
        return loads

    def reuse_chance(self) -> Amounts:
        """Returns the mean chance over each registered rank's KV cache that a block is used again, in order of rank."""
        if not self._knows_caches:
            return self._set_chance
        return self._chance.of(self._recency.reuse_chance(self.clock()))

    def set_reuse_chance(self, chance: Amounts) -> None:
        """Sets the chance of each registered rank, which counts if the size of no rank's cache is known."""
        self._set_chance = chance

    def relative_latency(self) -> Amounts:
        """Returns how slow each registered rank is, relative to the component, in order of rank."""
        return self._latency.of(self.latency_calibration.relative_latency(self.clock()))

    @property
    def seconds_in_flight(self) -> float:
        """Mean time of a request from dispatch to end; infinite while too few have ended."""
        return self._sequences.seconds_in_flight

    def most_booked(self, rank: Rank) -> int:
        """Returns the most booked sequences of a rank since the report before the last, when another one arrives."""
        return self._sequences.most_sequences(rank)

    def total(self) -> tuple[int, int]:
        """Returns the active blocks and the requests of all ranks with a registration or bookings."""
        _, packed = self._sequences.loads()
        loads = Loads(packed, self.clock())
        return sum(loads.active_blocks.tolist()), sum(loads.requests.tolist())

    def load_by_rank(self) -> dict[Rank, RankLoad]:
        """Returns the load of every rank with a registration or bookings, for display."""
        known, packed = self._sequences.loads()
        rows = Loads(packed, self.clock()).rows[:-1].T.tolist()
        return {rank: RankLoad(*row) for rank, row in zip(known, rows, strict=True)}

    def _locate(self, known: tuple[Rank, ...]) -> None:
        """Finds the registered ranks among those known to the core."""
        registered = [place for place, rank in enumerate(known) if rank in self._registered]
        self._known = known
        self._places = None if len(registered) == len(known) else np.array(registered, np.intp)

    def book(self, key: Key, rank: Rank, prompt: Prompt, prefill_tokens: int, *, expected: Expected = NOTHING) -> bool:
        """Books a request. Returns False, and changes nothing, if the key is booked.

        Args:
            key: Key of the booking.
            rank: Rank of the request.
            prompt: The prompt.
            prefill_tokens: Prompt tokens to compute there.
            expected: What its first token will show.

        Raises:
            TooLarge: the maximum number of bookings is reached.
        """
        now, is_registered = self.clock(), rank in self._registered
        if not is_registered:
            self._sequences.add_rank(rank)
        try:
            prompts = self._sequences.book(
                key,
                rank,
                prompt.sequence_hashes,
                prompt.tokens,
                prefill_tokens,
                self.tracks_blocks(key[2]),
                not self.accounting.assume_kv_reuse,
                prompt.sequences,
                now,
            )
        except OverflowError as error:
            raise TooLarge(
                f"no further booking is possible: {error}",
                advice="Free the bookings of requests that have ended.",
                retry_after_ms=1000,
            ) from None
        finally:
            if not is_registered:
                self._forget_if_idle(rank)
        if prompts is None:
            return False
        if self._knows_caches:
            self._recency.record(rank, prompt.sequence_hashes, now)
        if expected is not NOTHING:
            alone_tokens = prefill_tokens if prompts == 1 else 0
            speed = self.latency_calibration.speed(rank, now)
            self._expected[key] = _Dispatched(now, expected, alone_tokens, speed)
        return True

    def _learn(self, dispatched: _Dispatched, now: float) -> None:
        """Learns from the first token of a dispatch."""
        measured_ms, expected = (now - dispatched.at) * 1e3, dispatched.expected
        if expected.forecast_ms is not None:
            self.latency_calibration.learn(measured_ms, expected.forecast_ms, dispatched.speed, now)
        if expected.computes and dispatched.alone_tokens:
            self.prefill_times.learn(measured_ms, dispatched.alone_tokens, now)
        if expected.load is not None:
            self.tier_loads.learn(measured_ms, expected.load, now)

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
        now = self.clock()
        if (dispatched := self._expected.pop(key, None)) is not None:
            self._learn(dispatched, now)
        return self._sequences.prefill_complete(key, now)

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
        now = self.clock()
        rank = self._sequences.free(key, now)
        if rank is None:
            return False
        dispatched = self._expected.pop(key, None)
        if prefilled and dispatched is not None:
            self._learn(dispatched, now)
        if rank not in self._registered:
            self._forget_if_idle(rank)
        return True

    def _forget_if_idle(self, rank: Rank) -> None:
        """Drops a rank without a registration unless it has bookings."""
        if not self._sequences.sequences(rank):
            self._sequences.remove_rank(rank)
