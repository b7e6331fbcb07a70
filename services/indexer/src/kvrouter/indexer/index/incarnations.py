"""Which incarnation of each rank counts: decided without I/O.

A batch names the incarnation that it belongs to, and anyone who can publish can name any number. So a batch alone never
ends an incarnation. Two sources do: the worker's registration in etcd, and the worker itself, asked at its registered
address. The worker's own answer outranks the registration that it was asked under, whether it is higher or lower: a
worker whose clock was wrong once, or whose record was lost, may begin an incarnation below the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, auto

from kvrouter.core import Rank

_MAX_CLAIMS = 16
"""Unconfirmed incarnations that are remembered of one rank. One that is forgotten is asked about again."""


class Verdict(Enum):
    """What to do with a batch, by its incarnation."""

    APPLY = auto()
    """It is the rank's incarnation, or nothing is known that contradicts it."""
    FENCED = auto()
    """It belongs to an earlier incarnation."""
    UNCONFIRMED = auto()
    """It claims a later incarnation that neither the registration nor the worker has confirmed."""
    REFUTED = auto()
    """It claims an incarnation that the worker was asked about and is not in."""


class Incarnations:
    """The incarnations of one component's ranks. Safe to read from several threads; written under the index's lock."""

    def __init__(self) -> None:
        self._registered: dict[Rank, int] = {}
        self._answered: dict[Rank, tuple[int | None, int]] = {}
        # By rank: the registered incarnation under which the worker was asked, and what it answered.
        self._claims: dict[Rank, tuple[int, ...]] = {}
        self._refuted: dict[Rank, tuple[int, ...]] = {}

    def register(self, registered: Mapping[Rank, int]) -> None:
        """Replaces the registrations. An incarnation of 0 is unknown: a worker that does not publish names none."""
        self._registered = {rank: incarnation for rank, incarnation in registered.items() if incarnation}
        # What a worker answered under a registration outlives a lapse of its lease, but not another registration.
        for rank, (under, _) in list(self._answered.items()):
            if self._registered.get(rank, under) != under:
                self._answered.pop(rank, None)

    def current(self, rank: Rank) -> int | None:
        """The incarnation that the rank's worker is in; None where neither it nor its registration says."""
        registered = self._registered.get(rank)
        answered = self._answered.get(rank)
        if answered is not None and answered[0] == registered:
            return answered[1]
        return registered

    def expected(self) -> dict[Rank, int]:
        """The incarnation of every registered rank."""
        return {rank: self.current(rank) or registered for rank, registered in list(self._registered.items())}

    def judge(self, rank: Rank, incarnation: int, indexed: int | None) -> Verdict:
        """What to do with a batch.

        Args:
            rank: The rank that it is about.
            incarnation: The incarnation that it names.
            indexed: The rank's incarnation in the index; None where the index does not know the rank.
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
        """Notes an unconfirmed incarnation, until the worker is asked."""
        claims = self._claims.get(rank, ())
        if incarnation not in claims:
            self._claims[rank] = (*claims, incarnation)[-_MAX_CLAIMS:]

    def claims(self, rank: Rank) -> tuple[int, ...]:
        """The unconfirmed incarnations of a rank, oldest first."""
        return self._claims.get(rank, ())

    def confirm(self, rank: Rank, incarnation: int, claimed: Iterable[int]) -> list[int]:
        """Takes the worker's own answer. Returns the claims that it refutes.

        Args:
            rank: The rank.
            incarnation: The incarnation that the worker is in.
            claimed: The claims that were known before the worker was asked. What was claimed later may be true.
        """
        self._answered[rank] = (self._registered.get(rank), incarnation)
        requested = set(claimed)
        refuted = sorted(claim for claim in requested if claim != incarnation)
        self._claims[rank] = tuple(claim for claim in self.claims(rank) if claim not in requested)
        known = self._refuted.get(rank, ())
        self._refuted[rank] = (*known, *(claim for claim in refuted if claim not in known))[-_MAX_CLAIMS:]
        return refuted

    def forget(self, rank: Rank) -> None:
        """Drops what is known of a rank that is gone, except its registration."""
        for known in (self._answered, self._claims, self._refuted):
            known.pop(rank, None)
