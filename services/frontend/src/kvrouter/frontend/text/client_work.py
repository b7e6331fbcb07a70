"""Runs the work clients cause in threads and in slices, so the event loop and other clients continue.

Bodies, short texts and long texts have a thread each: a prompt of a megabyte, which takes a second, does not delay
short ones. In each, owners take turns of a slice, in proportion to their weights. Short jobs share a turn, and so the
cost of waking the thread. The owner is next that has received least:

    received += work of a slice / weight of the owner        when a job of it takes a turn

An owner beginning to wait counts as having received as much as the one that has received least, so it gains nothing
from having been idle. The jobs of one owner run one after the other.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Generator, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from kvrouter.runtime.bounds import FairBound, bounds_of
from kvrouter.v1.errors import KvRouterError, Overloaded, RateLimited
from prometheus_client import CollectorRegistry, Counter

J = TypeVar("J", bound=Hashable)


class Owner(NamedTuple):
    """For whom a job runs."""

    name: str = ""
    """Tenant, or key of a caller without one; empty if nobody was authenticated."""
    weight: float = 1.0
    """Its share, relative to others'."""
    cache_tenant: str = ""
    """Tenant whose caches are isolated; empty if it shares them with other tenants."""


@dataclass(slots=True)
class _Share(Generic[J]):
    received: float
    waiting: dict[J, None] = field(default_factory=dict)
    begun: deque[J] = field(default_factory=deque)
    """Jobs that have had a turn and need another."""
    running: int = 0


class FairTurns(Generic[J]):
    """The jobs waiting. It knows neither threads nor time."""

    def __init__(self) -> None:
        """Starts empty."""
        self._shares: dict[str, _Share[J]] = {}
        self._waiting = 0

    def __len__(self) -> int:
        """Returns the number of jobs waiting."""
        return self._waiting

    def add(self, owner: Owner, job: J) -> None:
        """Adds a job behind its owner's others."""
        share = self._shares.get(owner.name)
        if share is None:
            received = min((each.received for each in self._shares.values()), default=0.0)
            share = self._shares[owner.name] = _Share(received)
        share.waiting[job] = None
        self._waiting += 1

    def remove(self, owner: Owner, job: J) -> None:
        """Removes a job if it waits."""
        share = self._shares.get(owner.name)
        if share is None:
            return
        if job in share.waiting:
            del share.waiting[job]
        elif job in share.begun:
            share.begun.remove(job)
        else:
            return
        self._waiting -= 1
        self._forget_idle(owner.name)

    def take(self) -> J | None:
        """Returns the job whose turn it is; None if none waits. ``charge`` and ``end`` must follow."""
        ready = [share for share in self._shares.values() if share.begun or share.waiting]
        if not ready:
            return None
        share = min(ready, key=lambda each: each.received)
        job = share.begun.popleft() if share.begun else next(iter(share.waiting))
        share.waiting.pop(job, None)
        share.running += 1
        self._waiting -= 1
        return job

    def charge(self, owner: Owner, work: int) -> None:
        """Counts the work of a turn an owner's job takes."""
        self._shares[owner.name].received += work / owner.weight

    def end(self, owner: Owner, job: J, *, again: bool) -> None:
        """Ends a job's turn; with ``again`` the job waits for another one, before its owner's other jobs."""
        share = self._shares[owner.name]
        share.running -= 1
        if again:
            share.begun.append(job)
            self._waiting += 1
        else:
            self._forget_idle(owner.name)

    def _forget_idle(self, name: str) -> None:
        share = self._shares[name]
        if not (share.waiting or share.begun or share.running):
            del self._shares[name]


_T = TypeVar("_T")

Slices: TypeAlias = Generator[None, None, _T]
"""A job that yields after each slice of about ``SLICE`` bytes or characters, and returns its result."""

SLICE = 16 << 10
"""Bytes or characters of a slice. Tokenizing one takes 10 to 30 ms if none of its words is known."""
MAX_WORK = 256 << 20
"""Bytes and characters of all waiting and running jobs of a process."""
MAX_OWNER_WORK = 64 << 20
"""The same for the jobs of one authenticated owner."""
LONG_BODY_BYTES = 64 << 10
"""Maximum size of a body parsed on the event loop: about 0.3 ms of work."""
_JOB_WORK = 4 << 10
"""Size of a job besides its text, so the number of jobs is bounded too."""
_TURN_JOBS = 64
_GIL_SECONDS = 0.0005
"""Time for which a thread may keep the GIL from the event loop, which needs it several times for a request; by default
5 ms."""
_RETRY_MS = 1000


class Lane(StrEnum):
    """Purpose of a thread."""

    BODIES = "bodies"
    SHORT_TEXTS = "short_texts"
    LONG_TEXTS = "long_texts"


