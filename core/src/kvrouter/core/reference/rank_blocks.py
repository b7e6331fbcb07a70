"""The resident blocks of one rank: engine hash → place and copies in each tier."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvrouter.core.reference.hashing import SEED, chain
from kvrouter.v1.common_pb2 import Tier
from xxhash import xxh3_64_intdigest

PLACES: tuple[Tier, ...] = (Tier.TIER_DEVICE, Tier.TIER_HOST, Tier.TIER_DISK, Tier.TIER_SHARED)
"""In order of speed, the fastest first; their numbers are consecutive from 1."""

TIERS = (*PLACES, Tier.TIER_CHECKPOINT)
NO_COPIES = (0, 0, 0, 0, 0)


class Block(NamedTuple):
    """A block of a rank. Its place is ``sequence_hash``."""

    sequence_hash: int
    local_hash: int
    parent_sequence_hash: int | None
    """Place of its parent; None at the start of a sequence, or if a dump does not contain it."""
    depth: int
    """Position in its sequence, from 0."""
    copies: tuple[int, ...] = NO_COPIES
    """Number of copies in each of ``TIERS``."""


class RankBlocks:
    """Blocks by engine hash and by place. Every block has a copy in some tier."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._at: dict[int, set[int]] = {}
        self._digest: int | None = 0
        self.entries = 0
        """Number of (engine hash, tier) pairs."""
        self._checkpoints = 0

    def __len__(self) -> int:
        """Returns the number of engine hashes."""
        return len(self._blocks)

    def get(self, engine_hash: int) -> Block | None:
        """Returns the block of an engine hash; None if it is not resident."""
        return self._blocks.get(engine_hash)

    def items(self) -> list[tuple[int, Block]]:
        """Returns a copy of all blocks."""
        return list(self._blocks.items())

    def places(self) -> Iterable[int]:
        """Returns the places of all resident blocks."""
        return self._at.keys()

    def store(
        self, parent: Block | None, engine_hashes: Sequence[int], local_hashes: Sequence[int], tier: Tier, counted: bool
    ) -> None:
        """Stores a chain of blocks below ``parent``, or at the start of a sequence."""
        above, depth = (parent.sequence_hash, parent.depth + 1) if parent else (None, 0)
        places = chain(above, local_hashes)
        for offset, (engine_hash, local, place) in enumerate(zip(engine_hashes, local_hashes, places, strict=True)):
            resident = self._blocks.get(engine_hash)
            there = resident.copies if resident is not None and resident.sequence_hash == place else NO_COPIES
            block = Block(place, local, above, depth + offset, there)
            copies = block.copies[tier - 1] + 1 if counted else 1
            self.put(engine_hash, _with_copies(block, tier, copies))
            above = place

    def remove(self, engine_hash: int, tier: Tier, counted: bool) -> bool:
        """Removes one copy if copies are counted, otherwise all. Returns whether there was one."""
        block = self._blocks.get(engine_hash)
        if block is None or not block.copies[tier - 1]:
            return False
        self.put(engine_hash, _with_copies(block, tier, block.copies[tier - 1] - 1 if counted else 0))
        return True

    def release(self, engine_hashes: Iterable[int]) -> None:
        """Removes all copies of these blocks, in every tier."""
        for engine_hash in engine_hashes:
            for tier in TIERS:
                self.remove(engine_hash, tier, counted=False)

    def clear(self, tier: Tier) -> None:
        """Removes all copies in the tier, or in every tier for TIER_UNSPECIFIED."""
        for engine_hash, block in self.items():
            kept = NO_COPIES if tier == Tier.TIER_UNSPECIFIED else _with_copies(block, tier, 0).copies
            self.put(engine_hash, block._replace(copies=kept))

    def put(self, engine_hash: int, block: Block) -> None:
        """Sets the block of an engine hash. A block without copies is dropped."""
        before = self._blocks.pop(engine_hash, None)
        if before is not None:
            self.entries -= _tiers_of(before)
            self._checkpoints -= before.copies[-1] > 0
            self._at[before.sequence_hash].remove(engine_hash)
            if not self._at[before.sequence_hash]:
                del self._at[before.sequence_hash]
        if any(block.copies):
            self._blocks[engine_hash] = block
            self._at.setdefault(block.sequence_hash, set()).add(engine_hash)
            self.entries += _tiers_of(block)
            self._checkpoints += block.copies[-1] > 0
        self._digest = None

    def overlaps(self, places: Sequence[int]) -> list[int]:
        """Returns for each of ``PLACES`` the number of leading places resident in it or a faster tier.

        With checkpoints, the last of these places that is one ends them.
        """
        overlaps = [0] * len(PLACES)
        slowest = 1
        for fastest in self._fastest_tiers(places):
            slowest = max(slowest, fastest)
            for tier in PLACES[slowest - 1 :]:
                overlaps[tier - 1] += 1
        if not self._checkpoints:
            return overlaps
        return [self._last_checkpoint(places[:overlap]) for overlap in overlaps]

    def is_in(self, tier: Tier, place: int) -> bool:
        """Returns whether a place is resident in a tier."""
        return any(self._blocks[one].copies[tier - 1] for one in self._at.get(place, ()))

    def _last_checkpoint(self, places: Sequence[int]) -> int:
        """Returns the number of places up to the last one that is a checkpoint."""
        until = range(len(places), 0, -1)
        return next((end for end in until if self.is_in(Tier.TIER_CHECKPOINT, places[end - 1])), 0)

    def digest(self) -> int:
        """Returns the digest of all entries, defined at KvEventBatch.digest."""
        if self._digest is None:
            self._digest = digest_of(self._blocks.items())
        return self._digest

    def _fastest_tiers(self, places: Iterable[int]) -> Iterator[int]:
        """Yields the fastest tier of each place, up to the first missing place."""
        for place in places:
            fastest = next((tier for tier in PLACES if self.is_in(tier, place)), None)
            if fastest is None:
                return
            yield fastest


def digest_of(blocks: Iterable[tuple[int, Block]]) -> int:
    """Returns the digest of (engine hash, block) pairs."""
    total = 0
    for engine_hash, block in blocks:
        for tier, copies in zip(TIERS, block.copies, strict=True):
            if copies:
                total += xxh3_64_intdigest(struct.pack("<4Q", engine_hash, block.sequence_hash, tier, copies), SEED)
    return total & ((1 << 64) - 1)


def _with_copies(block: Block, tier: Tier, copies: int) -> Block:
    return block._replace(copies=(*block.copies[: tier - 1], copies, *block.copies[tier:]))


def _tiers_of(block: Block) -> int:
    return sum(1 for copies in block.copies if copies)
