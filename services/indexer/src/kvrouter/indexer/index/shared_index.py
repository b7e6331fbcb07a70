"""A prefix index that several threads use: the request loop queries, one thread applies events, others do long work.

Queries and reads take the core's lock alone, and dumps, digests and statistics run beside them. Changes take a lock of
their own, which covers what is kept beside the index too. Whoever applies events holds it for one message at a time and
steps back for changes that wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar

from kvrouter.core.interface import PrefixIndex, Rank, RankInfo

_T = TypeVar("_T")

_STEP_BACK_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class IndexSize:
    """Size of the index and of its ranks at one moment."""

    blocks: int
    memory_bytes: int
    ranks: list[RankInfo]


class SharedIndex:
    """An index with the lock that orders its changes."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._changes = Lock()
        self._turn = asyncio.Lock()
        self._waiting_changes = 0

    @contextmanager
    def applying(self) -> Iterator[PrefixIndex]:
        """Gives the index to one thread, for the time of one message; not on the loop."""
        if self._waiting_changes:
            # The lock is not fair: without a pause the waiting thread seldom gets it.
            time.sleep(_STEP_BACK_SECONDS)
        with self._changes:
            yield self._index

    async def change(self, task: Callable[[PrefixIndex], _T]) -> _T:
        """Runs a task that may change the index, or what is kept beside it, in a thread; returns its result."""

        def locked() -> _T:
            with self._changes:
                return task(self._index)

        self._waiting_changes += 1
        try:
            # One at a time, or waiting changes would take all threads that reads need.
            async with self._turn:
                return await asyncio.to_thread(locked)
        finally:
            self._waiting_changes -= 1

    async def read(self, task: Callable[[PrefixIndex], _T]) -> _T:
        """Runs a task that only reads the index in a thread, beside queries and other reads; returns its result."""
        return await asyncio.to_thread(task, self._index)

    async def find_matches(self, local_hashes: bytes) -> bytes:
        """Returns the encoded FindMatchesResponse for a prompt: at once, unless the index is being changed."""
        answer = self._index.try_find_matches(local_hashes)
        return await asyncio.to_thread(self._index.find_matches, local_hashes) if answer is None else answer

    async def ranks(self) -> list[RankInfo]:
        """Returns the ranks of the index: cheaper than ``size``, whose cost may grow with the blocks."""
        return await self.read(lambda index: index.ranks())

    async def size(self) -> IndexSize:
        """Returns the size of the index and of its ranks."""

        def read(index: PrefixIndex) -> IndexSize:
            stats = index.stats()
            return IndexSize(stats.blocks, stats.memory_bytes, index.ranks())

        return await self.read(read)

    async def dump_rank(self, rank: Rank, chunk_blocks: int) -> AsyncIterator[bytes]:
        """Yields encoded RankState chunks of a rank as of this moment; none if it is unknown."""
        chunks = await self.read(lambda index: iter(index.dump_rank(rank, chunk_blocks)))
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            yield chunk

    async def cursor(self, rank: Rank) -> tuple[int, int] | None:
        """Returns (incarnation, next event id) of a rank; None if it is unknown."""
        return await self.read(lambda index: index.cursor(rank))
