"""The order of jobs several owners have waiting for one thread.

The owner is next that has received least:

    received += work of a slice / weight of the owner        when a job of it takes a turn

An owner beginning to wait counts as having received as much as the one that has received least, so it gains nothing
from having been idle. The jobs of one owner run one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

J = TypeVar("J", bound=Hashable)


class Owner(NamedTuple):
    """For whom a job runs."""

    name: str = ""
    """Tenant, or key of a caller without one; empty if nobody was authenticated."""
    weight: float = 1.0
    """Its share, relative to others'."""
    cache_tenant: str = ""
    """Tenant whose caches are isolated; empty if it shares them with other tenants."""


@dataclass(slots=True)
class _Share(Generic[J]):
    received: float
    waiting: dict[J, None] = field(default_factory=dict)
    begun: deque[J] = field(default_factory=deque)
    """Jobs that have had a turn and need another."""
    running: int = 0


class FairTurns(Generic[J]):
    """The jobs waiting. It knows neither threads nor time."""

    def __init__(self) -> None:
        """Starts empty."""
        self._shares: dict[str, _Share[J]] = {}
        self._waiting = 0

    def __len__(self) -> int:
        """Returns the number of jobs waiting."""
        return self._waiting

    def add(self, owner: Owner, job: J) -> None:
        """Adds a job behind its owner's others."""
        share = self._shares.get(owner.name)
        if share is None:
            received = min((each.received for each in self._shares.values()), default=0.0)
            share = self._shares[owner.name] = _Share(received)
        share.waiting[job] = None
        self._waiting += 1

    def remove(self, owner: Owner, job: J) -> None:
        """Removes a job if it waits."""
        share = self._shares.get(owner.name)
        if share is None:
            return
        if job in share.waiting:
            del share.waiting[job]
        elif job in share.begun:
            share.begun.remove(job)
        else:
            return
        self._waiting -= 1
        self._forget_idle(owner.name)

    def take(self) -> J | None:
        """Returns the job whose turn it is; None if none waits. ``charge`` and ``end`` must follow."""
        ready = [share for share in self._shares.values() if share.begun or share.waiting]
        if not ready:
            return None
        share = min(ready, key=lambda each: each.received)
        job = share.begun.popleft() if share.begun else next(iter(share.waiting))
        share.waiting.pop(job, None)
        share.running += 1
        self._waiting -= 1
        return job

    def charge(self, owner: Owner, work: int) -> None:
        """Counts the work of a turn an owner's job takes."""
        self._shares[owner.name].received += work / owner.weight

    def end(self, owner: Owner, job: J, *, again: bool) -> None:
        """Ends a job's turn; with ``again`` the job waits for another one, before its owner's other jobs."""
        share = self._shares[owner.name]
        share.running -= 1
        if again:
            share.begun.append(job)
            self._waiting += 1
        else:
            self._forget_idle(owner.name)

    def _forget_idle(self, name: str) -> None:
        share = self._shares[name]
        if not (share.waiting or share.begun or share.running):
            del self._shares[name]
