"""The resync queue: which ranks need a resync, and when each may be tried. No I/O.

A rank backs off in three cases, exponentially and with jitter, to spread the retries:

* its worker did not answer;
* its worker answered and did not confirm the alarm. Events may be forged or belong to another incarnation, and must not
  cause endless calls. This back-off is per rank and reason, and ends after 60 s without a false alarm;
* the worker's state differs from the worker's own digest (persistent drift): fetching it again soon cannot help.

The whole state of a rank is fetched at most every two seconds, so a worker with endless invalid events
harms its own rank only.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

from kvrouter.core import Rank
from kvrouter.indexer.index.rank_reset import PERSISTENT_DRIFT
from kvrouter.v1.registry_pb2 import WorkerRegistration

_FIRST_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 30.0
_PERSISTENT_PAUSE_SECONDS = (30.0, 1800.0)
_QUIET_SECONDS = 60.0
"""Time without a false alarm after the end of a back-off, until the next false alarm counts as the first again."""
_STATE_SPACING_SECONDS = 2.0
_REMEMBERED = 4096  # fetch times; more only if there are more within that interval


@dataclass(slots=True)
class _Resync:
    reason: str
    due: float
    failures: int = 0
    fresh: bool = False
    """Whether the worker has registered since the last attempt."""


@dataclass(slots=True)
class _FalseAlarms:
    """Consecutive false alarms of one rank for one reason, and the end of their back-off."""

    count: int
    until: float


class ResyncQueue:
    """Ranks with a due resync. Times are seconds of one monotonic clock."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._waiting: dict[Rank, _Resync] = {}
        self._queue: list[tuple[float, Rank]] = []
        # A heap of (due, rank). A pair is skipped if the rank's resync is due at another time by now, or during a
        # resync of the rank; it is queued again when that ends.
        self._active: dict[Rank, _Resync] = {}
        self._state_fetched: dict[Rank, float] = {}
        self._false_alarms: dict[tuple[Rank, str], _FalseAlarms] = {}

    def __len__(self) -> int:
        """Returns the number of waiting ranks and of those in a resync, without those with persistent drift."""
        pending = {rank for rank, entry in self._waiting.items() if entry.reason != PERSISTENT_DRIFT}
        return len(pending | self._active.keys())

    def add(self, rank: Rank, reason: str, now: float) -> None:
        """Adds a rank: due immediately, unless it is in back-off.

        A waiting rank keeps its reason, unless the new one is due sooner. The reason ``registered`` ends the back-off.
        """
        due = self._due(rank, reason, now)
        entry = self._waiting.get(rank)
        if entry is None:
            self._queue_up(rank, _Resync(reason, due, fresh=reason == "registered"))
        elif reason == "registered":
            # The worker has started again: earlier failures say nothing about it.
            self._queue_up(rank, _Resync(entry.reason, now, fresh=True))
        elif not entry.failures and due < entry.due:
            self._queue_up(rank, _Resync(reason, due, fresh=entry.fresh))

    def take(self, now: float) -> tuple[Rank, str] | None:
        """Removes and returns the next due rank, with its reason; None if none is due.

        The caller must report the result by ``done``, ``unfounded``, ``postponed`` or ``failed``.
        """
        due = self._next_due()
        if due is None or due > now:
            return None
        _, rank = heapq.heappop(self._queue)
        self._active[rank] = self._waiting.pop(rank)
        return rank, self._active[rank].reason

    def pause(self, now: float) -> float | None:
        """Returns the seconds until the next rank is due; None if no rank waits."""
        due = self._next_due()
        return None if due is None else max(0.0, due - now)

    def failing(self, rank: Rank) -> bool:
        """Returns whether the last attempt at a rank failed."""
        return self.failures(rank) > 0

    def failures(self, rank: Rank) -> int:
        """Returns the number of consecutive failed attempts at a rank."""
        entry = self._waiting.get(rank) or self._active.get(rank)
        return entry.failures if entry is not None else 0

    def false_alarms(self, rank: Rank) -> int:
        """Returns the number of consecutive false alarms of a rank, for the reason with the most."""
        return max((each.count for (of, _), each in self._false_alarms.items() if of == rank), default=0)

    def deferred(self, rank: Rank, reason: str, now: float) -> bool:
        """Returns whether a rank is in back-off for this reason because of false alarms."""
        alarms = self._false_alarms.get((rank, reason))
        return alarms is not None and now < alarms.until

    def active(self, rank: Rank) -> bool:
        """Returns whether a resync of a rank is under way."""
        return rank in self._active

    def reason(self, rank: Rank) -> str:
        """Returns why a rank waits or is in a resync; empty if neither."""
        entry = self._active.get(rank) or self._waiting.get(rank)
        return entry.reason if entry is not None else ""

    def backing_off(self) -> int:
        """Returns the number of ranks in back-off after a failed attempt, a false alarm or persistent drift."""
        return sum(
            bool(entry.failures or entry.reason == PERSISTENT_DRIFT or (rank, entry.reason) in self._false_alarms)
            for rank, entry in self._waiting.items()
        )

    def may_fetch_state(self, rank: Rank, now: float) -> bool:
        """Returns whether the whole state of a rank may be fetched now; if so, records the fetch."""
        if len(self._state_fetched) >= _REMEMBERED:
            recent = {each: at for each, at in self._state_fetched.items() if now - at < _STATE_SPACING_SECONDS}
            self._state_fetched = recent
        if now - self._state_fetched.get(rank, -_STATE_SPACING_SECONDS) < _STATE_SPACING_SECONDS:
            return False
        self._state_fetched[rank] = now
        return True

    def done(self, rank: Rank) -> None:
        """Ends a successful resync. One requested meanwhile stays queued."""
        self._active.pop(rank, None)
        if rank in self._waiting:
            self._queue_up(rank, self._waiting[rank])

    def unfounded(self, rank: Rank, reason: str, now: float) -> float:
        """Ends a resync whose reason the worker did not confirm. Returns the back-off for this reason, in seconds.

        One requested meanwhile for the same reason backs off too.
        """
        pause = self._note_false_alarm(rank, reason, now)
        entry = self._waiting.get(rank)
        if entry is not None and entry.reason == reason and not entry.fresh:
            entry.due = now + pause
        self.done(rank)
        return pause

    def failed(self, rank: Rank, now: float) -> None:
        """Ends a failed resync. The rank backs off, unless its worker has registered meanwhile."""
        entry = self._active.pop(rank, None)
        if entry is None:
            return
        meanwhile = self._waiting.get(rank)
        if meanwhile is not None and meanwhile.fresh:
            self._queue_up(rank, meanwhile)
            return
        entry.failures += 1
        entry.due = now + self._pause(entry.failures, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        self._queue_up(rank, entry)

    def expire_false_alarms(self, now: float) -> list[tuple[Rank, str, int]]:
        """Drops false alarms of at least 60 s ago. Returns (rank, reason, number of false alarms) of each."""
        over = [key for key, each in self._false_alarms.items() if now - each.until >= _QUIET_SECONDS]
        return [(*key, self._false_alarms.pop(key).count) for key in over]

    def postponed(self, rank: Rank, now: float) -> None:
        """Ends a resync too early for the whole state. The rank waits until it may."""
        entry = self._active.pop(rank, None)
        if entry is not None:
            meanwhile = self._waiting.get(rank)
            entry.fresh = entry.fresh or (meanwhile is not None and meanwhile.fresh)
            entry.due = max(now, self._state_fetched.get(rank, now) + _STATE_SPACING_SECONDS)
            self._queue_up(rank, entry)

    def _due(self, rank: Rank, reason: str, now: float) -> float:
        if reason == PERSISTENT_DRIFT:
            return now + self._note_false_alarm(rank, reason, now, _PERSISTENT_PAUSE_SECONDS)
        alarms = self._false_alarms.get((rank, reason))
        return now if alarms is None else max(now, alarms.until)

    def _note_false_alarm(
        self,
        rank: Rank,
        reason: str,
        now: float,
        bounds: tuple[float, float] = (_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS),
    ) -> float:
        before = self._false_alarms.get((rank, reason))
        count = 1 if before is None or now - before.until >= _QUIET_SECONDS else before.count + 1
        pause = self._pause(count, *bounds)
        self._false_alarms[rank, reason] = _FalseAlarms(count, now + pause)
        return pause

    def _pause(self, count: int, first: float, longest: float) -> float:
        return min(longest, first * 2.0 ** min(count - 1, 16)) * self._rng.uniform(0.5, 1.5)

    def _queue_up(self, rank: Rank, entry: _Resync) -> None:
        self._waiting[rank] = entry
        heapq.heappush(self._queue, (entry.due, rank))

    def _next_due(self) -> float | None:
        while self._queue:
            due, rank = self._queue[0]
            entry = self._waiting.get(rank)
            if entry is not None and entry.due == due and rank not in self._active:
                return due
            heapq.heappop(self._queue)
        return None


class ResyncRequests:
    """A ``ResyncPolicy`` (``kvrouter.indexer.index.rank_reset``) by the resync queue and the registered workers."""

    def __init__(self) -> None:
        self.queue = ResyncQueue()
        self.added = asyncio.Event()
        """Set by each added rank. The reader of the queue clears it."""
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
            if known is not worker and (known is None or _identity(known) != _identity(worker)):
                self.add(rank, "registered")

    def ranks(self) -> list[Rank]:
        """Returns the registered, publishing ranks with an address."""
        return self._ranks

    def worker(self, rank: Rank) -> WorkerRegistration | None:
        """Returns the registration of a rank's worker; None if it has none, or no address."""
        worker = self._workers.get(rank[0])
        return worker if worker is not None and worker.endpoint else None

    def is_still(self, rank: Rank, worker: WorkerRegistration) -> bool:
        """Returns whether a rank's worker has not registered anew, elsewhere or with other incarnations."""
        now = self._workers.get(rank[0])
        return now is not None and _identity(now) == _identity(worker)

    def add(self, rank: Rank, reason: str) -> None:
        """Adds a rank to the resync queue. Must be called on the event loop."""
        self.queue.add(rank, reason, time.monotonic())
        self.added.set()

    def request(self, rank: Rank, reason: str) -> None:
        """Calls ``add`` on the event loop, from any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.add, rank, reason)

    def may_retain(self, rank: Rank) -> bool:
        """Returns whether events after a gap may wait for the missing ones, because their worker can be asked."""
        return self._open and self.worker(rank) is not None and not self.queue.failing(rank)

    def is_deferred(self, rank: Rank, reason: str) -> bool:
        """Returns whether a resync for a reason backs off after false alarms."""
        return self.queue.deferred(rank, reason, time.monotonic())


def _identity(worker: WorkerRegistration) -> tuple[str, int, list[int]]:
    """Returns what differs between two registrations after which a worker must be asked again."""
    return worker.endpoint, worker.transport, [rank.incarnation for rank in worker.ranks]
