"""Finds the checkpoints of a rank of a hybrid model: the blocks at which a reusable prefix may end.

Engines keep the blocks of such a model in groups of layers. Groups of full attention need a whole prefix; their blocks
are those of the rank. A group with a sliding window needs the last blocks before the next token, one with a state
(Mamba) the very last one:

    run(block)   blocks in a row that the group holds up to this one; ``window`` if it is that many, or all of them
    checkpoint   run(block) = window in every such group

A block counts as held in whichever tier it is, since its tier in the groups of full attention says how it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.v1.common_pb2 import Tier


@dataclass(slots=True)
class _Held:
    """A block in a group."""

    parent: int | None
    """Engine hash of the block before it; None at the start of a sequence."""
    copies: int = 0
    run: int = 0


class _Group:
    """The blocks of a group of layers, by engine hash."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.blocks: dict[int, _Held] = {}
        self._children: dict[int, set[int]] = {}

    def suffices(self, block: int) -> bool:
        """Returns whether the group has all that its layers need of a prefix ending with a block."""
        held = self.blocks.get(block)
        return held is not None and held.run == self.window

    def store(self, block: int, parent: int | None) -> Iterator[int]:
        """Adds a copy. Yields the blocks with another run."""
        held = self.blocks.get(block)
        if held is None:
            held = self.blocks[block] = _Held(parent)
            if parent is not None:
                self._children.setdefault(parent, set()).add(block)
        held.copies += 1
        return self._count([block])

    def remove(self, block: int) -> Iterator[int]:
        """Removes a copy. Yields the blocks with another run."""
        held = self.blocks.get(block)
        if held is None or held.copies > 1:
            if held is not None:
                held.copies -= 1
            return
        del self.blocks[block]
        if held.parent is not None:
            siblings = self._children[held.parent]
            siblings.discard(block)
            if not siblings:
                del self._children[held.parent]
        yield block
        yield from self._count(self._children.get(block, ()))

    def _count(self, blocks: Iterable[int]) -> Iterator[int]:
        """Counts the runs of blocks and of those behind them. Yields the ones with another run."""
        pending = list(blocks)
        while pending:
            block = pending.pop()
            held = self.blocks[block]
            above = self.blocks.get(held.parent) if held.parent is not None else None
            run = self.window if held.parent is None else min(self.window, 1 + (above.run if above else 0))
            if run != held.run:
                held.run = run
                yield block
                pending += self._children.get(block, ())


class _Change(NamedTuple):
    """A change of a group."""

    group: _Group
    blocks: Sequence[int]
    is_stored: bool
    may_repeat: bool = False
    """Whether the engine may report the hits of a request instead of new copies."""


class Checkpoints:
    """Reports the checkpoints of one rank, from the blocks of its groups without full attention. Not thread-safe."""

    def __init__(self, rank: RankPublisher) -> None:
        self._rank = rank
        self._groups: dict[int, _Group] = {}
        self._changes: list[_Change] = []
        """Since ``settle``."""
        self._hits: set[int] = set()
        """Last blocks of the hits reported since ``settle``."""
        self._to_check: list[int] = []
        """Blocks whose checkpoints may end, because a further group appeared."""

    def window_of(self, group: int) -> int:
        """Returns the window of a group, in blocks; 0 if it is unknown."""
        return self._groups[group].window if group in self._groups else 0

    def stored(self, group: int, window: int, blocks: Sequence[int], *, may_repeat: bool) -> None:
        """Notes blocks stored in a group with a window of 1 or more blocks.

        Blocks that ``may_repeat`` hits are new unless ``repeated`` says so of the last one.
        """
        if group not in self._groups:
            self._to_check = [block for known in self._groups.values() for block in known.blocks]
            self._groups[group] = _Group(window)
        self._changes.append(_Change(self._groups[group], blocks, is_stored=True, may_repeat=may_repeat))

    def repeated(self, blocks: Sequence[int]) -> None:
        """Notes reported hits. Engines report them for every group, even of blocks that a group does not hold."""
        self._hits.update(blocks[-1:])

    def removed(self, group: int, blocks: Sequence[int]) -> None:
        """Notes blocks removed from a known group."""
        self._changes.append(_Change(self._groups[group], blocks, is_stored=False))

    def forget(self) -> None:
        """Forgets all blocks, because the rank did."""
        self._groups = {group: _Group(known.window) for group, known in self._groups.items()}
        self._changes, self._hits, self._to_check = [], set(), []

    def settle(self) -> None:
        """Reports the changes of checkpoints. Engines may report a block in any order of its groups until then."""
        if not self._changes:  # as with every model that has no such groups
            self._hits.clear()
            return
        changed = dict.fromkeys(self._to_check)
        for group, blocks, is_stored, may_repeat in self._changes:
            if may_repeat and not self._hits.isdisjoint(blocks[-1:]):
                continue
            for block in blocks:
                # Even with the same run: its rank may have it again, and a relay that resumed may not know it here.
                changed[block] = None
                if not is_stored:
                    changed.update(dict.fromkeys(group.remove(block)))
                elif path := self._rank.chunk(block, 2):
                    parent = path[0] if len(path) > 1 else None
                    # The window of a checkpoint from before a relay resumed is not known block by block.
                    if parent not in group.blocks and parent not in changed and self._is_checkpoint(parent):
                        parent = None
                    changed.update(dict.fromkeys(group.store(block, parent)))
        self._changes, self._hits, self._to_check = [], set(), []
        reusable = [block for block in changed if all(group.suffices(block) for group in self._groups.values())]
        if gained := [block for block in reusable if not self._is_checkpoint(block)]:
            self._rank.stored_in_tier(gained, tier=Tier.TIER_CHECKPOINT)
        if lost := [block for block in changed.keys() - reusable if self._is_checkpoint(block)]:
            self._rank.removed(lost, tier=Tier.TIER_CHECKPOINT)

    def _is_checkpoint(self, block: int | None) -> bool:
        return block is not None and self._rank.is_resident(block, tier=Tier.TIER_CHECKPOINT)
