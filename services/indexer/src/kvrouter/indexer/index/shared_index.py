"""A prefix index shared by threads: the event loop queries it, one thread applies events, others do long work.

Queries and reads take only the core's own lock; dumps, digests and statistics run concurrently with them. Changes also
take a lock of this class, which protects the data beside the index too. The applying thread takes it for one
message at a time, and yields to waiting changes. A few small events are applied on the event loop if both locks are
free, since handing them to a thread costs more than applying them.
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
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.errors import DeadlineExceeded

_T = TypeVar("_T")

_STEP_BACK_SECONDS = 0.0005
_NEVER = Deadline.never()


@dataclass(frozen=True, slots=True)
class IndexSize:
    """Size of the index and its ranks at one moment."""

    blocks: int
    memory_bytes: int
    ranks: list[RankInfo]


class SharedIndex:
    """A prefix index with a lock for its changes."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._changes = Lock()
        self._turn = asyncio.Lock()
        self._waiting_changes = 0

    @contextmanager
    def applying(self) -> Iterator[PrefixIndex]:
        """Yields the index under the lock for changes, for one message. Blocks, so it is not for the event loop."""
        if self._waiting_changes:
            # The lock is not fair: without a pause a waiting thread rarely gets it.
            time.sleep(_STEP_BACK_SECONDS)
        with self._changes:
            yield self._index

    def begin_at_once(self) -> PrefixIndex | None:
        """Takes the lock for changes, and returns the index; None if the lock is taken. For the event loop.

        ``end`` must follow if it returns the index.
        """
        if self._waiting_changes or not self._changes.acquire(False):
            return None
        return self._index

    def end(self) -> None:
        """Releases the lock that ``begin_at_once`` took."""
        self._changes.release()

    async def change(self, task: Callable[[PrefixIndex], _T], *, at_once: bool = False) -> _T:
        """Runs a change of the index or the data beside it. Returns its result.

        It runs in a thread; if it is short (``at_once``) and the lock is free, on the event loop.
        """
        if at_once and (index := self.begin_at_once()) is not None:
            try:
                return task(index)
            finally:
                self.end()

        def locked() -> _T:
            with self._changes:
                return task(self._index)

        self._waiting_changes += 1
        try:
            # One at a time: otherwise waiting changes would occupy all threads that reads need.
            async with self._turn:
                return await asyncio.to_thread(locked)
        finally:
            self._waiting_changes -= 1

    async def read(self, task: Callable[[PrefixIndex], _T]) -> _T:
        """Runs a read of the index in a thread, concurrently with other reads. Returns its result."""
        return await asyncio.to_thread(task, self._index)

    def try_find_matches(self, local_hashes: bytes) -> bytes | None:
        """Returns what ``find_matches`` does; None while the index is being changed."""
        return self._index.try_find_matches(local_hashes)

    async def find_matches(self, local_hashes: bytes, deadline: Deadline = _NEVER) -> bytes:
        """Returns the encoded FindMatchesResponse for a prompt; uses a thread only while the index is being changed.

        Args:
            local_hashes: Packed: one little-endian u64 per block.
            deadline: Limits the wait for the thread.

        Raises:
            DeadlineExceeded: the thread had no answer in time.
        """
        answer = self.try_find_matches(local_hashes)
        if answer is not None:
            return answer
        try:
            async with asyncio.timeout(deadline.remaining()):
                return await asyncio.to_thread(self._index.find_matches, local_hashes)
        except TimeoutError:
            raise DeadlineExceeded from None

    async def ranks(self) -> list[RankInfo]:
        """Returns the ranks of the index. Cheaper than ``size``, whose cost may grow with the number of blocks."""
        return await self.read(lambda index: index.ranks())

    async def size(self) -> IndexSize:
        """Returns the size of the index and its ranks."""

        def read(index: PrefixIndex) -> IndexSize:
            stats = index.stats()
            return IndexSize(stats.blocks, stats.memory_bytes, index.ranks())

        return await self.read(read)

    async def dump_rank(self, rank: Rank, chunk_blocks: int) -> AsyncIterator[bytes]:
        """Yields a rank's present state as encoded RankState chunks of ``chunk_blocks`` blocks; none if unknown."""
        chunks = await self.read(lambda index: index.dump_rank(rank, chunk_blocks))
        # The chunks are encoded already. To copy one costs less than to ask a thread for it.
        for chunk in chunks:
            yield chunk
            await asyncio.sleep(0)

    async def cursor(self, rank: Rank) -> tuple[int, int] | None:
        """Returns (incarnation, next event id) of a rank; None if it is unknown."""
        return await self.read(lambda index: index.cursor(rank))
