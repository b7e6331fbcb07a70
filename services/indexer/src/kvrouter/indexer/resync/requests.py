"""Requests of resyncs: by an operator, at a registration, and by suspicious events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from kvrouter.core import Rank
from kvrouter.indexer.resync.resync_queue import ResyncQueue
from kvrouter.v1.registry_pb2 import WorkerRegistration


class ResyncRequests:
    """Implements ``kvrouter.indexer.index.repair.RepairPolicy`` with the resync queue and the registered workers."""

    def __init__(self) -> None:
        self.queue = ResyncQueue()
        self.added = asyncio.Event()
        """Set by each request. The reader of the queue clears it."""
        self._workers: Mapping[int, WorkerRegistration] = {}
        self._ranks: list[Rank] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open = False

    def accept(self) -> None:
        """Takes requests from other threads from now on, for the running event loop."""
        self._loop = asyncio.get_running_loop()

    def open(self) -> None:
        """Lets events after a gap wait from now on, because the queue is being processed."""
        self._open = True

    def update_workers(self, workers: Mapping[int, WorkerRegistration]) -> None:
        """Replaces the registered workers by id. Requests a resync of new ones and of those registered again."""
        before, self._workers = self._workers, workers
        self._ranks = [
            (worker_id, rank.dp_rank)
            for worker_id, worker in workers.items()
            if worker.publishes_events and worker.endpoint
            for rank in worker.ranks
        ]
        for rank in self._ranks:
            known, worker = before.get(rank[0]), workers[rank[0]]
            if known is not worker and (known is None or _incarnation(known) != _incarnation(worker)):
                self.request(rank, "registered")

    def ranks(self) -> list[Rank]:
        """Returns the registered, publishing ranks with an address."""
        return self._ranks

    def worker(self, rank: Rank) -> WorkerRegistration | None:
        """Returns the registration of a rank's worker; None if it has none, or no address."""
        worker = self._workers.get(rank[0])
        return worker if worker is not None and worker.endpoint else None

    def is_still(self, rank: Rank, worker: WorkerRegistration) -> bool:
        """Returns whether the registration of a rank's worker is still the same incarnation."""
        now = self._workers.get(rank[0])
        return now is not None and _incarnation(now) == _incarnation(worker)

    def request(self, rank: Rank, reason: str) -> None:
        """Adds a rank to the resync queue."""
        self.queue.add(rank, reason, time.monotonic())
        self.added.set()

    def suspect(self, rank: Rank, reason: str) -> None:
        """Calls ``request`` on the event loop, from any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.request, rank, reason)

    def may_retain(self, rank: Rank) -> bool:
        """Returns whether events after a gap may wait for the missing ones, because their worker can be asked."""
        return self._open and self.worker(rank) is not None and not self.queue.failing(rank)

    def is_deferred(self, rank: Rank, reason: str) -> bool:
        """Returns whether a repair for a reason backs off after false alarms."""
        return self.queue.deferred(rank, reason, time.monotonic())


def _incarnation(worker: WorkerRegistration) -> tuple[str, int, list[int]]:
    return worker.endpoint, worker.transport, [rank.incarnation for rank in worker.ranks]
