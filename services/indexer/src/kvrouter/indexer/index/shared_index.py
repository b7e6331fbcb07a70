"""A prefix index that several threads use: the request loop asks, one thread applies events, others do what takes long.

Who applies holds the lock for one message at a time and steps back for those that wait. A question takes the lock where
it is free, which is nearly always, and otherwise waits for it in a thread: the loop never does.
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
    """The index with the lock that guards it."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._lock = Lock()
        self._pending = 0

    @contextmanager
    def applying(self) -> Iterator[PrefixIndex]:
        """The index to one thread, for the time of one message; not on the loop."""
        if self._pending:
            # The lock is not fair: without a pause the waiting thread seldom gets it.
            time.sleep(_STEP_BACK_SECONDS)
        with self._lock:
            yield self._index

    async def ask(self, question: Callable[[PrefixIndex], _T]) -> _T:
        """The answer to a question that is quick, such as an overlap."""
        if self._lock.acquire(blocking=False):
            try:
                return question(self._index)
            finally:
                self._lock.release()
        return await self.work(question)

    async def work(self, task: Callable[[PrefixIndex], _T]) -> _T:
        """The result of a task that may take long, such as figures of all ranks; it runs in a thread."""

        def locked() -> _T:
            with self._lock:
                return task(self._index)

        self._pending += 1
        try:
            return await asyncio.to_thread(locked)
        finally:
            self._pending -= 1

    async def ranks(self) -> list[RankInfo]:
        """The ranks of the index: cheaper than ``figures``, whose cost may grow with the blocks."""
        return await self.ask(lambda index: index.ranks())

    async def size(self) -> IndexSize:
        """Size of the index and of its ranks."""

        def read(index: PrefixIndex) -> IndexSize:
            stats = index.stats()
            return IndexSize(stats.blocks, stats.memory_bytes, index.ranks())

        return await self.work(read)

    async def dump_rank(self, rank: Rank, chunk_blocks: int) -> AsyncIterator[bytes]:
        """Encoded RankState chunks of a rank as of this moment; none if it is unknown."""
        chunks = await self.work(lambda index: iter(index.dump_rank(rank, chunk_blocks)))
        while (chunk := await self.work(lambda _: next(chunks, None))) is not None:
            yield chunk

    async def cursor(self, rank: Rank) -> tuple[int, int] | None:
        """(incarnation, next event id) of a rank; None if it is unknown."""
        return await self.ask(lambda index: index.cursor(rank))
