"""Keeps the ranks of a component true to their workers: fetches what the index lacks.

A rank wants repair after a gap, a refused event, an unknown parent or drift, and when its worker registers. After a gap
alone, the events that are missing are asked for; otherwise, and where the worker no longer has them, its whole state.
Meanwhile the rank's live events are kept (``kvrouter.indexer.waiting``). A worker that does not answer leaves its rank
with fewer blocks, marked partial, and is tried again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import structlog
from kvrouter.core import InvalidDump, Rank
from kvrouter.indexer.state import IndexState, RankDump, StaleDump
from kvrouter.indexer.wanted import Wanted
from kvrouter.indexer.worker_state import StateTooLarge, fetch_events, fetch_state, worker_at
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import KvRouterError
from kvrouter.v1.registry_pb2 import WorkerRegistration

log = structlog.get_logger(component="indexer")

_EVENTS_SECONDS = 5.0
_STATE_SECONDS = 30.0
_UNANSWERED = 2
"""Tries after which a worker that does not answer is not waited for at the start."""
_LACK_EVENTS = ("gap", "registered", "start", "silent")
"""Reasons that leave the blocks true as far as they go, so that later events alone can complete them."""


class Resync:
    """The repairs of one component. ``run`` does them."""

    def __init__(self, name: str, state: IndexState, slots: asyncio.Semaphore) -> None:
        """``slots`` bounds the repairs at one time, over all components of the replica."""
        self._state = state
        self._slots = slots
        self._workers: Mapping[int, WorkerRegistration] = {}
        self._ranks: list[Rank] = []
        self._wanted = Wanted()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._open = False
        self._log = log.bind(of=name)
        self.resyncs = 0
        """Ranks whose whole state was fetched."""
        self.refetches = 0
        """Ranks that lacked events, which were fetched."""
        state.on_suspect = self._suspect
        state.may_hold = self._may_hold

    @property
    def pending(self) -> int:
        """Ranks that wait or are being repaired."""
        return len(self._wanted)

    @property
    def waits_for_workers(self) -> bool:
        """Whether a registered rank is neither compared with its worker nor known to be out of reach."""
        return any(
            not self._state.rank_tally(rank).verified and self._wanted.failures(rank) < _UNANSWERED
            for rank in self.ranks()
        )

    def update_workers(self, workers: Mapping[int, WorkerRegistration]) -> None:
        """Tells which workers are registered; those that are new, or registered anew, are compared."""
        before, self._workers = self._workers, workers
        self._ranks = [
            (worker_id, rank.dp_rank)
            for worker_id, worker in workers.items()
            if worker.publishes_events and worker.endpoint
            for rank in worker.ranks
        ]
        for rank in self._ranks:
            known, worker = before.get(rank[0]), workers[rank[0]]
            if known is not worker and (known is None or _life(known) != _life(worker)):
                self.want(rank, "registered")

    def want(self, rank: Rank, reason: str) -> None:
        """Asks for a rank's repair."""
        self._wanted.add(rank, reason, time.monotonic())
        self._wake.set()

    async def repair_now(self, rank: Rank, reason: str) -> bool:
        """Replaces a rank by its worker's state at once, for an operator. Returns whether the worker answered."""
        async with self._slots:
            return await self._repair(rank, reason, forced=True)

    async def worker_dump(self, rank: Rank) -> RankDump | None:
        """The worker's own state of a rank, to compare with; None where the worker does not answer."""
        worker = self._workers.get(rank[0])
        if worker is None or not worker.endpoint:
            return None
        try:
            async with self._slots, worker_at(worker.endpoint) as stub:
                return await fetch_state(stub, rank, Deadline.after(_STATE_SECONDS))
        except (KvRouterError, StateTooLarge) as error:
            self._log.warning("worker does not answer", worker_id=rank[0], dp_rank=rank[1], error=str(error))
            return None

    async def run(self, ready: asyncio.Event) -> None:
        """Repairs until cancelled, from when ``ready`` is set: what the transport has kept comes first."""
        self._loop = asyncio.get_running_loop()
        await ready.wait()
        self._open = True
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                while (taken := self._wanted.take(time.monotonic())) is not None:
                    await self._slots.acquire()
                    group.create_task(self._repair_in_turn(*taken), name=f"repair {taken[0]}")
                try:
                    async with asyncio.timeout(self._wanted.pause(time.monotonic())):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    async def _repair_in_turn(self, rank: Rank, reason: str) -> None:
        repaired = False
        try:
            repaired = await self._repair(rank, reason)
        finally:
            self._slots.release()
            if repaired or rank not in set(self.ranks()):
                self._wanted.done(rank)
            else:
                self._wanted.failed(rank, time.monotonic())
            self._wake.set()

    async def _repair(self, rank: Rank, reason: str, *, forced: bool = False) -> bool:
        repaired = False
        try:
            repaired = await self._fetch(rank, reason, forced=forced)
        except (KvRouterError, InvalidDump, StaleDump, StateTooLarge) as error:
            self._log.warning(
                "worker's state not fetched", worker_id=rank[0], dp_rank=rank[1], reason=reason, error=str(error)
            )
        finally:
            if not repaired:
                await self._state.end_repair(rank, reason, repaired=False)
        return repaired

    async def _fetch(self, rank: Rank, reason: str, *, forced: bool) -> bool:
        worker = self._workers.get(rank[0])
        info = await self._state.begin_repair(rank)
        if worker is None or not worker.endpoint:
            return False
        async with worker_at(worker.endpoint) as stub:
            if info is not None and not info.partial and reason in _LACK_EVENTS:
                cursor = (info.incarnation, info.next_event_id)
                batches = await fetch_events(stub, rank, cursor, Deadline.after(_EVENTS_SECONDS))
                if batches is not None and await self._state.apply_fetched(rank, batches):
                    await self._state.end_repair(rank, reason, repaired=True, news=bool(batches))
                    if batches:
                        self.refetches += 1
                        self._log.info("events fetched", worker_id=rank[0], dp_rank=rank[1], reason=reason)
                    return True
            if not self._wanted.may_fetch_state(rank, time.monotonic()) and not forced:
                return False
            dump = await fetch_state(stub, rank, Deadline.after(_STATE_SECONDS))
        blocks = await self._state.replace_rank(dump, reason)
        self.resyncs += 1
        self._log.info(
            "rank resynced",
            worker_id=rank[0],
            dp_rank=rank[1],
            reason=reason,
            next_event_id=dump.cursor[1],
            blocks=blocks,
        )
        return True

    def _suspect(self, rank: Rank, reason: str) -> None:
        """As ``want``, from any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.want, rank, reason)

    def _may_hold(self, rank: Rank) -> bool:
        worker = self._workers.get(rank[0])
        return self._open and worker is not None and bool(worker.endpoint) and not self._wanted.failing(rank)

    def ranks(self) -> list[Rank]:
        """Registered ranks that report their cache and can be asked."""
        return self._ranks


def _life(worker: WorkerRegistration) -> tuple[str, int, list[int]]:
    return worker.endpoint, worker.transport, [rank.incarnation for rank in worker.ranks]
