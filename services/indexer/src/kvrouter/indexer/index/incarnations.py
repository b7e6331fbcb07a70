"""Decides which incarnation of each rank is current, without I/O.

A batch names its incarnation, and every publisher can name any number, so a batch alone never ends an incarnation. Two
sources can: the worker's registration in etcd, and the worker's own answer at its registered address. The answer takes
precedence over the registration as of the call, whether it is higher or lower: after a
wrong clock or a lost record, a worker may start an incarnation lower than its last one.

Registrations also tell which ranks of the index begin anew, and which have gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from kvrouter.core import Rank

_MAX_CLAIMS = 16
"""Maximum number of unconfirmed incarnations to remember per rank. A forgotten one is checked again."""


class Verdict(Enum):
    """Treatment of a batch because of its incarnation."""

    APPLY = auto()
    """The incarnation is the current one, or nothing contradicts it."""
    FENCED = auto()
    """The incarnation is an earlier one."""
    UNCONFIRMED = auto()
    """The incarnation is a later one, unconfirmed by registration and worker."""
    REFUTED = auto()
    """The worker has denied the incarnation."""


class Incarnations:
    """The incarnations of a component's ranks. Safe to read from any thread; written under the index's lock."""

    def __init__(self) -> None:
        self._registered: dict[Rank, int] = {}
        self._changes = 0
        self._expected: tuple[int, dict[Rank, int]] = (0, {})
        """What ``expected`` returned, and after how many changes."""
        self._answered: dict[Rank, tuple[int | None, int]] = {}
        # By rank: (registered incarnation when the worker was called, its answer).
        self._claims: dict[Rank, tuple[int, ...]] = {}
        self._refuted: dict[Rank, tuple[int, ...]] = {}

    def register(self, registered: Mapping[Rank, int]) -> None:
        """Replaces the registered incarnations. 0 is unknown: a worker without events registers none."""
        self._registered = {rank: incarnation for rank, incarnation in registered.items() if incarnation}
        # A worker's answer stays valid when its lease lapses, but not when it registers another incarnation.
        for rank, (under, _) in list(self._answered.items()):
            if self._registered.get(rank, under) != under:
                self._answered.pop(rank, None)
        self._changes += 1

    def current(self, rank: Rank) -> int | None:
        """Returns the current incarnation of a rank; None if neither worker nor registration names one."""
        registered = self._registered.get(rank)
        answered = self._answered.get(rank)
        if answered is not None and answered[0] == registered:
            return answered[1]
        return registered

    def expected(self) -> dict[Rank, int]:
        """Returns the current incarnation of every registered rank."""
        if self._expected[0] != (changes := self._changes):
            registered = list(self._registered.items())
            self._expected = changes, {rank: self.current(rank) or incarnation for rank, incarnation in registered}
        return self._expected[1]

    def judge(self, rank: Rank, incarnation: int, indexed: int | None) -> Verdict:
        """Returns the treatment of a batch.

        Args:
            rank: The rank of the batch.
            incarnation: The incarnation of the batch.
            indexed: The rank's incarnation in the index; None if the rank is not in the index.
        """
        current = self.current(rank)
        if current is None:
            if indexed is None or incarnation == indexed:
                return Verdict.APPLY
            return Verdict.FENCED if incarnation < indexed else Verdict.UNCONFIRMED
        if incarnation == current:
            return Verdict.APPLY
        if incarnation < current:
            return Verdict.FENCED
        return Verdict.REFUTED if incarnation in self._refuted.get(rank, ()) else Verdict.UNCONFIRMED

    def claim(self, rank: Rank, incarnation: int) -> None:
        """Records an unconfirmed incarnation until the worker answers."""
        claims = self._claims.get(rank, ())
        if incarnation not in claims:
            self._claims[rank] = (*claims, incarnation)[-_MAX_CLAIMS:]

    def claims(self, rank: Rank) -> tuple[int, ...]:
        """Returns the unconfirmed incarnations of a rank, oldest first."""
        return self._claims.get(rank, ())

    def confirm(self, rank: Rank, incarnation: int, claimed: Iterable[int]) -> list[int]:
        """Records the worker's own answer. Returns the refuted claims, in ascending order.

        Args:
            rank: The rank.
            incarnation: The incarnation in the worker's answer.
            claimed: The claims from before the call to the worker. Later claims may be true.
        """
        self._answered[rank] = (self._registered.get(rank), incarnation)
        self._changes += 1
        requested = set(claimed)
        refuted = sorted(claim for claim in requested if claim != incarnation)
        self._claims[rank] = tuple(claim for claim in self.claims(rank) if claim not in requested)
        known = self._refuted.get(rank, ())
        self._refuted[rank] = (*known, *(claim for claim in refuted if claim not in known))[-_MAX_CLAIMS:]
        return refuted

    def forget(self, rank: Rank) -> None:
        """Drops the answers and claims of a departed rank, but not its registration."""
        for known in (self._answered, self._claims, self._refuted):
            known.pop(rank, None)
        self._changes += 1


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

    @property
    def awaited(self) -> bool:
        """Whether a rank is in its grace period."""
        return bool(self._gone_since)

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
