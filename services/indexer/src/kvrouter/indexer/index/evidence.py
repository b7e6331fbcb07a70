"""Whether the knowledge about a rank is recent: decided without I/O.

Every rank publishes at least one message per heartbeat interval. A rank from which several are missing is *silent*: its
worker, NATS or the stream has stopped, and the index cannot tell which. Its worker is then asked over gRPC, which needs
no NATS. An event, a heartbeat and such a comparison are evidence. A rank whose evidence is older than several heartbeat
intervals is *stale*: it is not verified, whatever was compared before.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from kvrouter.core import Rank

_MISSED_HEARTBEATS = 3
_UNKNOWN_HEARTBEAT_SECONDS = 5.0  # the publisher's default
_LEAST_LIMIT_SECONDS = 3.0  # a publisher that waits for one lost acknowledgement is not silent
_MOST_LIMITS = 8
_JITTER = (0.8, 1.2)


@dataclass(slots=True)
class Evidence:
    """When the index last learnt about a rank; None for never."""

    heard_at: float | None = None
    """Last event or heartbeat of its incarnation."""
    compared_at: float | None = None
    """Last comparison with its worker."""
    news_at: float | None = None
    """Last comparison that found something which the index lacked."""

    @property
    def at(self) -> float | None:
        """The newest of all."""
        return max((at for at in (self.heard_at, self.compared_at) if at is not None), default=None)


def silence_limit(heartbeat_ms: int) -> float:
    """Returns the seconds without a message after which a rank is silent; ``heartbeat_ms`` is 0 where unknown."""
    interval = heartbeat_ms / 1000 or _UNKNOWN_HEARTBEAT_SECONDS
    return max(_LEAST_LIMIT_SECONDS, _MISSED_HEARTBEATS * interval)


def age(at: float | None, now: float) -> float | None:
    """Returns the seconds since ``at``; None where that is None."""
    return None if at is None else max(0.0, now - at)


def exceeds(at: float | None, now: float, limit: float) -> bool:
    """Returns whether ``at`` is further back than ``limit`` seconds; a time that never was is not."""
    return at is not None and now - at > limit


@dataclass(slots=True)
class _Schedule:
    requested_at: float
    spacing: float
    due: float


class SilenceWatch:
    """Chooses the silent ranks to compare with their workers, and when.

    A rank is compared once it is silent, and again after its limit for as long as comparisons find news. Where they
    find none, the time between two doubles, up to eight limits.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._known_since: dict[Rank, float] = {}
        self._schedules: dict[Rank, _Schedule] = {}

    @property
    def silent(self) -> Collection[Rank]:
        """The ranks that were silent at the last call of ``due``."""
        return self._schedules.keys()

    def due(self, limits: Mapping[Rank, float], evidence: Callable[[Rank], Evidence], now: float) -> list[Rank]:
        """Returns the ranks to compare at once.

        Args:
            limits: Silence limit, seconds, of every rank whose worker can be asked.
            evidence: What is known of a rank.
            now: The time.
        """
        # A rank that was never heard of has its limit from when its worker registered.
        self._known_since = {rank: self._known_since.get(rank, now) for rank in limits}
        schedules = {}
        found = []
        for rank, limit in sorted(limits.items()):
            known = evidence(rank)
            if not exceeds(known.heard_at or self._known_since[rank], now, limit):
                continue
            schedule = schedules[rank] = self._schedules.get(rank) or _Schedule(now, limit / 2, now)
            if now < schedule.due:
                continue
            found.append(rank)
            news = known.news_at is not None and known.news_at >= schedule.requested_at
            schedule.spacing = limit if news else min(schedule.spacing * 2, _MOST_LIMITS * limit)
            schedule.requested_at, schedule.due = now, now + schedule.spacing * self._rng.uniform(*_JITTER)
        self._schedules = schedules
        return found
