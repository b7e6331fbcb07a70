"""Index of predicted blocks, for components whose workers publish no events."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from kvrouter.core.interface import Rank
from kvrouter.core.reference.hashing import unpack


class _Use(NamedTuple):
    at: float
    """Time when a request with the block was last recorded, in seconds."""
    depth: int


class PredictedIndex:
    """Implements ``kvrouter.core.interface.PredictedIndex``. Not thread-safe."""

    def __init__(self, ttl_seconds: float = 120.0, max_blocks: int = 1 << 20, prune_ratio: float = 0.8) -> None:
        if not ttl_seconds > 0:
            raise ValueError(f"expected a time to live above 0 seconds, received {ttl_seconds}")
        if max_blocks < 1:
            raise ValueError(f"expected a bound of 1 or more blocks, received {max_blocks}")
        if not 0 <= prune_ratio <= 1:
            raise ValueError(f"expected a prune ratio from 0 to 1, received {prune_ratio}")
        self._ttl_seconds = ttl_seconds
        self._max_blocks = max_blocks
        self._pruned_blocks = int(prune_ratio * max_blocks)
        self._now = float("-inf")
        self._uses: OrderedDict[tuple[Rank, int], _Use] = OrderedDict()
        """(rank, place) → last use, the oldest first."""
        self._residents: dict[int, set[Rank]] = {}

    def record(self, rank: Rank, sequence_hashes: bytes, now: float) -> None:
        """Records a request with these blocks, sent to the rank."""
        places = unpack(sequence_hashes)
        self.expire(now)
        for depth, place in reversed(list(enumerate(places))):
            self._uses[rank, place] = _Use(self._now, depth)
            self._uses.move_to_end((rank, place))
            self._residents.setdefault(place, set()).add(rank)
        if len(self._uses) > self._max_blocks:
            by_age = sorted(self._uses, key=lambda key: (self._uses[key].at, -self._uses[key].depth))
            for key in by_age[: len(by_age) - self._pruned_blocks]:
                self._drop(key)

    def overlaps(self, sequence_hashes: bytes, now: float) -> dict[Rank, int]:
        """Returns the overlaps above 0 by rank, in blocks."""
        self._now = max(self._now, now)
        overlaps: dict[Rank, int] = {}
        for depth, place in enumerate(unpack(sequence_hashes)):
            residents = [
                rank
                for rank in self._residents.get(place, ())
                if overlaps.get(rank, 0) == depth and self._now - self._uses[rank, place].at < self._ttl_seconds
            ]
            if not residents:
                break
            overlaps.update((rank, depth + 1) for rank in residents)
        return overlaps

    def last_use(self, rank: Rank, sequence_hashes: bytes, now: float) -> float | None:
        """Returns when the last of these blocks was last recorded for a rank; None if it has not all of them."""
        overlap = self.overlaps(sequence_hashes, now).get(rank, 0)
        places = unpack(sequence_hashes)
        if not places or overlap < len(places):
            return None
        return self._uses[rank, places[-1]].at

    def forget_until(self, rank: Rank, at: float) -> int:
        """Drops a rank's entries that were last recorded at this time or before."""
        return self._drop_all(key for key, use in self._uses.items() if key[0] == rank and use.at <= at)

    def keep_newest(self, rank: Rank, blocks: int) -> int:
        """Drops the least recently used of a rank's entries until so many are left. Returns the number dropped."""
        return self._drop_all(
            islice((key for key in self._uses if key[0] == rank), max(0, self.blocks_of(rank) - blocks))
        )

    def blocks_of(self, rank: Rank) -> int:
        """Returns the number of a rank's entries, including expired ones not dropped yet."""
        return sum(key[0] == rank for key in self._uses)

    def remove_rank(self, rank: Rank) -> int:
        """Removes a rank."""
        return self._drop_all(key for key in self._uses if key[0] == rank)

    def _drop_all(self, dropped: Iterable[tuple[Rank, int]]) -> int:
        keys = list(dropped)
        for key in keys:
            self._drop(key)
        return len(keys)

    def expire(self, now: float) -> int:
        """Drops expired entries."""
        self._now = max(self._now, now)
        dropped = 0
        while self._uses:
            key, use = next(iter(self._uses.items()))
            if self._now - use.at < self._ttl_seconds:
                break
            self._drop(key)
            dropped += 1
        return dropped

    def __len__(self) -> int:
        """Returns the number of entries, including expired ones not dropped yet."""
        return len(self._uses)

    def _drop(self, key: tuple[Rank, int]) -> None:
        rank, place = key
        del self._uses[key]
        self._residents[place].remove(rank)
        if not self._residents[place]:
            del self._residents[place]
