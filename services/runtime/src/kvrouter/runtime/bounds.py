"""Bounds of queues and rooms: fill levels, limits, and fair shares."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

WhenFull = Literal["refuses", "drops", "evicts"]
"""Fate of an entry beyond the bound: it is refused, lost, or replaces the least useful entry."""


class _Bound(NamedTuple):
    when_full: WhenFull
    used: Callable[[], float]
    limit: Callable[[], float]


class Bounds(Collector):
    """The bounds of a registry with their fill levels, read when they are scraped. See ``bounds_of``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._bounds: dict[str, _Bound] = {}
        registry.register(self)

    def add(
        self,
        name: str,
        used: Callable[[], float],
        limit: float | Callable[[], float],
        *,
        when_full: WhenFull = "refuses",
    ) -> None:
        """Adds a bound, or replaces the one of the same name.

        Args:
            name: Label of the bound, with its unit, such as ``recording_queue_requests``.
            used: Returns how much is in use.
            limit: The most that may be in use; 0 for no limit.
            when_full: Fate of an entry beyond the bound.
        """
        self._bounds[name] = _Bound(when_full, used, limit if callable(limit) else lambda: limit)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields fill level and limit of each limited bound."""
        labels = ("bound", "when_full")
        used = GaugeMetricFamily("kvrouter_bound_used", "Amount in use of a bounded part.", labels=labels)
        limit = GaugeMetricFamily(
            "kvrouter_bound_limit",
            "Limit of a bounded part. What no longer fits is refused, dropped, or evicts something else.",
            labels=labels,
        )
        for name, bound in self._bounds.items():
            if most := bound.limit():
                used.add_metric((name, bound.when_full), bound.used())
                limit.add_metric((name, bound.when_full), most)
        yield used
        yield limit


_bounds: WeakKeyDictionary[CollectorRegistry, Bounds] = WeakKeyDictionary()


def bounds_of(registry: CollectorRegistry) -> Bounds:
    """Returns the bounds of a registry, which the first call registers."""
    found = _bounds.get(registry)
    if found is None:
        found = _bounds[registry] = Bounds(registry)
    return found


WANTING_S = 5.0
"""Time for which a refused tenant counts as active, seconds: clients retry after one second."""

FREE = 0.75
"""Part of the bound that anybody may fill. The rest is left for tenants below their share: with equal weights, three
quarters taken by one tenant leave the others room until it has shrunk."""


class _Use(msgspec.Struct, eq=False, gc=False):
    amount: float
    requests: int
    weight: float


class FairBound:
    """A bound shared by tenants. It knows amounts and no requests.

        share of a tenant = most * its weight / weights of all active tenants, itself included

    A tenant is active while it has something in use, and for WANTING_S seconds after a refusal: otherwise a tenant
    with everything in use and the most requests would win every free place.

    Below FREE of the bound everybody is admitted. Above, only tenants within their share are, so a tenant in flood
    leaves room for the others. Amounts in use are never taken back: a tenant above its share shrinks as its requests
    end. An amount larger than the bound fits if nothing is in use.
    """

    def __init__(self, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts empty; ``most`` is the limit, 0 for none, and ``clock`` returns seconds."""
        self._clock = clock
        self._wanting: dict[str, tuple[float, float]] = {}
        """Weight of refused tenants, and the time until which they count."""
        self.most = most
        self.used = 0.0
        self._tenants: dict[str, _Use] = {}

    def try_add(self, tenant: str, weight: float, amount: float, *, requests: int = 1, is_forced: bool = False) -> bool:
        """Adds an amount of a tenant. Returns False, and adds nothing, if there is no room for it.

        Args:
            tenant: The tenant.
            weight: Its weight.
            amount: The amount.
            requests: 0 if more is added for a request that has an amount already.
            is_forced: Whether it is added even if there is no room.
        """
        is_free = self.used + amount <= self.most * FREE
        if not (is_free or is_forced) and self.most and self.used and not self._has_room(tenant, weight, amount):
            self._wanting[tenant] = weight, self._clock() + WANTING_S
            return False
        if self._wanting:
            self._wanting.pop(tenant, None)
        if (use := self._tenants.get(tenant)) is None:
            self._tenants[tenant] = _Use(amount, requests, weight)
        else:
            use.amount += amount
            use.requests += requests
            use.weight = weight
        self.used += amount
        return True

    def remove(self, tenant: str, amount: float, *, requests: int = 1) -> None:
        """Removes an added amount; ``requests`` is 0 if its request keeps a rest."""
        use = self._tenants[tenant]
        use.amount -= amount
        use.requests -= requests
        self.used -= amount
        if not use.requests:
            del self._tenants[tenant]
            if not self._tenants:
                self.used = 0.0  # Sums of fractions leave a rest.

    def _has_room(self, tenant: str, weight: float, amount: float) -> bool:
        """Returns whether there is room for an amount beyond FREE of the bound."""
        if self.used + amount > self.most:
            return False
        now = self._clock()
        for name in [name for name, (_, until) in self._wanting.items() if until < now]:
            del self._wanting[name]
        weights = {name: each[0] for name, each in self._wanting.items()}
        weights |= {name: each.weight for name, each in self._tenants.items()}
        weights[tenant] = weight
        own = self._tenants[tenant].amount if tenant in self._tenants else 0.0
        return own + amount <= self.most * weight / sum(weights.values())
