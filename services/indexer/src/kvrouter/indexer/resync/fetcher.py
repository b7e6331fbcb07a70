"""Resync: keeps the ranks of a component consistent with their workers.

A rank needs a resync after a gap, a refused event, an unknown parent or drift, when its worker registers, and when an
event names an unconfirmed incarnation or id. The resync requests the worker's events from the index's
cursor on. There are three results: there are none, so the index is complete; there are some, which are applied; or the
cursor does not fit (the worker is in another incarnation, behind the index, or no longer has these events), and the
worker's whole state is fetched. Meanwhile the rank's events wait in its pending buffer
(``kvrouter.indexer.index.pending_buffers``). If the worker does not answer, the rank stays partial and is retried.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import structlog
from kvrouter.core import InvalidDump, Rank
from kvrouter.indexer.index.state import IndexState, RankDump, StaleDump
from kvrouter.indexer.resync.resync_queue import ResyncRequests
from kvrouter.indexer.resync.worker_client import StateTooLarge, fetch_events, fetch_state, worker_at
from kvrouter.net.tls import Tls
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.indexer_pb2 import RankRepair

log = structlog.get_logger(component="indexer")

_EVENTS_SECONDS = 5.0
_STATE_SECONDS = 30.0
_UNANSWERED = 2
"""Failed attempts after which readiness no longer waits for a worker."""
_ALARMS = ("gap", "behind", "incarnation")
"""Reasons by an event, which the worker may refute."""
_LACK_EVENTS = (*_ALARMS, "registered", "start", "silent")
"""Reasons after which the present blocks are still true, so that the missing events alone can complete them."""


def _nothing(_: Rank) -> None:
    """Returns None: no worker of this process resumed."""


@dataclass(eq=False)
class Resync:
    """Resyncs the ranks of one component. ``run`` processes the queue."""

    name: str
    """Name of the component, for logs."""
    state: IndexState
    """The index."""
    requests: ResyncRequests
    """The queue, and the registered workers."""
    slots: asyncio.Semaphore
    """Bounds concurrent resyncs over all components of the replica."""
    tls: Tls | None = None
    """Encrypts connections to workers; None for plain text."""
    resumed: Callable[[Rank], RankDump | None] = _nothing
    """Takes the state with which a worker of this process resumed, once."""

    def __post_init__(self) -> None:
        self._known = self.state.known
        self._index_repair = self.state.repair
        self._resync_queue = self.requests.queue
        self._log = log.bind(component_name=self.name)
        self.resyncs = 0
        """Number of resyncs with a whole state."""
        self.refetches = 0
        """Number of resyncs with missing events only."""
        self.false_alarms = 0
        """Number of alarms refuted by workers."""

    @property
    def backing_off(self) -> int:
        """Returns the number of ranks in back-off after a failed attempt, a false alarm or persistent drift."""
        return self._resync_queue.backing_off()

    def repair_of(self, rank: Rank) -> RankRepair | None:
        """Returns the queued or running resync of a rank; None if there is none."""
        reason = self._resync_queue.reason(rank)
        if not reason:
            return None
        attempts = max(self._resync_queue.failures(rank), self._resync_queue.false_alarms(rank))
        return RankRepair(reason=reason, attempts=attempts, under_way=self._resync_queue.active(rank))

    def expire_false_alarms(self) -> None:
        """Ends the back-off of ranks without a false alarm for 60 s, and logs them."""
        for rank, reason, count in self._resync_queue.expire_false_alarms(time.monotonic()):
            if reason != "behind":
                self._log.info(
                    "rank.alarms_ended", worker_id=rank[0], dp_rank=rank[1], reason=reason, false_alarms=count
                )

    @property
    def pending(self) -> int:
        """Returns the number of ranks in the resync queue, those in progress included."""
        return len(self._resync_queue)

    @property
    def waits_for_workers(self) -> bool:
        """Returns whether a registered rank is still to be compared with its worker.

        Workers with two unanswered attempts do not count.
        """
        return any(
            not self._known.view(rank).verified and self._resync_queue.failures(rank) < _UNANSWERED
            for rank in self.requests.ranks()
        )

    async def resync_now(self, rank: Rank, reason: str) -> bool:
        """Resyncs a rank immediately, for an operator. Returns whether the worker answered."""
        async with self.slots:
            return await self._resync(rank, reason, forced=True) is not _Outcome.FAILED

    async def worker_dump(self, rank: Rank) -> RankDump | None:
        """Returns the worker's own state of a rank, for a comparison; None if the worker does not answer."""
        worker = self.requests.worker(rank)
        if worker is None:
            return None
        try:
            async with self.slots:
                return await fetch_state(worker_at(worker.endpoint, self.tls), rank, Deadline.after(_STATE_SECONDS))
        except Exception as error:
            self._log.warning(
                "worker.unreachable", worker_id=rank[0], dp_rank=rank[1], error=str(error), exc_info=_defect(error)
            )
            return None

    async def run(self, ready: asyncio.Event) -> None:
        """Processes the queue until cancelled. Starts when ``ready`` is set, after the retained messages are read."""
        self.requests.accept()
        await ready.wait()
        self.requests.open()
        async with asyncio.TaskGroup() as group:
            while True:
                self.requests.added.clear()
                while (taken := self._resync_queue.take(time.monotonic())) is not None:
                    await self.slots.acquire()
                    group.create_task(self._resync_in_turn(*taken), name=f"resync {taken[0]}")
                try:
                    async with asyncio.timeout(self._resync_queue.pause(time.monotonic())):
                        await self.requests.added.wait()
                except TimeoutError:
                    continue

    async def _resync_in_turn(self, rank: Rank, reason: str) -> None:
        outcome = _Outcome.FAILED
        failures = self._resync_queue.failures(rank)
        try:
            outcome = await self._resync(rank, reason)
        finally:
            self.slots.release()
            if outcome is _Outcome.UNFOUNDED:
                self._note_false_alarm(rank, reason)
            elif outcome is _Outcome.POSTPONED:
                self._resync_queue.postponed(rank, time.monotonic())
            elif outcome is _Outcome.CONSISTENT or rank not in set(self.requests.ranks()):
                self._resync_queue.done(rank)
            else:
                self._resync_queue.failed(rank, time.monotonic())
            if failures and outcome is not _Outcome.FAILED:
                self._log.info("worker.reachable", worker_id=rank[0], dp_rank=rank[1], failures=failures)
            self.requests.added.set()

    def _note_false_alarm(self, rank: Rank, reason: str) -> None:
        pause = self._resync_queue.unfounded(rank, reason, time.monotonic())
        self.false_alarms += 1
        # Late and duplicate messages raise this alarm too, and are not worth a log line.
        if reason != "behind" and self._resync_queue.false_alarms(rank) == 1:
            self._log.warning(
                "rank.alarm_unconfirmed",
                worker_id=rank[0],
                dp_rank=rank[1],
                reason=reason,
                next_after_seconds=round(pause, 3),
            )

    async def _resync(self, rank: Rank, reason: str, *, forced: bool = False) -> _Outcome:
        outcome = _Outcome.FAILED
        try:
            outcome = await self._fetch(rank, reason, forced=forced)
        except Exception as error:
            if not self._resync_queue.failing(rank):
                self._log.warning(
                    "resync.fetch_failed",
                    worker_id=rank[0],
                    dp_rank=rank[1],
                    reason=reason,
                    error=str(error),
                    exc_info=_defect(error),
                )
        finally:
            if outcome is _Outcome.FAILED:
                await self._index_repair.give_up_repair(rank)
        return outcome

    async def _fetch(self, rank: Rank, reason: str, *, forced: bool) -> _Outcome:
        worker = self.requests.worker(rank)
        start = await self._index_repair.begin_repair(rank)
        if (resumed := self.resumed(rank)) is not None:
            # Events that arrive meanwhile wait: after those that the rank dropped before, they would show a gap.
            await self._load(resumed)
            start = await self._index_repair.begin_repair(rank)
        cursor = start.cursor
        if worker is None:
            return _Outcome.FAILED
        stub = worker_at(worker.endpoint, self.tls)
        if cursor is not None and not start.is_partial and reason in _LACK_EVENTS:
            batches = await fetch_events(stub, rank, cursor, Deadline.after(_EVENTS_SECONDS))
            if (
                batches is not None
                and self.requests.is_still(rank, worker)
                and await self._index_repair.apply_fetched(rank, batches)
            ):
                refuted = await self._index_repair.confirm_rank(
                    rank, cursor[0], reason, start.claims, news=bool(batches)
                )
                if batches:
                    self.refetches += 1
                    self._log.info("resync.events_fetched", worker_id=rank[0], dp_rank=rank[1], reason=reason)
                return _outcome(reason, founded=bool(batches) and not refuted)
        if not self._resync_queue.may_fetch_state(rank, time.monotonic()) and not forced:
            return _Outcome.POSTPONED
        dump = await fetch_state(stub, rank, Deadline.after(_STATE_SECONDS))
        if not self.requests.is_still(rank, worker):
            # The worker registered again during the call: this answer is of the former process.
            return _Outcome.FAILED
        blocks = await self._index_repair.replace_rank(dump, reason, start.claims)
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
        same = cursor is not None and dump.cursor[0] == cursor[0] and dump.cursor[1] >= cursor[1]
        return _outcome(reason, founded=reason == "gap" or not same)

    async def _load(self, dump: RankDump) -> None:
        """Loads a state, of which the worker is then asked for the later events only."""
        try:
            blocks = await self._index_repair.load_rank(dump, goes_back=True)
        except (StaleDump, InvalidDump) as error:
            self._log.error("rank.restore_failed", worker_id=dump.rank[0], dp_rank=dump.rank[1], reason=str(error))
        else:
            self._log.info("rank.restored", worker_id=dump.rank[0], dp_rank=dump.rank[1], blocks=blocks)


class _Outcome(Enum):
    """Result of a resync."""

    CONSISTENT = auto()
    UNFOUNDED = auto()
    """The worker does not confirm the reason."""
    POSTPONED = auto()
    """The worker's state was fetched less than two seconds ago. The resync waits."""
    FAILED = auto()
    """The worker did not answer, or its answer could not be used."""


def _outcome(reason: str, *, founded: bool) -> _Outcome:
    return _Outcome.CONSISTENT if founded or reason not in _ALARMS else _Outcome.UNFOUNDED


def _defect(error: Exception) -> Exception | None:
    """Returns an error of unknown cause, to log its traceback; None for errors caused by workers."""
    return None if isinstance(error, KvRouterError | InvalidDump | StateTooLarge) else error
