"""The paged KV cache: physical blocks, which of them hold what, and which goes next.

A block is *empty* (holds nothing reusable, used by nobody), *in use* (by one or more sequences; `Block` objects exist
only for those whose content is cached, the others are a count that their sequence keeps) or *idle* (cached content,
used by nobody). Empty and idle blocks are free. Empty ones are taken first, then idle ones, least recently used first.

Cached content is found by (hash of the parent block, the tokens themselves), so blocks that differ in a token, in what
comes before or in scope never match. Equal content may be held by several physical copies (two sequences that computed
it at the same time, or a last block that was computed again): each is stored and evicted on its own, as in vLLM, and
reuse takes the oldest.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from kvrouter.mocker.engine.types import CachedBlock, Scope
from xxhash import xxh3_64_intdigest

BlockKey = tuple[int, bytes]
"""(engine hash of the parent block, or the scope's root; tokens)"""


def root_hash(seed: int, scope: Scope) -> int:
    """The parent hash (u64) of first blocks: BLAKE2b-64 over the length-prefixed parts of the scope, keyed by seed."""
    digest = blake2b(digest_size=8, key=seed.to_bytes(8, "little"))
    for part in scope:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "little")


def engine_hash(parent: int, tokens: bytes) -> int:
    """The engine's own id of a block (u64): XXH3-64 of its tokens, seeded with the parent's."""
    return xxh3_64_intdigest(tokens, parent)


class Block:
    """A physical block whose content is cached."""

    __slots__ = ("engine_hash", "first", "key", "scope", "uses")

    def __init__(self, key: BlockKey, engine_hash: int, first: bool, scope: Scope) -> None:
        self.key = key
        self.engine_hash = engine_hash
        self.first = first
        self.scope = scope
        self.uses = 1


class BlockPool:
    """Who holds which blocks of one engine."""

    def __init__(self, num_blocks: int) -> None:
        self._total = num_blocks
        self._empty = num_blocks
        self._idle: OrderedDict[Block, None] = OrderedDict()
        self._cached: dict[BlockKey, Block] = {}
        self._copies: dict[BlockKey, list[Block]] = {}  # those beyond the first, oldest first

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return self._empty + len(self._idle)

    @property
    def active(self) -> int:
        """Blocks in use."""
        return self._total - self._empty - len(self._idle)

    @property
    def idle(self) -> int:
        """Blocks that hold cached content which nobody uses."""
        return len(self._idle)

    def find(self, chain: Sequence[int], pieces: Sequence[bytes], limit: int) -> list[Block]:
        """The cached blocks that a sequence starts with, at most `limit`; changes nothing.

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
        """Use cached blocks once more."""
        for block in blocks:
            if not block.uses:
                del self._idle[block]
            block.uses += 1

    def take(self, count: int) -> list[int]:
        """Take free blocks into use, without content; returns the engine hashes of the copies evicted, in order.

        The caller has seen that `free` is at least `count`.
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
        """Give blocks in use their content: blocks `start` to `stop` of a sequence become cached.

        `chain[i]` is the parent hash of block i and `chain[i + 1]` its own, `pieces[i]` its tokens.
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
        """End a sequence's use of its blocks: `blocks` in the order of the prompt, and `contentless` more.

        The tail becomes idle first, so it is evicted before what leads to it.
        """
        self._empty += contentless
        idle = self._idle
        for block in reversed(blocks):
            block.uses -= 1
            if not block.uses:
                idle[block] = None

    def clear(self) -> None:
        """Forget all content. Nothing may be in use."""
        if self.active:
            raise RuntimeError(f"{self.active} blocks are in use")
        self._idle.clear()
        self._cached.clear()
        self._copies.clear()
        self._empty = self._total

    def table(self) -> dict[int, CachedBlock]:
        """Engine hash → what is cached under it, in use or idle."""
        return {
            block.engine_hash: CachedBlock(
                None if block.first else key[0], key[1], block.scope, 1 + len(self._copies.get(key, ()))
            )
            for key, block in self._cached.items()
        }
