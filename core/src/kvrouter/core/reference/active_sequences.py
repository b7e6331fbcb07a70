"""Accounts for the load of the requests in flight on each rank."""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from kvrouter.core.interface import LoadColumns, Rank
from kvrouter.core.interface.load import MEAN_BOOKINGS, MEAN_STEP
from kvrouter.core.reference.hashing import unpack

_Key = tuple[str, int, int]

_LARGEST = (1 << 63) - 1


@dataclass(slots=True)
class _Live:
    prompt_tokens: int
    shared: frozenset[int]
    """Sequence hashes of full blocks, which count once for all bookings of the rank."""
    prefill_tokens: int
    track_blocks: bool
    unique_blocks: bool
    sequences: int
    prefilled: bool = False
    output_tokens: int = 0


@dataclass(slots=True)
class _Load:
    live: dict[_Key, _Live] = field(default_factory=dict)
    shared: Counter[int] = field(default_factory=Counter)
    """Sequence hash → number of bookings with this block."""
    prompts: dict[_Key, int] = field(default_factory=dict)
    """Tokens of each prompt to compute, the oldest first."""
    since: float = 0.0
    """When the oldest was booked, or a prompt before or beside it ended."""
    peaks: tuple[int, int] = 0, 0
    """Most sequences between the last two calls of ``most_sequences``, and since the last."""

    def end_prompt(self, key: _Key, now: float) -> None:
        if self.prompts.pop(key, None) is not None:
            self.since = now


