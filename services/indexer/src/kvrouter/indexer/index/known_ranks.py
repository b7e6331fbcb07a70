"""Status of each rank, beside the prefix index, and the detection of silent and stale ranks. No I/O.

Every rank publishes at least one message per heartbeat interval. A rank without a message for several intervals is
*silent*: its worker, NATS or the stream has stopped, and the index cannot tell which. It is then compared with its
worker over gRPC, which does not need NATS. Events, heartbeats and comparisons are evidence. A rank whose newest
evidence is older than several intervals is *stale*, and not verified whatever earlier comparisons found.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from kvrouter.core import Rank

_MISSED_HEARTBEATS = 3
_UNKNOWN_HEARTBEAT_SECONDS = 5.0  # the publisher's default
_LEAST_LIMIT_SECONDS = 3.0  # a publisher may wait that long for a lost acknowledgement
_MOST_LIMITS = 8
_JITTER = (0.8, 1.2)


@dataclass(slots=True)
class Evidence:
    """Times of the newest evidence about a rank; None for never."""

    heard_at: float | None = None
    """Time of the last event or heartbeat of its current incarnation."""
    compared_at: float | None = None
    """Time of the last comparison with its worker."""
    news_at: float | None = None
    """Time of the last comparison with a difference."""

    @property
    def at(self) -> float | None:
        """Returns the time of the newest evidence; None if there is none."""
        heard, compared = self.heard_at, self.compared_at
        if heard is None or compared is None:
            return compared if heard is None else heard
        return max(heard, compared)


def silence_limit(heartbeat_ms: int | None) -> float:
    """Returns the time without a message after which a rank is silent, in seconds.

    It is three heartbeat intervals, and at least 3 s. ``heartbeat_ms`` is None if the interval is unknown; 5 s
    are assumed then.
    """
    interval = _UNKNOWN_HEARTBEAT_SECONDS if heartbeat_ms is None else heartbeat_ms / 1000
    return max(_LEAST_LIMIT_SECONDS, _MISSED_HEARTBEATS * interval)


def age(at: float | None, now: float) -> float | None:
    """Returns the seconds since ``at``; None if ``at`` is None."""
    return None if at is None else max(0.0, now - at)


def exceeds(at: float | None, now: float, limit: float) -> bool:
    """Returns whether ``at`` is more than ``limit`` seconds ago; False if ``at`` is None."""
    return at is not None and now - at > limit


@dataclass(slots=True)
class _Schedule:
    requested_at: float
    spacing: float
    due: float


class SilenceWatch:
    """Schedules comparisons of silent ranks with their workers.

    A rank is compared when it becomes silent, and again after each silence limit while comparisons find something new.
    When they find nothing, the interval doubles, up to eight silence limits.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._known_since: dict[Rank, float] = {}
        self._schedules: dict[Rank, _Schedule] = {}
        self._limits: Mapping[Rank, float] = {}
        self._quiet_until = 0.0
        """Time before which none of these ranks can be silent, since evidence only becomes newer."""

    @property
    def silent(self) -> Collection[Rank]:
        """Returns the silent ranks as of the last call of ``due``."""
        return self._schedules.keys()

    def due(self, limits: Mapping[Rank, float], evidence: Callable[[Rank], Evidence], now: float) -> list[Rank]:
        """Returns the ranks to compare now.

        Args:
            limits: Silence limit in seconds of every rank whose worker is reachable by address; the same object until
                it changes.
            evidence: Returns the evidence about a rank.
            now: The current time.
        """
        if limits is self._limits and now <= self._quiet_until:
            return []
        # The limit of a rank without any message counts from the registration of its worker.
        self._known_since = {rank: self._known_since.get(rank, now) for rank in limits}
        schedules = {}
        due = []
        self._limits, self._quiet_until = limits, math.inf
        for rank, limit in sorted(limits.items()):
            known = evidence(rank)
            since = known.heard_at or self._known_since[rank]
            self._quiet_until = min(self._quiet_until, since + limit)
            if not exceeds(since, now, limit):
                continue
            schedule = schedules[rank] = self._schedules.get(rank) or _Schedule(now, limit / 2, now)
            if now < schedule.due:
                continue
            due.append(rank)
            news = known.news_at is not None and known.news_at >= schedule.requested_at
            schedule.spacing = limit if news else min(schedule.spacing * 2, _MOST_LIMITS * limit)
            schedule.requested_at, schedule.due = now, now + schedule.spacing * self._rng.uniform(*_JITTER)
        self._schedules = schedules
        return due


@dataclass(slots=True)
class RankTally:
    """Status of one rank, apart from its blocks and cursor."""

    drifts: int = 0
    """How often its digest differed from the worker's."""
    resynced_unix_ns: int = 0
    """Time at which its blocks were last dropped or replaced, nanoseconds since 1970; 0 for never."""
    resync_reason: str = ""
    """Reason of that change; empty for never."""
    verified: bool = False
    """Whether its state was compared with the worker's and no event was lost since then."""
    drift_at: tuple[int, int] | None = None
    """(incarnation, next event id) at which drift was last detected; None for never."""
    lag_seconds: float = 0.0
    """Time from publishing to applying its newest batch."""
    evidence: Evidence = field(default_factory=Evidence)
    """Times of the newest evidence about it."""


class KnownRanks:
    """The status of all ranks, and which of them are partial."""

    def __init__(self) -> None:
        self._tallies: dict[Rank, RankTally] = {}
        self._partial: set[Rank] = set()

    def is_partial(self, rank: Rank) -> bool:
        """Returns whether blocks of a rank may be missing in the index."""
        return rank in self._partial

    def set_partial(self, rank: Rank, partial: bool) -> None:
        """Sets whether a rank is partial."""
        (self._partial.add if partial else self._partial.discard)(rank)

    def view(self, rank: Rank) -> RankTally:
        """Returns the status of a rank for reading. An unknown rank is not added."""
        return self._tallies.get(rank) or RankTally()

    def tally(self, rank: Rank) -> RankTally:
        """Returns the status of a rank for changes. An unknown rank is added."""
        return self._tallies.get(rank) or self._tallies.setdefault(rank, RankTally())

    def mark_unverified(self, rank: Rank) -> None:
        """Marks a rank as not verified."""
        self.tally(rank).verified = False

    def forget(self, rank: Rank) -> None:
        """Drops the status of a rank."""
        self._tallies.pop(rank, None)
        self._partial.discard(rank)
