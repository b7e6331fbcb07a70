"""Which ranks need repair, and when each may be tried: decided without I/O.

Three things make a rank wait, each with exponential back-off and jitter, so that ranks do not ask in one moment:

* its worker did not answer;
* its worker answered, and what had raised the alarm was not true: events can be forged or come from another life, and
  must not make the Indexer ask without end. This back-off is per rank and reason, and ends after a quiet time;
* its worker's own state contradicts its own digest: fetching it again at once cannot help.

Whole states of one rank are fetched two seconds apart at least: a worker that publishes nonsense all the time costs its
own rank, not the Indexer.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from kvrouter.core import Rank
from kvrouter.indexer.index.repair import PERSISTENT_DRIFT

_FIRST_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 30.0
_PERSISTENT_PAUSE_SECONDS = (30.0, 1800.0)
_QUIET_SECONDS = 60.0
"""After a back-off has ended, how long without another false alarm until the next one counts as the first."""
_STATE_SPACING_SECONDS = 2.0
_REMEMBERED = 4096  # fetches; more only if so many are within that time


@dataclass(slots=True)
class _Resync:
    reason: str
    due: float
    failures: int = 0
    fresh: bool = False
    """Whether the worker has registered since its rank was last tried."""


@dataclass(slots=True)
class _FalseAlarms:
    """Alarms of one rank and reason that its worker did not confirm, in a row."""

    count: int
    until: float


class ResyncQueue:
    """Ranks that wait for repair. Times are seconds of one monotonic clock."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._resyncs: dict[Rank, _Resync] = {}
        self._queue: list[tuple[float, Rank]] = []
        # A heap of when ranks are due. An entry that its rank's want does not confirm is skipped, and so is one of a
        # rank under repair, which is queued again when that ends.
        self._active: dict[Rank, _Resync] = {}
        self._state_fetched: dict[Rank, float] = {}
        self._false_alarms: dict[tuple[Rank, str], _FalseAlarms] = {}

    def __len__(self) -> int:
        """Ranks that wait or are being repaired, without those whose worker contradicts itself."""
        pending = {rank for rank, pending_resync in self._resyncs.items() if pending_resync.reason != PERSISTENT_DRIFT}
        return len(pending | self._active.keys())

    def add(self, rank: Rank, reason: str, now: float) -> None:
        """A rank needs repair: at once, unless it failed before or the reason was a false alarm of late.

        A rank that waits keeps its first reason, unless the new one is due sooner.
        """
        due = self._due(rank, reason, now)
        pending_resync = self._resyncs.get(rank)
        if pending_resync is None:
            self._queue_up(rank, _Resync(reason, due, fresh=reason == "registered"))
        elif reason == "registered":
            # The worker is back: what failed before says nothing.
            self._queue_up(rank, _Resync(pending_resync.reason, now, fresh=True))
        elif not pending_resync.failures and due < pending_resync.due:
            self._queue_up(rank, _Resync(reason, due, fresh=pending_resync.fresh))

    def take(self, now: float) -> tuple[Rank, str] | None:
        """The next rank to repair, and why; None if none is due.

        ``done``, ``unfounded``, ``postponed`` or ``failed`` must follow.
        """
        due = self._next_due()
        if due is None or due > now:
            return None
        _, rank = heapq.heappop(self._queue)
        self._active[rank] = self._resyncs.pop(rank)
        return rank, self._active[rank].reason

    def pause(self, now: float) -> float | None:
        """Seconds until the next rank is due; None if none waits."""
        due = self._next_due()
        return None if due is None else max(0.0, due - now)

    def failing(self, rank: Rank) -> bool:
        """Whether the last try at a rank failed."""
        return self.failures(rank) > 0

    def failures(self, rank: Rank) -> int:
        """Tries at a rank that failed in a row."""
        pending_resync = self._resyncs.get(rank) or self._active.get(rank)
        return pending_resync.failures if pending_resync is not None else 0

    def false_alarms(self, rank: Rank) -> int:
        """The most alarms for one reason that the rank's worker did not confirm, in a row."""
        return max((each.count for (of, _), each in self._false_alarms.items() if of == rank), default=0)

    def deferred(self, rank: Rank, reason: str, now: float) -> bool:
        """Whether a repair for this reason would have to wait, because its last alarms were false."""
        alarms = self._false_alarms.get((rank, reason))
        return alarms is not None and now < alarms.until

    def active(self, rank: Rank) -> bool:
        """Whether the rank is being repaired."""
        return rank in self._active

    def reason(self, rank: Rank) -> str:
        """Why the rank waits or is being repaired; empty if it is not."""
        pending_resync = self._active.get(rank) or self._resyncs.get(rank)
        return pending_resync.reason if pending_resync is not None else ""

    def backing_off(self) -> int:
        """Ranks that wait because a try failed, an alarm was false, or their worker contradicts itself."""
        return sum(
            bool(
                pending_resync.failures
                or pending_resync.reason == PERSISTENT_DRIFT
                or (rank, pending_resync.reason) in self._false_alarms
            )
            for rank, pending_resync in self._resyncs.items()
        )

    def may_fetch_state(self, rank: Rank, now: float) -> bool:
        """Whether the whole state of a rank may be fetched again so soon; if so, it counts as fetched."""
        if len(self._state_fetched) >= _REMEMBERED:
            recent = {each: at for each, at in self._state_fetched.items() if now - at < _STATE_SPACING_SECONDS}
            self._state_fetched = recent
        if now - self._state_fetched.get(rank, -_STATE_SPACING_SECONDS) < _STATE_SPACING_SECONDS:
            return False
        self._state_fetched[rank] = now
        return True

    def done(self, rank: Rank) -> None:
        """A rank was repaired. What was asked for meanwhile stays."""
        self._active.pop(rank, None)
        if rank in self._resyncs:
            self._queue_up(rank, self._resyncs[rank])

    def unfounded(self, rank: Rank, reason: str, now: float) -> float:
        """The worker was asked, and did not confirm the reason. Returns the seconds until it is asked for that again.

        What was asked for meanwhile for the same reason waits as well.
        """
        pause = self._note_false_alarm(rank, reason, now)
        pending_resync = self._resyncs.get(rank)
        if pending_resync is not None and pending_resync.reason == reason and not pending_resync.fresh:
            pending_resync.due = now + pause
        self.done(rank)
        return pause

    def failed(self, rank: Rank, now: float) -> None:
        """A rank was not repaired; it waits for the next try, unless its worker has registered meanwhile."""
        pending_resync = self._active.pop(rank, None)
        if pending_resync is None:
            return
        meanwhile = self._resyncs.get(rank)
        if meanwhile is not None and meanwhile.fresh:
            self._queue_up(rank, meanwhile)
            return
        pending_resync.failures += 1
        pending_resync.due = now + self._pause(pending_resync.failures, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        self._queue_up(rank, pending_resync)

    def forgive(self, now: float) -> list[tuple[Rank, str, int]]:
        """Forgets false alarms that a quiet time has followed. Returns rank, reason and how many there were."""
        over = [key for key, each in self._false_alarms.items() if now - each.until >= _QUIET_SECONDS]
        return [(*key, self._false_alarms.pop(key).count) for key in over]

    def postponed(self, rank: Rank, now: float) -> None:
        """A rank needs its worker's whole state, which was fetched a moment ago: it waits for the spacing to end."""
        pending_resync = self._active.pop(rank, None)
        if pending_resync is not None:
            meanwhile = self._resyncs.get(rank)
            pending_resync.fresh = pending_resync.fresh or (meanwhile is not None and meanwhile.fresh)
            pending_resync.due = max(now, self._state_fetched.get(rank, now) + _STATE_SPACING_SECONDS)
            self._queue_up(rank, pending_resync)

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

    def _queue_up(self, rank: Rank, pending_resync: _Resync) -> None:
        self._resyncs[rank] = pending_resync
        heapq.heappush(self._queue, (pending_resync.due, rank))

    def _next_due(self) -> float | None:
        while self._queue:
            due, rank = self._queue[0]
            pending_resync = self._resyncs.get(rank)
            if pending_resync is not None and pending_resync.due == due and rank not in self._active:
                return due
            heapq.heappop(self._queue)
        return None
