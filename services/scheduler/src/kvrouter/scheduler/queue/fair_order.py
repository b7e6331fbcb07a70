"""The order of queued requests that several tenants share.

Requests of one tenant are sorted by their place. Between tenants whose next requests have equal priority, the one is
next that has received least:

    received += tokens of the request / weight of the tenant        when a request leaves for a rank

A tenant that begins to queue counts as having received as much as the one that has received least, so it gains nothing
from having been idle. With a single tenant the order is that of the places.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Generic, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T", bound=Hashable)

Place: TypeAlias = tuple[int, float]
"""Sort key of a request: its negative priority, then what its policy prefers."""


class Tenant(NamedTuple):
    """Whose request it is."""

    name: str = ""
    """Name; requests without one count as those of one tenant."""
    weight: float = 1.0
    """Its share, relative to others'."""


class Entry(NamedTuple, Generic[T]):
    """A queued request in the order of its tenant. Numbers separate equal places."""

    place: Place
    number: int
    request: T
    tokens: int


@dataclass(slots=True)
class _Share(Generic[T]):
    weight: float
    received: float
    order: list[Entry[T]] = field(default_factory=list)
    ages: list[tuple[float, int, T]] = field(default_factory=list)
    tried_to: tuple[Place, int] = (0, 0.0), 0
    resumes: bool = False
    """Whether the next pass begins at ``tried_to``."""
    forced: int = 0
    """Number of its last request that left without room."""


class FairOrder(Generic[T]):
    """The order. It knows nothing of time but what it is given."""

    def __init__(self) -> None:
        """Starts empty."""
        self._shares: dict[str, _Share[T]] = {}
        self._forced = 0

    def add(self, tenant: Tenant, entry: Entry[T], since: float) -> None:
        """Adds a request that has waited since ``since``, in seconds."""
        share = self._shares.get(tenant.name)
        if share is None:
            received = min((each.received for each in self._shares.values()), default=0.0)
            share = self._shares[tenant.name] = _Share(tenant.weight, received)
        share.weight = tenant.weight
        insort(share.order, entry, key=_key)
        insort(share.ages, (since, entry.number, entry.request), key=_age_key)

    def remove(self, tenant: Tenant, entry: Entry[T], since: float) -> None:
        """Removes a request."""
        share = self._shares[tenant.name]
        del share.order[bisect_left(share.order, _key(entry), key=_key)]
        del share.ages[bisect_left(share.ages, (since, entry.number), key=_age_key)]
        if not share.order:
            del self._shares[tenant.name]

    def replace(self, tenant: Tenant, before: Entry[T], after: Entry[T]) -> None:
        """Moves a request to another place."""
        share = self._shares[tenant.name]
        del share.order[bisect_left(share.order, _key(before), key=_key)]
        insort(share.order, after, key=_key)

    def receive(self, tenant: Tenant, tokens: int) -> None:
        """Notes that a request of a tenant leaves. Call it before the request is removed."""
        share = self._shares[tenant.name]
        share.received += tokens / share.weight

    def oldest(self) -> tuple[float, T] | None:
        """Returns the request that has waited longest and since when; None if none waits."""
        found = min((share.ages[0] for share in self._shares.values()), default=None, key=_age_key)
        return None if found is None else (found[0], found[2])

    def impatient(self, before: float) -> T | None:
        """Returns the request to release without room, of those that wait since ``before`` or longer; None for none.

        Tenants take turns, each with its oldest request.
        """
        waiting = [share for share in self._shares.values() if share.ages[0][0] <= before]
        if not waiting:
            return None
        return min(waiting, key=lambda share: (share.forced, share.ages[0][0])).ages[0][2]

    def force(self, tenant: Tenant) -> None:
        """Notes that the oldest request of a tenant leaves without room, so that others are next."""
        self._forced += 1
        self._shares[tenant.name].forced = self._forced

    def ahead(self, tenant: Tenant, entry: Entry[T]) -> int:
        """Returns how many requests leave before one, if tenants with equal weights take turns."""
        own = self._shares[tenant.name]
        index = bisect_left(own.order, _key(entry), key=_key)
        others = (min(len(share.order), index + 1) for share in self._shares.values() if share is not own)
        return index + sum(others)

    def in_order(self, *, resumed: bool) -> Iterator[Entry[T]]:
        """Yields the requests as they are now, in order.

        Args:
            resumed: Whether to begin with those that the last pass did not reach; see ``pause``.
        """
        shares = list(self._shares.values())
        orders = [_rotated(share) if resumed else list(share.order) for share in shares]
        if len(orders) == 1:
            yield from orders[0]
            return
        heap = [(order[0].place[0], shares[n].received, n, 0) for n, order in enumerate(orders)]
        heapify(heap)
        while heap:
            _, received, n, index = heap[0]
            entry = orders[n][index]
            if index + 1 < len(orders[n]):
                received += entry.tokens / shares[n].weight
                heapreplace(heap, (orders[n][index + 1].place[0], received, n, index + 1))
            else:
                heappop(heap)
            yield entry

    def pause(self, tried: dict[str, Entry[T]]) -> None:
        """Lets the next pass begin behind the last request of each tenant that was tried."""
        for name, entry in tried.items():
            if (share := self._shares.get(name)) is not None:
                share.tried_to, share.resumes = (entry.place, entry.number + 1), True

    def restart(self) -> None:
        """Lets the next pass begin with the first requests."""
        for share in self._shares.values():
            share.resumes = False


def _rotated(share: _Share[T]) -> list[Entry[T]]:
    start = bisect_left(share.order, share.tried_to, key=_key) if share.resumes else 0
    return share.order[start:] + share.order[:start]


def _key(entry: Entry[T]) -> tuple[Place, int]:
    return entry.place, entry.number


def _age_key(age: tuple[float, int, T]) -> tuple[float, int]:
    return age[0], age[1]