class ClientWork:
    """The threads of one process."""

    def __init__(self, registry: CollectorRegistry, owner: Callable[[], Owner] = Owner) -> None:
        """Starts no thread yet.

        Args:
            registry: Registry for the metrics.
            owner: Returns the owner of the current task's jobs.
        """
        self.owner = owner
        slices = Counter(
            "kvrouter_frontend_client_work_slices",
            "Slices of parsing, rendering and tokenizing that ran, by thread: bodies, short_texts or long_texts.",
            ["thread"],
            registry=registry,
        )
        sys.setswitchinterval(_GIL_SECONDS)
        self._lanes = {lane: _Lane(lane, slices.labels(thread=lane)) for lane in Lane}
        self._work = FairBound(MAX_WORK)
        self._by_owner: dict[str, int] = {}
        bounds = bounds_of(registry)
        bounds.add("client_work_bytes", lambda: self._work.used, MAX_WORK)
        bounds.add("client_work_owner_bytes", lambda: max(self._by_owner.values(), default=0), MAX_OWNER_WORK)

    async def run(self, job: Callable[[], _T], lane: Lane, *, size: int) -> _T:
        """Runs a job as one slice, and returns its result or raises its error; see ``run_slices``."""
        return await self.run_slices(_one_slice(job), lane, size=size)

    async def read(self, parse: Callable[[bytes | bytearray], _T], body: bytes | bytearray) -> _T:
        """Parses a body: a short one at once, a long one in the thread of bodies.

        A parser of long prompts releases the GIL between the pieces of a prompt.
        """
        size = len(body)
        return parse(body) if size <= LONG_BODY_BYTES else await self.run(partial(parse, body), Lane.BODIES, size=size)

    async def run_slices(self, slices: Slices[_T], lane: Lane, *, size: int) -> _T:
        """Runs a job in a thread, and returns its result or raises its error.

        A caller cancelled before its turn costs nothing.

        Args:
            slices: The job.
            lane: Its thread.
            size: Bytes or characters of its input.

        Raises:
            RateLimited: the owner's jobs are too large in sum.
            Overloaded: the jobs of all owners are.
        """
        owner = self.owner()
        work = size + _JOB_WORK
        self._admit(owner, work)
        try:
            return await self._lanes[lane].run(_Job(slices, owner, work))  # type: ignore[no-any-return]
        finally:
            self._work.remove(owner.name, work)
            left = self._by_owner[owner.name] - work
            if left:
                self._by_owner[owner.name] = left
            else:
                del self._by_owner[owner.name]

    def close(self) -> None:
        """Ends the threads once their current turn is done. Queued jobs are dropped."""
        for lane in self._lanes.values():
            lane.close()

    def _admit(self, owner: Owner, work: int) -> None:
        own = self._by_owner.get(owner.name, 0)
        if owner.name and own and own + work > MAX_OWNER_WORK:
            raise RateLimited("too much text of this caller's tenant waits to be read and tokenized", _RETRY_MS)
        if not self._work.try_add(owner.name, owner.weight, work):
            raise Overloaded("this Frontend has too much text to read and tokenize", _RETRY_MS)
        self._by_owner[owner.name] = own + work


class _Job(Generic[_T]):
    __slots__ = ("done", "left", "owner", "slices")

    def __init__(self, slices: Slices[_T], owner: Owner, work: int) -> None:
        self.slices = slices
        self.owner = owner
        self.left = work
        self.done: asyncio.Future[_T] = asyncio.get_running_loop().create_future()

    def next_work(self) -> int:
        """Returns the work of the next slice, which is then done. A job larger than its input has full ones."""
        work = min(self.left or SLICE, SLICE)
        self.left -= min(self.left, work)
        return work


class _Lane:
    """A thread and the jobs waiting for it."""

    def __init__(self, name: str, slices: Counter) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._slices = slices
        self._waiting: FairTurns[_Job[Any]] = FairTurns()
        self._turn: asyncio.Future[list[_Job[Any]]] | None = None
        self._taken: list[_Job[Any]] = []

    async def run(self, job: _Job[Any]) -> Any:
        self._waiting.add(job.owner, job)
        if self._turn is None:
            self._begin_turn()
        try:
            return await job.done
        finally:
            if job.done.cancelled():
                self._waiting.remove(job.owner, job)
            del job  # It holds the error, whose traceback refers to this frame.

    def close(self) -> None:
        while (job := self._waiting.take()) is not None:
            job.done.cancel()
            self._waiting.end(job.owner, job, again=False)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin_turn(self) -> None:
        work = 0
        while work < SLICE and len(self._taken) < _TURN_JOBS and (job := self._waiting.take()) is not None:
            next_work = job.next_work()
            self._waiting.charge(job.owner, next_work)
            work += next_work
            self._taken.append(job)
        if self._taken:
            loop = asyncio.get_running_loop()
            self._turn = loop.run_in_executor(self._executor, _run_turn, list(self._taken), loop)
            self._turn.add_done_callback(self._end_turn)

    def _end_turn(self, turn: asyncio.Future[list[_Job[Any]]]) -> None:
        self._turn = None
        self._slices.inc(len(self._taken))
        unfinished = set() if turn.cancelled() else set(turn.result())
        for job in self._taken:
            self._waiting.end(job.owner, job, again=job in unfinished and not job.done.done())
        self._taken.clear()
        if len(self._waiting):
            self._begin_turn()


def _run_turn(jobs: list[_Job[Any]], loop: asyncio.AbstractEventLoop) -> list[_Job[Any]]:
    """Runs a slice of each job, and returns the jobs needing another turn."""
    unfinished = []
    for job in jobs:
        if job.done.cancelled():
            continue
        try:
            next(job.slices)
        except StopIteration as end:
            loop.call_soon_threadsafe(_succeed, job.done, end.value)
        except Exception as error:
            loop.call_soon_threadsafe(_fail, job.done, error.untraced() if isinstance(error, KvRouterError) else error)
        else:
            unfinished.append(job)
    return unfinished


def completed(slices: Slices[_T]) -> _T:
    """Runs all slices of a job at once, and returns its result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def _one_slice(job: Callable[[], _T]) -> Slices[_T]:
    return job()
    yield


def _succeed(done: asyncio.Future[_T], result: _T) -> None:
    if not done.done():
        done.set_result(result)


def _fail(done: asyncio.Future[_T], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
