"""How recently the cached blocks of each rank were used, and how often idle blocks are used again."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrouter.core.interface import CachedRank, Rank
from kvrouter.core.reference.hashing import unpack

_BINS = 64
_FIRST_BIN_S = 1e-3
_COUNT_SECONDS = 5.0
_REFRESH_SECONDS = 1.0
_REFRESHED_AT_ONCE = 16
_HISTORY_CACHES = 4


@dataclass(slots=True)
class _Cache:
    incarnation: int
    total_blocks: int
    used: OrderedDict[int, float] = field(default_factory=OrderedDict)
    """Sampled block → time of its last use, least recently used first."""
    chance: float = 0.0
    refreshed_at: float = float("-inf")


class CacheRecency:
    """Implements ``kvrouter.core.interface.CacheRecency``. Not thread-safe."""

    def __init__(self, rank_sample: int = 1024, max_sample: int = 1 << 20, history_sample: int = 1 << 16) -> None:
        if min(rank_sample, max_sample, history_sample) < 1:
            raise ValueError(
                f"expected samples of 1 block or more, received {rank_sample}, {max_sample} and {history_sample}"
            )
        self._rank_sample = rank_sample
        self._max_sample = max_sample
        self._history_sample = history_sample
        self._now = float("-inf")
        self._caches: dict[Rank, _Cache] = {}
        self._shift = self._history_shift = 0
        self._history: OrderedDict[int, float] = OrderedDict()
        self._reused, self._forgotten = [0.0] * _BINS, [0.0] * _BINS
        self._forgotten_since_halving = 0
        self._idle = [0.0] * _BINS
        self._counted_at = float("-inf")
        self._next_refreshed = 0
        self._packed = b""

    def set_ranks(self, ranks: Sequence[CachedRank]) -> None:
        """Replaces the ranks."""
        before, self._caches = self._caches, {}
        for rank, incarnation, total_blocks in ranks:
            known = before.get(rank)
            self._caches[rank] = _Cache(incarnation, total_blocks)
            if known is not None and known.incarnation == incarnation:
                self._caches[rank].used = known.used
        total = sum(cache.total_blocks for cache in self._caches.values())
        known_ranks = sum(1 for cache in self._caches.values() if cache.total_blocks)
        most = min(self._rank_sample * known_ranks, self._max_sample)
        while total >> self._shift > most:
            self._shift += 1
        while _HISTORY_CACHES * total >> self._history_shift > self._history_sample:
            self._history_shift += 1
        for cache in self._caches.values():
            _keep(cache.used, self._shift, _sampled(cache.total_blocks, self._shift))
        _keep(self._history, self._history_shift, self._history_sample)
        self._next_refreshed = 0

    def record(self, rank: Rank, sequence_hashes: bytes, now: float) -> None:
        """Records the use of the blocks of a prompt on a rank."""
        self._now = max(self._now, now)
        cache = self._caches.get(rank)
        for block in reversed(unpack(sequence_hashes)):
            if cache is not None and cache.total_blocks and _is_sampled(block, self._shift):
                cache.used[block] = self._now
                cache.used.move_to_end(block)
                if len(cache.used) > _sampled(cache.total_blocks, self._shift):
                    cache.used.popitem(last=False)
            if _is_sampled(block, self._history_shift):
                self._use(block)

    def reuse_chance(self, now: float) -> bytes:
        """Returns the chance of reuse by rank."""
        self._now = max(self._now, now)
        if self._now >= self._counted_at + _COUNT_SECONDS:
            self._counted_at = self._now
            self._idle = [0.0] * _BINS
            for used_at in self._history.values():
                self._idle[_bin(self._now - used_at)] += 1
        self._refresh(list(self._caches.values()))
        packed = struct.pack(f"={len(self._caches)}d", *(cache.chance for cache in self._caches.values()))
        if packed != self._packed:
            self._packed = packed
        return self._packed

    def __len__(self) -> int:
        """Returns the number of sampled blocks, over all ranks and the history."""
        return sum(len(cache.used) for cache in self._caches.values()) + len(self._history)

    def _refresh(self, caches: Sequence[_Cache]) -> None:
        chances = self._chances()
        for _ in range(min(len(caches), _REFRESHED_AT_ONCE)):
            cache = caches[self._next_refreshed]
            if self._now < cache.refreshed_at + _REFRESH_SECONDS:
                break
            cache.refreshed_at = self._now
            idle = [self._now - used_at for used_at in cache.used.values()]
            size = max(1, _sampled(cache.total_blocks, self._shift))
            cache.chance = sum(_interpolated(chances, seconds) for seconds in idle) / size
            self._next_refreshed = (self._next_refreshed + 1) % len(caches)

    def _use(self, block: int) -> None:
        before = self._history.pop(block, None)
        self._history[block] = self._now
        if before is not None:
            self._reused[_bin(self._now - before)] += 1
        elif len(self._history) > self._history_sample:
            _, used_at = self._history.popitem(last=False)
            self._forgotten[_bin(self._now - used_at)] += 1
            self._forgotten_since_halving += 1
            if self._forgotten_since_halving >= self._history_sample:
                self._forgotten_since_halving = 0
                self._reused = [count / 2 for count in self._reused]
                self._forgotten = [count / 2 for count in self._forgotten]

    def _chances(self) -> list[float]:
        """Returns the chance of reuse by bin of idle time, and 0 for the end."""
        chances = [0.0] * (_BINS + 1)
        reused = unused = 0.0
        for number in reversed(range(_BINS)):
            reused += self._reused[number]
            unused += self._forgotten[number] + self._idle[number]
            chances[number] = reused / (reused + unused + 1)
        return chances


def _keep(used: OrderedDict[int, float], shift: int, most: int) -> None:
    for block in [block for block in used if not _is_sampled(block, shift)]:
        del used[block]
    while len(used) > most:
        used.popitem(last=False)


def _is_sampled(block: int, shift: int) -> bool:
    return not block & ((1 << shift) - 1)


def _sampled(blocks: int, shift: int) -> int:
    """Returns the number of sampled blocks in a cache of so many blocks."""
    return max(1, blocks >> shift) if blocks else 0


def _position(seconds: float) -> float:
    """Returns the position of an idle time among the bins of half an octave."""
    return min(max(2 * math.log2(seconds / _FIRST_BIN_S), 0.0), _BINS - 1) if seconds > _FIRST_BIN_S else 0.0


def _bin(seconds: float) -> int:
    return int(_position(seconds))


def _interpolated(chances: Sequence[float], seconds: float) -> float:
    position = _position(seconds)
    number = int(position)
    return chances[number] + (position - number) * (chances[number + 1] - chances[number])