class ActiveSequences:
    """Implements ``kvrouter.core.interface.ActiveSequences``. Not thread-safe."""

    def __init__(self, block_size: int, max_bookings: int = 1 << 20, tombstones: int = 1 << 16) -> None:
        if block_size < 1:
            raise ValueError(f"expected a block size of 1 or more, received {block_size}")
        if max_bookings < 0 or tombstones < 0:
            raise ValueError(
                f"expected bounds of 0 or more, received {max_bookings} bookings and {tombstones} tombstones"
            )
        self._block_size = block_size
        self._max_bookings = max_bookings
        self._max_tombstones = tombstones
        self._loads: dict[Rank, _Load] = {}
        self._rank_of: dict[_Key, Rank] = {}
        self._freed: OrderedDict[_Key, None] = OrderedDict()
        self.seconds_in_flight = math.inf
        """Mean time from booking to end."""
        self._booked_seconds, self._ended, self._counted_until, self._until_mean = 0.0, 0.0, 0.0, MEAN_STEP

    def add_rank(self, rank: Rank) -> None:
        """Adds a rank without load."""
        self._loads.setdefault(rank, _Load())

    def remove_rank(self, rank: Rank) -> list[_Key]:
        """Removes a rank and frees its bookings."""
        load = self._loads.get(rank)
        keys = list(load.live) if load else []
        for key in keys:
            self._end(key, 0.0)
        self._loads.pop(rank, None)
        return keys

    def book(
        self,
        key: _Key,
        rank: Rank,
        sequence_hashes: bytes,
        prompt_tokens: int,
        prefill_tokens: int,
        track_blocks: bool = True,
        unique_blocks: bool = False,
        sequences: int = 1,
        now: float = 0.0,
    ) -> int | None:
        """Adds a booking."""
        places = unpack(sequence_hashes)
        if prompt_tokens < 0 or prefill_tokens < 0:
            raise ValueError(
                f"expected 0 or more tokens, received {prompt_tokens} prompt tokens and {prefill_tokens} prefill tokens"
            )
        if key in self._rank_of or key in self._freed:
            return None
        load = self._loads.get(rank)
        if load is None:
            raise KeyError(rank)
        if len(self._rank_of) >= self._max_bookings:
            raise OverflowError(f"expected at most {self._max_bookings} bookings, received one more")
        shared = frozenset(places) if track_blocks and not unique_blocks else frozenset()
        load.live[key] = _Live(prompt_tokens, shared, prefill_tokens, track_blocks, unique_blocks, sequences)
        load.shared.update(shared)
        if prefill_tokens:
            if not load.prompts:
                load.since = now
            load.prompts[key] = prefill_tokens
        self._count_until(now)
        self._rank_of[key] = rank
        load.peaks = load.peaks[0], max(load.peaks[1], self.sequences(rank))
        return len(load.prompts)

    def sequences(self, rank: Rank) -> int:
        """Returns the number of booked sequences of a rank."""
        load = self._loads.get(rank)
        return 0 if load is None else sum(live.sequences for live in load.live.values())

    def most_sequences(self, rank: Rank) -> int:
        """Returns the most booked sequences of a rank since the call before the last."""
        load, sequences = self._loads.get(rank, _Load()), self.sequences(rank)
        most = max(*load.peaks, sequences)
        load.peaks = load.peaks[1], sequences
        return most

    def rank(self, key: _Key) -> Rank | None:
        """Returns the rank of a live booking."""
        return self._rank_of.get(key)

    def prefill_complete(self, key: _Key, now: float = 0.0) -> bool:
        """Records the end of the prompt's computation."""
        live = self._live(key)
        if live is not None:
            live.prefilled = True
            self._loads[self._rank_of[key]].end_prompt(key, now)
        return live is not None

    def output_tokens(self, key: _Key, tokens: int) -> bool:
        """Sets the total number of generated tokens."""
        live = self._live(key)
        if live is not None:
            live.output_tokens = max(live.output_tokens, tokens)
        return live is not None

    def free(self, key: _Key, now: float = 0.0) -> Rank | None:
        """Frees a booking."""
        if key in self._rank_of:
            self._count_until(now)
            self._ended += 1
            self._until_mean -= 1
            if not self._until_mean:
                self._until_mean = MEAN_STEP
                self.seconds_in_flight = self._booked_seconds / self._ended
                if self._ended >= MEAN_BOOKINGS:
                    self._booked_seconds, self._ended = self._booked_seconds / 2, self._ended / 2
        return self._end(key, now)

    def _end(self, key: _Key, now: float) -> Rank | None:
        self._freed[key] = None
        self._freed.move_to_end(key)
        if len(self._freed) > self._max_tombstones:
            self._freed.popitem(last=False)
        rank = self._rank_of.pop(key, None)
        if rank is None:
            return None
        load = self._loads[rank]
        load.end_prompt(key, now)
        for place in load.live.pop(key).shared:
            load.shared[place] -= 1
            if not load.shared[place]:
                del load.shared[place]
        return rank

    def loads(self, sequence_hashes: bytes = b"", prompt_tokens: int = 0) -> LoadColumns:
        """Returns the load of every rank."""
        places = unpack(sequence_hashes)
        tail = self._blocks(prompt_tokens) - prompt_tokens // self._block_size
        rows, since = [], array("d")
        for rank, load in sorted(self._loads.items()):
            leading = next((depth for depth, place in enumerate(places) if place not in load.shared), len(places))
            private = sum(self._private_blocks(live) for live in load.live.values())
            active = len(load.shared) + private + len(places) - leading + tail
            prefill = sum(live.prefill_tokens for live in load.live.values() if not live.prefilled)
            head = next(iter(load.prompts.values()), 0)
            rows.append((active, prefill, self.sequences(rank), leading, head, len(load.prompts)))
            since.append(load.since if load.prompts else math.inf)
        packed = array("q", (min(row[column], _LARGEST) for column in range(6) for row in rows))
        return tuple(sorted(self._loads)), packed.tobytes() + since.tobytes()

    def __len__(self) -> int:
        """Returns the number of live bookings."""
        return len(self._rank_of)

    def _count_until(self, now: float) -> None:
        self._booked_seconds += len(self._rank_of) * (now - self._counted_until)
        self._counted_until = now

    def _live(self, key: _Key) -> _Live | None:
        rank = self._rank_of.get(key)
        return self._loads[rank].live[key] if rank is not None else None

    def _private_blocks(self, live: _Live) -> int:
        if not live.track_blocks:
            return 0
        shared_tokens = 0 if live.unique_blocks else live.prompt_tokens
        return self._blocks(live.prompt_tokens + live.output_tokens) - shared_tokens // self._block_size

    def _blocks(self, tokens: int) -> int:
        """Returns the number of blocks for the tokens; the last one may be partial."""
        return -(-tokens // self._block_size)
