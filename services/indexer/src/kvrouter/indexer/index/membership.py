"""Compares the ranks of the index with the registrations of workers, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvrouter.core import Rank


@dataclass(frozen=True, slots=True)
class NewIncarnation:
    """A rank registered with a later incarnation than the index has. It starts empty, at event 0."""

    rank: Rank
    incarnation: int


def new_incarnations(registered: Mapping[Rank, int], indexed: Mapping[Rank, int]) -> list[NewIncarnation]:
    """Returns the ranks missing in the index, or there with an earlier incarnation; sorted.

    Args:
        registered: Incarnation of each registered rank.
        indexed: Incarnation of each rank in the index.
    """
    return [
        NewIncarnation(rank, incarnation)
        for rank, incarnation in sorted(registered.items())
        if indexed.get(rank, -1) < incarnation
    ]


def ahead_of(registered: Mapping[Rank, int], indexed: Mapping[Rank, int]) -> list[Rank]:
    """Returns the ranks whose incarnation in the index is later than the registered one; sorted.

    One of the two is wrong. It happens to a worker whose clock was ahead once, when etcd has lost its record.
    """
    return sorted(rank for rank, incarnation in registered.items() if indexed.get(rank, 0) > incarnation)


class Departures:
    """Gives ranks without a registration a grace period, to keep their blocks through a lapsed lease."""

    def __init__(self, grace_seconds: float) -> None:
        self._grace = grace_seconds
        self._gone_since: dict[Rank, float] = {}

    def expired(self, indexed: Iterable[Rank], registered: Iterable[Rank], now: float) -> list[Rank]:
        """Returns the ranks of the index without a registration for at least the grace period; sorted.

        Args:
            indexed: Ranks of the index.
            registered: Registered ranks.
            now: Time by a monotonic clock, in seconds.
        """
        missing = set(indexed) - set(registered)
        self._gone_since = {rank: self._gone_since.get(rank, now) for rank in missing}
        due = sorted(rank for rank, since in self._gone_since.items() if now - since >= self._grace)
        for rank in due:
            del self._gone_since[rank]
        return due
