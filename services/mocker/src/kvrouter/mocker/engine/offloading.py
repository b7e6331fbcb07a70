"""Tiers of the KV cache below device memory: host memory, and a storage that several engines share.

An engine copies each block to its tiers when the block becomes cached, as vLLM's offloading connector does, and evicts
the least recently used ones there. A use on the device counts as a use in every tier. A block that the device lacks is
loaded from the first tier that has it.

Shared storage has a part for each engine. An engine reads all parts, fills its own, and stores no block that another
one has stored.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvrouter.mocker.engine.block_pool import Block, BlockPool
from kvrouter.mocker.engine.types import CacheEvent, CacheTier, Removed, Scope, Stored

Parts = list[BlockPool]
"""The parts of a storage, one for each engine that fills it."""


class OffloadTier:
    """One tier of an engine."""

    def __init__(self, tier: CacheTier, num_blocks: int, parts: Parts) -> None:
        """Adds a part of `num_blocks` blocks to a storage."""
        self._tier = tier
        self._parts = parts
        self._own = BlockPool(num_blocks)
        parts.append(self._own)

    def has(self, parent: int, tokens: bytes) -> bool:
        """Returns whether the engine can load a block."""
        return self._find(parent, tokens) is not None

    def keep(
        self,
        chain: Sequence[int],
        pieces: Sequence[bytes],
        start: int,
        stop: int,
        scope: Scope,
        events: list[CacheEvent],
    ) -> None:
        """Copies blocks `start` to `stop` of a sequence to the tier, or uses them there once more."""
        used: list[tuple[BlockPool, Block]] = []
        missing: list[int] = []
        for i in range(start, stop):
            found = self._find(chain[i], pieces[i])
            if found is None:
                missing.append(i)
            else:
                found[0].hold([found[1]])
                used.append(found)
        own = self._own
        del missing[own.free :]
        if removed := own.take(len(missing)):
            events.append(Removed(array("Q", removed), self._tier))
        runs: list[list[int]] = []
        for i in missing:
            used += [(own, block) for block in own.store(chain, pieces, i, i + 1, scope)]
            if runs and runs[-1][-1] == i - 1:
                runs[-1].append(i)
            else:
                runs.append([i])
        for run in runs:
            first, end = run[0], run[-1] + 1
            parent = chain[first] if first else None
            events.append(
                Stored(parent, array("Q", chain[first + 1 : end + 1]), b"".join(pieces[first:end]), scope, self._tier)
            )
        for pool, block in reversed(used):  # the last ones are evicted first
            pool.release([block], 0)

    def clear(self) -> None:
        """Drops the blocks that the engine has stored."""
        self._own.clear()

    def leave(self) -> None:
        """Removes the engine's part from the storage."""
        self._parts.remove(self._own)

    def _find(self, parent: int, tokens: bytes) -> tuple[BlockPool, Block] | None:
        for pool in self._parts:
            if found := pool.find([parent], [tokens], 1):
                return pool, found[0]
        return None
