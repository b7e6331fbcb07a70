"""How the ranks of the index follow the registrations of their workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvrouter.core import Rank


@dataclass(frozen=True, slots=True)
class NewIncarnation:
    """A rank is registered with a later incarnation than the index has: it starts empty, at event 0."""

    rank: Rank
    incarnation: int


def new_incarnations(registered: Mapping[Rank, int], indexed: Mapping[Rank, int]) -> list[NewIncarnation]:
    """Ranks whose blocks belong to a life that is over, or that are not in the index yet.

    Args:
        registered: Incarnation by registered rank.
        indexed: Incarnation by rank of the index.
    """
    return [
        NewIncarnation(rank, incarnation)
        for rank, incarnation in sorted(registered.items())
        if indexed.get(rank, -1) < incarnation
    ]


def ahead_of(registered: Mapping[Rank, int], indexed: Mapping[Rank, int]) -> list[Rank]:
    """Ranks that the index has in a later incarnation than the registered one: one of the two is wrong.

    A worker whose clock was ahead once begins an incarnation below its last one when etcd has lost its record.
    """
    return sorted(rank for rank, incarnation in registered.items() if indexed.get(rank, 0) > incarnation)


class Departures:
    """Grants ranks without registration a grace, so that a lease that merely lapsed costs no blocks."""

    def __init__(self, grace_seconds: float) -> None:
        self._grace = grace_seconds
        self._gone_since: dict[Rank, float] = {}

    def expired(self, indexed: Iterable[Rank], registered: Iterable[Rank], now: float) -> list[Rank]:
        """Ranks of the index that have had no registration for longer than the grace.

        Args:
            indexed: Ranks of the index.
            registered: Ranks that are registered.
            now: Seconds of a monotonic clock.
        """
        missing = set(indexed) - set(registered)
        self._gone_since = {rank: self._gone_since.get(rank, now) for rank in missing}
        due = sorted(rank for rank, since in self._gone_since.items() if now - since >= self._grace)
        for rank in due:
            del self._gone_since[rank]
        return due
