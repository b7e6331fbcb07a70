"""The paged KV cache: physical blocks, their content, and the order of eviction.

A block is *empty* (no reusable content, not in use), *in use* (by one or more sequences) or *idle* (cached content, not
in use). Empty and idle blocks are free. Empty blocks are taken first, then idle ones, least recently used first.
`Block` objects exist only for cached content; sequences count their other blocks.

Cached content is found by the hash of the parent block and the tokens themselves, so that blocks with different tokens,
prefix or scope never match. Equal content may have several physical copies, when two sequences computed it at the same
time or when a last block was computed again. As in vLLM, each copy is stored and evicted on its own, and the oldest one
is reused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from kvrouter.mocker.engine.types import CachedBlock, Scope
from xxhash import xxh3_64_intdigest

BlockKey = tuple[int, bytes]
"""(engine hash of the parent block or root hash of the scope, tokens)."""


def root_hash(seed: int, scope: Scope) -> int:
    """Returns the parent hash (u64) of first blocks: BLAKE2b-64 of the scope's length-prefixed parts, keyed by seed."""
    digest = blake2b(digest_size=8, key=seed.to_bytes(8, "little"))
    for part in scope:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "little")


def engine_hash(parent: int, tokens: bytes) -> int:
    """Returns the engine hash of a block (u64): XXH3-64 of its tokens, seeded with the parent's hash."""
    return xxh3_64_intdigest(tokens, parent)


class Block:
    """A physical block with cached content."""

    __slots__ = ("engine_hash", "first", "key", "scope", "uses")

    def __init__(self, key: BlockKey, engine_hash: int, first: bool, scope: Scope) -> None:
        self.key = key
        self.engine_hash = engine_hash
        self.first = first
        self.scope = scope
        self.uses = 1


class BlockPool:
    """The blocks of one engine."""

    def __init__(self, num_blocks: int) -> None:
        self._total = num_blocks
        self._empty = num_blocks
        self._idle: OrderedDict[Block, None] = OrderedDict()
        self._cached: dict[BlockKey, Block] = {}
        self._copies: dict[BlockKey, list[Block]] = {}  # all but the oldest of each content, oldest first

    @property
    def free(self) -> int:
        """Number of blocks that can be taken."""
        return self._empty + len(self._idle)

    @property
    def active(self) -> int:
        """Number of blocks in use."""
        return self._total - self._empty - len(self._idle)

    @property
    def idle(self) -> int:
        """Number of blocks with cached content that are not in use."""
        return len(self._idle)

    def find(self, chain: Sequence[int], pieces: Sequence[bytes], limit: int) -> list[Block]:
        """Returns the cached blocks that a sequence starts with, at most `limit`. Changes nothing.

        `chain[i]` is the parent hash of block i, `pieces[i]` its tokens.
        """
        found: list[Block] = []
        cached = self._cached
        for parent, tokens in zip(chain[:limit], pieces[:limit], strict=False):
            block = cached.get((parent, tokens))
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Sequence[Block]) -> None:
        """Uses cached blocks once more."""
        for block in blocks:
            if not block.uses:
                del self._idle[block]
            block.uses += 1

    def take(self, count: int) -> list[int]:
        """Takes free blocks into use, without content. Returns the engine hashes of evicted copies, in order.

        The caller has checked that `free` is at least `count`.
        """
        evict = count - self._empty
        if evict <= 0:
            self._empty -= count
            return []
        self._empty = 0
        pop = self._idle.popitem
        cached, copies = self._cached, self._copies
        removed: list[int] = []
        for _ in range(evict):
            block = pop(last=False)[0]
            removed.append(block.engine_hash)
            key = block.key
            if copies and key in copies:
                self._drop_copy(block)
            else:
                del cached[key]
        return removed

    def _drop_copy(self, block: Block) -> None:
        others = self._copies[block.key]
        if self._cached[block.key] is block:
            self._cached[block.key] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self._copies[block.key]

    def store(self, chain: Sequence[int], pieces: Sequence[bytes], start: int, stop: int, scope: Scope) -> list[Block]:
        """Makes blocks `start` to `stop` of a sequence, which are in use, cached. Returns them.

        `chain[i]` is the parent hash of block i, `chain[i + 1]` its own hash, `pieces[i]` its tokens.
        """
        cached = self._cached
        blocks: list[Block] = []
        for i in range(start, stop):
            key = (chain[i], pieces[i])
            block = Block(key, chain[i + 1], i == 0, scope)
            if cached.setdefault(key, block) is not block:
                self._copies.setdefault(key, []).append(block)
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[Block], contentless: int) -> None:
        """Ends a sequence's use of its blocks: `blocks` in the order of the prompt, and `contentless` further ones.

        The last block becomes idle first, so that it is evicted before its ancestors.
        """
        self._empty += contentless
        idle = self._idle
        for block in reversed(blocks):
            block.uses -= 1
            if not block.uses:
                idle[block] = None

    def clear(self) -> None:
        """Drops all content. No block may be in use."""
        if self.active:
            raise RuntimeError(f"expected no block in use, found {self.active}")
        self._idle.clear()
        self._cached.clear()
        self._copies.clear()
        self._empty = self._total

    def table(self) -> dict[int, CachedBlock]:
        """Returns engine hash → cached block, in use or idle."""
        return {
            block.engine_hash: CachedBlock(
                None if block.first else key[0], key[1], block.scope, 1 + len(self._copies.get(key, ()))
            )
            for key, block in self._cached.items()
        }
