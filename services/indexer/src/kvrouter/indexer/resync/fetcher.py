"""Keeps the ranks of a component true to their workers: fetches what the index lacks.

A rank needs repair after a gap, a refused event, an unknown parent or drift, when its worker registers, and when an
event claims an incarnation or an id that nobody confirms. The worker is asked for its events from the index's cursor
on. That settles which of three holds: the index has all, it lacks these events, or the worker is elsewhere (in another
incarnation, behind the index, or past the events that it keeps), and its whole state is fetched. Meanwhile the rank's
live events are kept (``kvrouter.indexer.index.pending_buffer``). A worker that does not answer leaves its rank with
fewer blocks, marked partial, and is tried again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

import structlog
from kvrouter.core import InvalidDump, Rank
from kvrouter.indexer.index.rank_dump import RankDump
from kvrouter.indexer.index.state import IndexState
from kvrouter.indexer.resync.resync_queue import ResyncQueue
from kvrouter.indexer.resync.worker_client import StateTooLarge, fetch_events, fetch_state, worker_at
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import KvRouterError
from kvrouter.v1.registry_pb2 import WorkerRegistration

log = structlog.get_logger(component="indexer")

_EVENTS_SECONDS = 5.0
_STATE_SECONDS = 30.0
_UNANSWERED = 2
"""Tries after which a worker that does not answer is not waited for at the start."""
_ALARMS = ("gap", "behind", "incarnation")
"""Reasons that an event raised and the worker may not confirm."""
_LACK_EVENTS = (*_ALARMS, "registered", "start", "silent")
"""Reasons that leave the blocks true as far as they go, so that later events alone can complete them."""


@dataclass(frozen=True, slots=True)
class RankRepair:
    """A repair that is due or under way."""

    reason: str
    attempts: int
    """Tries that failed, or alarms that the worker did not confirm, in a row."""
    under_way: bool
    """Whether the worker is being asked."""


class Resync:
    """The repairs of one component. ``run`` does them."""

    def __init__(self, name: str, state: IndexState, slots: asyncio.Semaphore) -> None:
        """``slots`` bounds the repairs at one time, over all components of the replica."""
        self._state = state
        self._slots = slots
        self._workers: Mapping[int, WorkerRegistration] = {}
        self._ranks: list[Rank] = []
        self._resync_queue = ResyncQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._open = False
        self._log = log.bind(component_name=name)
        self.resyncs = 0
        """Ranks whose whole state was fetched."""
        self.refetches = 0
        """Ranks that lacked events, which were fetched."""
        state.on_suspect = self._suspect
        state.may_retain = self._may_retain
        state.is_deferred = self._is_deferred
        self.false_alarms = 0
        """Alarms that workers did not confirm."""

    @property
    def backing_off(self) -> int:
        """Ranks that wait because a try failed, an alarm was false, or their worker contradicts itself."""
        return self._resync_queue.backing_off()

    def repair_of(self, rank: Rank) -> RankRepair | None:
        """What is being done about a rank; None if nothing is."""
        reason = self._resync_queue.reason(rank)
        if not reason:
            return None
        attempts = max(self._resync_queue.failures(rank), self._resync_queue.false_alarms(rank))
        return RankRepair(reason, attempts, under_way=self._resync_queue.active(rank))

    def forgive(self) -> None:
        """Ends the back-off of ranks about which no false alarm has come for a while."""
        for rank, reason, count in self._resync_queue.forgive(time.monotonic()):
            if reason != "behind":
                self._log.info(
                    "rank.alarms_ended", worker_id=rank[0], dp_rank=rank[1], reason=reason, false_alarms=count
                )

    @property
    def pending(self) -> int:
        """Ranks that wait or are being repaired."""
        return len(self._resync_queue)

    @property
    def waits_for_workers(self) -> bool:
        """Whether a registered rank is neither compared with its worker nor known to be out of reach."""
        return any(
            not self._state.rank_tally(rank).verified and self._resync_queue.failures(rank) < _UNANSWERED
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
            if known is not worker and (known is None or _incarnation(known) != _incarnation(worker)):
                self.request(rank, "registered")

    def request(self, rank: Rank, reason: str) -> None:
        """Asks for a rank's repair."""
        self._resync_queue.add(rank, reason, time.monotonic())
        self._wake.set()

    async def repair_now(self, rank: Rank, reason: str) -> bool:
        """Replaces a rank by its worker's state at once, for an operator. Returns whether the worker answered."""
        async with self._slots:
            return await self._repair(rank, reason, forced=True) is not _Outcome.FAILED

    async def worker_dump(self, rank: Rank) -> RankDump | None:
        """The worker's own state of a rank, to compare with; None where the worker does not answer."""
        worker = self._workers.get(rank[0])
        if worker is None or not worker.endpoint:
            return None
        try:
            async with self._slots, worker_at(worker.endpoint) as stub:
                return await fetch_state(stub, rank, Deadline.after(_STATE_SECONDS))
        except (KvRouterError, StateTooLarge) as error:
            self._log.warning("worker.unreachable", worker_id=rank[0], dp_rank=rank[1], error=str(error))
            return None

    async def run(self, ready: asyncio.Event) -> None:
        """Repairs until cancelled, from when ``ready`` is set: what the transport has kept comes first."""
        self._loop = asyncio.get_running_loop()
        await ready.wait()
        self._open = True
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                while (taken := self._resync_queue.take(time.monotonic())) is not None:
                    await self._slots.acquire()
                    group.create_task(self._repair_in_turn(*taken), name=f"repair {taken[0]}")
                try:
                    async with asyncio.timeout(self._resync_queue.pause(time.monotonic())):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    async def _repair_in_turn(self, rank: Rank, reason: str) -> None:
        outcome = _Outcome.FAILED
        failures = self._resync_queue.failures(rank)
        try:
            outcome = await self._repair(rank, reason)
        finally:
            self._slots.release()
            if outcome is _Outcome.UNFOUNDED:
                self._note_false_alarm(rank, reason)
            elif outcome is _Outcome.POSTPONED:
                self._resync_queue.postponed(rank, time.monotonic())
            elif outcome is _Outcome.REPAIRED or rank not in set(self.ranks()):
                self._resync_queue.done(rank)
            else:
                self._resync_queue.failed(rank, time.monotonic())
            if failures and outcome is not _Outcome.FAILED:
                self._log.info("worker.reachable", worker_id=rank[0], dp_rank=rank[1], failures=failures)
            self._wake.set()

    def _note_false_alarm(self, rank: Rank, reason: str) -> None:
        pause = self._resync_queue.unfounded(rank, reason, time.monotonic())
        self.false_alarms += 1
        # Messages that come late or twice raise alarms too; they are no news.
        if reason != "behind" and self._resync_queue.false_alarms(rank) == 1:
            self._log.warning(
                "rank.alarm_unconfirmed",
                worker_id=rank[0],
                dp_rank=rank[1],
                reason=reason,
                next_after_seconds=round(pause, 3),
            )

    async def _repair(self, rank: Rank, reason: str, *, forced: bool = False) -> _Outcome:
        outcome = _Outcome.FAILED
        try:
            outcome = await self._fetch(rank, reason, forced=forced)
        except (KvRouterError, InvalidDump, StateTooLarge) as error:
            if not self._resync_queue.failing(rank):
                self._log.warning(
                    "resync.fetch_failed", worker_id=rank[0], dp_rank=rank[1], reason=reason, error=str(error)
                )
        finally:
            if outcome is _Outcome.FAILED:
                await self._state.give_up_repair(rank)
        return outcome

    async def _fetch(self, rank: Rank, reason: str, *, forced: bool) -> _Outcome:
        worker = self._workers.get(rank[0])
        start = await self._state.begin_repair(rank)
        info = start.info
        if worker is None or not worker.endpoint:
            return _Outcome.FAILED
        async with worker_at(worker.endpoint) as stub:
            if info is not None and not info.partial and reason in _LACK_EVENTS:
                cursor = (info.incarnation, info.next_event_id)
                batches = await fetch_events(stub, rank, cursor, Deadline.after(_EVENTS_SECONDS))
                if (
                    batches is not None
                    and self._is_still(rank, worker)
                    and await self._state.apply_fetched(rank, batches)
                ):
                    refuted = await self._state.confirm_rank(
                        rank, info.incarnation, reason, start.claims, news=bool(batches)
                    )
                    if batches:
                        self.refetches += 1
                        self._log.info("resync.events_fetched", worker_id=rank[0], dp_rank=rank[1], reason=reason)
                    return _outcome(reason, founded=bool(batches) and not refuted)
            if not self._resync_queue.may_fetch_state(rank, time.monotonic()) and not forced:
                return _Outcome.POSTPONED
            dump = await fetch_state(stub, rank, Deadline.after(_STATE_SECONDS))
        if not self._is_still(rank, worker):
            # What has registered meanwhile is asked next; the former process's answer is of no use.
            return _Outcome.FAILED
        blocks = await self._state.replace_rank(dump, reason, start.claims)
        self.resyncs += 1
        self._log.info(
            "rank.resynced",
            worker_id=rank[0],
            dp_rank=rank[1],
            reason=reason,
            incarnation=dump.cursor[0],
            next_event_id=dump.cursor[1],
            blocks=blocks,
        )
        same = info is not None and dump.cursor[0] == info.incarnation and dump.cursor[1] >= info.next_event_id
        return _outcome(reason, founded=reason == "gap" or not same)

    def _is_still(self, rank: Rank, worker: WorkerRegistration) -> bool:
        """Whether the worker that was asked is the one that is registered."""
        now = self._workers.get(rank[0])
        return now is not None and _incarnation(now) == _incarnation(worker)

    def _suspect(self, rank: Rank, reason: str) -> None:
        """As ``want``, from any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.request, rank, reason)

    def _is_deferred(self, rank: Rank, reason: str) -> bool:
        return self._resync_queue.deferred(rank, reason, time.monotonic())

    def _may_retain(self, rank: Rank) -> bool:
        worker = self._workers.get(rank[0])
        return self._open and worker is not None and bool(worker.endpoint) and not self._resync_queue.failing(rank)

    def ranks(self) -> list[Rank]:
        """Registered ranks that report their cache and can be asked."""
        return self._ranks


class _Outcome(Enum):
    """How a repair ended."""

    REPAIRED = auto()
    UNFOUNDED = auto()
    """The worker does not confirm the reason."""
    POSTPONED = auto()
    """The worker's state was fetched a moment ago; what waits goes on waiting."""
    FAILED = auto()
    """The worker was not heard."""


def _outcome(reason: str, *, founded: bool) -> _Outcome:
    return _Outcome.REPAIRED if founded or reason not in _ALARMS else _Outcome.UNFOUNDED


def _incarnation(worker: WorkerRegistration) -> tuple[str, int, list[int]]:
    return worker.endpoint, worker.transport, [rank.incarnation for rank in worker.ranks]
