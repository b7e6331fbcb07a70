"""Counters increased for every request or block, on one thread.

A counter of the client library checks its labels and locks its value, which takes six times as long.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector


class Count:
    """The count with one set of labels."""

    __slots__ = ("created", "value")

    def __init__(self) -> None:
        self.created = time.time()
        """Unix time at which it began, seconds."""
        self.value = 0.0
        """The count, which its users increase."""


class LoopCounter(Collector):
    """A counter whose series are increased on the event loop, and read when it is scraped."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str] = (), *, registry: CollectorRegistry
    ) -> None:
        """Registers it; ``name`` is that of the metric without ``_total``."""
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._series: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def of(self, *values: str) -> Count:
        """Returns the count with these values of the labels."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Count()
        return series

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Yields the counter without series."""
        yield CounterMetricFamily(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yields the counter."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, series in list(self._series.items()):
            family.add_metric(values, series.value, created=series.created)
        yield family
