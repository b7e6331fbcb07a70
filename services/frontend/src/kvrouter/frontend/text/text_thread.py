"""Runs templates and tokenizers in threads, so that the event loop serves other requests meanwhile.

Short prompts have a thread of their own: a prompt of a megabyte, which takes a second, does not delay them. Whatever is
queued when the thread gets free is one turn of it, so that the cost of waking it is shared.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from kvrouter.runtime.errors import KvRouterError

_T = TypeVar("_T")

SHORT_CHARACTERS = 64 << 10
"""Maximum size of a prompt that the thread for short ones takes."""
_TURN_JOBS = 64


class TextThreads:
    """A thread for short prompts and one for long ones."""

    def __init__(self) -> None:
        self._short: _Lane[object] = _Lane("text-short")
        self._long: _Lane[object] = _Lane("text-long")

    async def run(self, job: Callable[[], _T], *, characters: int) -> _T:
        """Runs a job in the thread for its size, and returns its result or raises its error."""
        lane = self._short if characters <= SHORT_CHARACTERS else self._long
        return await lane.run(job)  # type: ignore[return-value]

    @property
    def queued(self) -> int:
        """Number of jobs that wait for a thread."""
        return self._short.queued + self._long.queued

    def close(self) -> None:
        """Ends the threads once their current turn is done. Queued jobs are dropped."""
        self._short.close()
        self._long.close()


class _Job(Generic[_T]):
    def __init__(self, run: Callable[[], _T], done: asyncio.Future[_T]) -> None:
        self.run = run
        self.done = done


class _Lane(Generic[_T]):
    """A thread and its queue."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._queue: deque[_Job[_T]] = deque()
        self._turn: asyncio.Future[None] | None = None

    @property
    def queued(self) -> int:
        """Number of jobs that wait."""
        return len(self._queue)

    async def run(self, job: Callable[[], _T]) -> _T:
        """Runs a job in the thread. A caller that is cancelled before its turn costs nothing."""
        done: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._queue.append(_Job(job, done))
        if self._turn is None:
            self._begin_turn()
        return await done

    def close(self) -> None:
        """Ends the thread after its current turn."""
        for job in self._queue:
            job.done.cancel()
        self._queue.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin_turn(self) -> None:
        jobs = [self._queue.popleft() for _ in range(min(_TURN_JOBS, len(self._queue)))]
        loop = asyncio.get_running_loop()
        self._turn = loop.run_in_executor(self._executor, _run_all, jobs, loop)
        self._turn.add_done_callback(self._end_turn)

    def _end_turn(self, turn: asyncio.Future[None]) -> None:
        self._turn = None
        if not turn.cancelled():
            turn.result()
        if self._queue:
            self._begin_turn()


def _run_all(jobs: list[_Job[_T]], loop: asyncio.AbstractEventLoop) -> None:
    for job in jobs:
        if job.done.cancelled():
            continue
        try:
            result = job.run()
        except Exception as error:
            settle, value = _fail, error.untraced() if isinstance(error, KvRouterError) else error
            loop.call_soon_threadsafe(settle, job.done, value)
        else:
            loop.call_soon_threadsafe(_succeed, job.done, result)


def _succeed(done: asyncio.Future[_T], result: _T) -> None:
    if not done.done():
        done.set_result(result)


def _fail(done: asyncio.Future[_T], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
