"""The blocks of a rank with their copies and digest, and changes of them with an undo."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from kvrouter.core.interface import InvalidEvent, Scope
from kvrouter.core.reference.hashing import SEED
from kvrouter.core.reference.rank_blocks import TIERS
from kvrouter.v1.common_pb2 import Tier
from xxhash import xxh3_64_intdigest

BASE_SCOPE = Scope()
"""Scope of blocks without adapter, salt and tenant."""

_U64 = (1 << 64) - 1
_pair = struct.Struct("<2Q").pack
_term = struct.Struct("<4Q").pack


class Block(NamedTuple):
    """A resident block."""

    parent: int | None
    """Engine hash of the parent block when this block was stored; None at the start of a sequence."""
    parent_place: int
    """Sequence hash of the parent block; 0 at the start of a sequence."""
    local_hash: int
    sequence_hash: int
    depth: int
    """Position in the sequence, from 0."""
    copies: tuple[int, ...]
    """Physical copies in each of ``TIERS``."""
    scope: Scope = BASE_SCOPE
    """Scope of its sequence, which its children inherit."""
    parts: int = 1
    """Number of blocks that its engine's block consists of; above 1, this is the last of them."""


def tier_index(tier: Tier) -> int:
    """Returns the place of a tier in ``TIERS``.

    Raises:
        InvalidEvent: the tier is unknown.
    """
    if not 1 <= tier <= len(TIERS):
        raise InvalidEvent(f"expected device, host, disk, shared or checkpoint as the tier, received {tier}")
    return tier - 1


def part_hashes(engine_hash: int, parts: int) -> list[int]:
    """Returns engine hashes for the blocks that an engine's larger block consists of; the last one has its own hash.

    So a child finds its parent, and equal blocks have equal parts.
    """
    derived = [xxh3_64_intdigest(_pair(engine_hash, number), SEED) for number in range(parts - 1)]
    return [*derived, engine_hash]


class _Undo(NamedTuple):
    """State for ``roll_back`` to restore."""

    digest: int
    copies: list[int]
    blocks: dict[int, Block | None]
    """The blocks before their first change; None for missing ones."""


class BlockTable:
    """Resident blocks by engine hash. Not thread-safe."""

    def __init__(self, *, counted: bool) -> None:
        """``counted`` says whether each copy is stored and removed by itself."""
        self.digest = 0
        """Sum of the digest terms of all blocks, as KvEventBatch.digest defines it."""
        self.copies = [0] * len(TIERS)
        """Physical copies of all blocks by tier."""
        self._counted = counted
        self._blocks: dict[int, Block] = {}
        self._undo: _Undo | None = None

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def get(self, engine_hash: int | None) -> Block | None:
        """Returns a resident block; None if there is none."""
        return None if engine_hash is None else self._blocks.get(engine_hash)

    def items(self) -> list[tuple[int, Block]]:
        """Returns (engine hash, block) of all blocks, as a copy."""
        return list(self._blocks.items())

    def store(self, engine_hash: int, block: Block, index: int) -> None:
        """Adds a copy of a block to a tier. A block at another place moves there with this copy alone."""
        held = self._blocks.get(engine_hash)
        if held is not None and held.sequence_hash == block.sequence_hash:
            copies = held.copies[index] + 1 if self._counted else 1
            self._set_copies(engine_hash, held, index, copies)
            return
        if held is not None:
            for at in range(len(TIERS)):
                held = self._set_copies(engine_hash, held, at, 0)
        self.add(engine_hash, block)

    def add(self, engine_hash: int, block: Block) -> None:
        """Adds a missing block, with all its copies."""
        self._put(engine_hash, block)
        for index, copies in enumerate(block.copies):
            if copies:
                self.copies[index] += copies
                self._count(engine_hash, block, index, copies, 1)

    def remove(self, engine_hash: int, index: int) -> bool:
        """Removes a copy, or all if they are not counted, from a tier. Returns whether there was one."""
        held = self._blocks.get(engine_hash)
        if held is None or not held.copies[index]:
            return False
        self._set_copies(engine_hash, held, index, held.copies[index] - 1 if self._counted else 0)
        return True

    def clear(self, index: int) -> None:
        """Removes all blocks from a tier."""
        for engine_hash, block in self.items():
            self._set_copies(engine_hash, block, index, 0)

    def clear_all(self) -> None:
        """Removes all blocks."""
        if self._undo is not None:
            for engine_hash, block in self._blocks.items():
                self._undo.blocks.setdefault(engine_hash, block)
        self._blocks = {}
        self.copies = [0] * len(TIERS)
        self.digest = 0

    def replace(self, engine_hash: int, block: Block) -> None:
        """Replaces a resident block's record, except for its copies and its place."""
        self._put(engine_hash, block)

    def begin(self) -> None:
        """Begins changes for ``commit`` or ``roll_back``."""
        self._undo = _Undo(self.digest, list(self.copies), {})

    def commit(self) -> None:
        """Ends changes, which stay."""
        self._undo = None

    def roll_back(self) -> None:
        """Undoes all changes since ``begin``."""
        if self._undo is None:
            return
        undo, self._undo = self._undo, None
        self.digest, self.copies = undo.digest, undo.copies
        for engine_hash, block in undo.blocks.items():
            self._put(engine_hash, block)

    def _put(self, engine_hash: int, block: Block | None) -> None:
        if self._undo is not None:
            self._undo.blocks.setdefault(engine_hash, self._blocks.get(engine_hash))
        if block is None:
            self._blocks.pop(engine_hash, None)
        else:
            self._blocks[engine_hash] = block

    def _set_copies(self, engine_hash: int, block: Block, index: int, copies: int) -> Block:
        before = block.copies[index]
        if before != copies:
            if before:
                self._count(engine_hash, block, index, before, -1)
            if copies:
                self._count(engine_hash, block, index, copies, 1)
            self.copies[index] += copies - before
            block = block._replace(copies=(*block.copies[:index], copies, *block.copies[index + 1 :]))
        self._put(engine_hash, block if any(block.copies) else None)
        return block

    def _count(self, engine_hash: int, block: Block, index: int, copies: int, sign: int) -> None:
        term = xxh3_64_intdigest(_term(engine_hash, block.sequence_hash, TIERS[index], copies), SEED)
        self.digest = (self.digest + sign * term) & _U64
