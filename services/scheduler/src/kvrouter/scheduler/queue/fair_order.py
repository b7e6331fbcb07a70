"""The order of queued requests of several tenants.

Requests of one tenant are sorted by their place. Between tenants whose next requests have equal priority, the one is
next whose use is least:

    use of a tenant = tokens of its requests on ranks / weight of the tenant

So a tenant below its share of the ranks is always next, and nobody gains from having been idle. With a
single tenant the places alone decide.

A pass may prefer some requests, those for a rank with a free slot. Then a tenant's next request is the first preferred
one among its first LOOKAHEAD of equal priority, or the first of all if there is none.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from kvrouter.scheduler.request.options import Tenant

LOOKAHEAD = 64
"""Requests of a tenant among which a preferred one passes the others."""

T = TypeVar("T", bound=Hashable)

Place: TypeAlias = tuple[int, float]
"""Sort key of a request: its priority, then the preference of its policy."""


class Entry(NamedTuple, Generic[T]):
    """A queued request in the order of its tenant. Numbers separate equal places."""

    place: Place
    number: int
    request: T
    tokens: int


@dataclass(slots=True)
class _Share(Generic[T]):
    weight: float
    order: list[Entry[T]] = field(default_factory=list)
    ages: list[tuple[float, int, T]] = field(default_factory=list)
    tried_to: tuple[Place, int] = (0, 0.0), 0
    resumes: bool = False
    """Whether the next pass begins at ``tried_to``."""
    forced: int = 0
    """Number of its last request that left for lost patience."""


class FairOrder(Generic[T]):
    """The order. Times are parameters."""

    def __init__(self, used: Callable[[str], int]) -> None:
        """Starts empty. ``used`` returns the tokens of a tenant's requests on ranks."""
        self._used = used
        self._shares: dict[str, _Share[T]] = {}
        self._forced = 0

    def add(self, tenant: Tenant, entry: Entry[T], since: float) -> None:
        """Adds a request waiting since ``since``, in seconds."""
        share = self._shares.get(tenant.name)
        if share is None:
            forced = min((each.forced for each in self._shares.values()), default=0)
            share = self._shares[tenant.name] = _Share(tenant.weight, forced=forced)
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

    def oldest(self) -> tuple[float, T] | None:
        """Returns the longest-waiting request and since when; None if none waits."""
        oldest = min((share.ages[0] for share in self._shares.values()), default=None, key=_age_key)
        return None if oldest is None else (oldest[0], oldest[2])

    def impatient(self, before: float) -> T | None:
        """Returns the request to release before all others if any has waited since ``before`` or longer, else None.

        All tenants take turns, each with its oldest request: a tenant with a long queue does not delay those whose
        requests wait for a shorter time.
        """
        shares = self._shares.values()
        if not any(share.ages[0][0] <= before for share in shares):
            return None
        return min(shares, key=lambda share: (share.forced, share.ages[0][0])).ages[0][2]

    def force(self, tenant: Tenant) -> None:
        """Records the exit of a tenant's oldest request before all others: other tenants are next."""
        self._forced += 1
        self._shares[tenant.name].forced = self._forced

    def ahead(self, tenant: Tenant, entry: Entry[T]) -> int:
        """Returns how many requests leave before one, if tenants with equal weights take turns."""
        own = self._shares[tenant.name]
        index = bisect_left(own.order, _key(entry), key=_key)
        others = (min(len(share.order), index + 1) for share in self._shares.values() if share is not own)
        return index + sum(others)

    def in_order(self, *, resumed: bool, prefers: Callable[[T], bool] | None = None) -> Iterator[Entry[T]]:
        """Yields the requests as they are now, in order.

        Args:
            resumed: Whether to begin where the last pass ended; see ``pause``.
            prefers: Returns whether a request goes before others of its tenant, asked when it may be next.
        """
        names = list(self._shares)
        shares = [self._shares[name] for name in names]
        orders = [_rotated(share) if resumed else list(share.order) for share in shares]
        if len(orders) == 1 and prefers is None:
            yield from orders[0]
            return
        for order in orders:
            order.reverse()  # the first one is removed in least time at the end
        heap = [(order[-1].place[0], self._used(names[n]) / shares[n].weight, n) for n, order in enumerate(orders)]
        heapify(heap)
        while heap:
            _, used, n = heap[0]
            entry = _pop(orders[n], prefers)
            if orders[n]:
                heapreplace(heap, (orders[n][-1].place[0], used + entry.tokens / shares[n].weight, n))
            else:
                heappop(heap)
            yield entry

    def pause(self, tried: dict[str, Entry[T]]) -> None:
        """Lets the next pass begin behind each tenant's last tried request."""
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


def _pop(order: list[Entry[T]], prefers: Callable[[T], bool] | None) -> Entry[T]:
    """Removes the next request of a tenant, whose order is reversed, and returns it."""
    if prefers is not None:
        priority = order[-1].place[0]
        for index in range(len(order) - 1, max(-1, len(order) - 1 - LOOKAHEAD), -1):
            if order[index].place[0] != priority:
                break
            if prefers(order[index].request):
                return order.pop(index)
    return order.pop()


def _key(entry: Entry[T]) -> tuple[Place, int]:
    return entry.place, entry.number


def _age_key(age: tuple[float, int, T]) -> tuple[float, int]:
    return age[0], age[1]
