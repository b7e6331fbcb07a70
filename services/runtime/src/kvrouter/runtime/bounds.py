"""How full the bounded parts of a process are: queues, buffers, connection limits and caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

WhenFull = Literal["refuses", "drops", "evicts"]
"""What happens to what no longer fits: it is refused, lost, or replaces the least useful entry."""


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
        """Adds a bound, or replaces the one of that name.

        Args:
            name: Label of the bound, with its unit, such as ``recording_queue_requests``.
            used: Returns how much is in use.
            limit: The most that may be in use; 0 for no limit.
            when_full: What happens to what no longer fits.
        """
        self._bounds[name] = _Bound(when_full, used, limit if callable(limit) else lambda: limit)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields fill level and limit of each bound that has a limit."""
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
