"""Accounts for the load of the requests in flight on each rank."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from kvrouter.core.interface import BookingRequest, LoadColumns, Rank
from kvrouter.core.reference.hashing import unpack

_Key = tuple[str, int, int]

_LARGEST = (1 << 63) - 1


@dataclass(slots=True)
class _Live:
    booking: BookingRequest
    shared: frozenset[int]
    """Sequence hashes of full blocks, which count once for all bookings of the rank."""
    prefilled: bool = False
    output_tokens: int = 0


@dataclass(slots=True)
class _Load:
    live: dict[_Key, _Live] = field(default_factory=dict)
    shared: Counter[int] = field(default_factory=Counter)
    """Sequence hash → number of bookings with this block."""


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

    def add_rank(self, rank: Rank) -> None:
        """Adds a rank without load."""
        self._loads.setdefault(rank, _Load())

    def remove_rank(self, rank: Rank) -> list[_Key]:
        """Removes a rank and frees its bookings."""
        load = self._loads.get(rank)
        keys = list(load.live) if load else []
        for key in keys:
            self.free(key)
        self._loads.pop(rank, None)
        return keys

    def book(self, booking: BookingRequest) -> bool:
        """Adds a booking."""
        places = unpack(booking.sequence_hashes)
        if booking.prompt_tokens < 0 or booking.prefill_tokens < 0:
            raise ValueError(
                f"expected 0 or more tokens, received {booking.prompt_tokens} prompt tokens and"
                f" {booking.prefill_tokens} prefill tokens"
            )
        if booking.key in self._rank_of or booking.key in self._freed:
            return False
        load = self._loads.get(booking.rank)
        if load is None:
            raise KeyError(booking.rank)
        if len(self._rank_of) >= self._max_bookings:
            raise OverflowError(f"expected at most {self._max_bookings} bookings, received one more")
        shared = frozenset(places) if booking.track_blocks and not booking.unique_blocks else frozenset()
        load.live[booking.key] = _Live(booking, shared)
        load.shared.update(shared)
        self._rank_of[booking.key] = booking.rank
        return True

    def rank(self, key: _Key) -> Rank | None:
        """Returns the rank of a live booking."""
        return self._rank_of.get(key)

    def prefill_complete(self, key: _Key) -> bool:
        """Records the end of the prompt's computation."""
        live = self._live(key)
        if live is not None:
            live.prefilled = True
        return live is not None

    def output_tokens(self, key: _Key, tokens: int) -> bool:
        """Sets the total number of generated tokens."""
        live = self._live(key)
        if live is not None:
            live.output_tokens = max(live.output_tokens, tokens)
        return live is not None

    def free(self, key: _Key) -> bool:
        """Frees a booking."""
        self._freed[key] = None
        self._freed.move_to_end(key)
        if len(self._freed) > self._max_tombstones:
            self._freed.popitem(last=False)
        rank = self._rank_of.pop(key, None)
        if rank is None:
            return False
        load = self._loads[rank]
        for place in load.live.pop(key).shared:
            load.shared[place] -= 1
            if not load.shared[place]:
                del load.shared[place]
        return True

    def loads(self, sequence_hashes: bytes = b"", prompt_tokens: int = 0) -> LoadColumns:
        """Returns the load of every rank."""
        places = unpack(sequence_hashes)
        tail = self._blocks(prompt_tokens) - prompt_tokens // self._block_size
        rows = []
        for _, load in sorted(self._loads.items()):
            active = (
                len(load.shared)
                + sum(1 for place in set(places) if place not in load.shared)
                + sum(self._private_blocks(live) for live in load.live.values())
                + tail
            )
            prefill = sum(live.booking.prefill_tokens for live in load.live.values() if not live.prefilled)
            leading = next((depth for depth, place in enumerate(places) if place not in load.shared), len(places))
            rows.append((active, prefill, len(load.live), leading))
        packed = array("q", (min(row[column], _LARGEST) for column in range(4) for row in rows))
        return LoadColumns(tuple(sorted(self._loads)), memoryview(packed))

    def __len__(self) -> int:
        """Returns the number of live bookings."""
        return len(self._rank_of)

    def _live(self, key: _Key) -> _Live | None:
        rank = self._rank_of.get(key)
        return self._loads[rank].live[key] if rank is not None else None

    def _private_blocks(self, live: _Live) -> int:
        booking = live.booking
        if not booking.track_blocks:
            return 0
        shared_tokens = 0 if booking.unique_blocks else booking.prompt_tokens
        return self._blocks(booking.prompt_tokens + live.output_tokens) - shared_tokens // self._block_size

    def _blocks(self, tokens: int) -> int:
        """Returns the number of blocks for the tokens; the last one may be partial."""
        return -(-tokens // self._block_size)
