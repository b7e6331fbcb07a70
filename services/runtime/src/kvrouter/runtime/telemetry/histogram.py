"""Histograms observed for every request or token, on one thread.

A histogram of the client library locks two values and searches its buckets in a loop, which takes ten times as long.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate

from kvrouter.core import Observations
from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LoopHistogram(Collector):
    """A histogram whose series are observed on the event loop, and read when it is scraped."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
        parts: int = 1,
    ) -> None:
        """Registers it.

        Args:
            name: Name of the metric.
            documentation: The measured quantity.
            labels: Names of its labels.
            buckets: Upper bounds of the buckets in ascending order; one without a bound is added. If some are below 0,
                the sum is not shown.
            registry: Registry to add it to.
            parts: Equal parts of each bucket, with bounds of at least 0, in which observations are counted, for
                quantiles in this process.
        """
        self._name = name
        self._documentation = documentation
        self._labels = labels
        lowers = (0.0, *buckets)
        self.bounds = tuple(
            float(upper - (upper - lower) * further / parts)
            for lower, upper in zip(lowers, buckets, strict=False)
            for further in reversed(range(parts))
        )
        """Upper bounds of the parts of all buckets; the last bucket has none."""
        self._parts = parts
        self._series: dict[tuple[str, ...], tuple[float, Observations]] = {}
        """Unix time at which each series began, seconds, and its observations."""
        registry.register(self)

    def of(self, *values: str) -> Observations:
        """Returns the observations with these values of the labels, to be kept by the caller."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = time.time(), Observations(self.bounds)
        return series[1]

    def counts(self) -> tuple[int, ...]:
        """Returns the observations by part of a bucket, of all series together; the last bucket has no upper bound."""
        counts = [0] * (len(self.bounds) + 1)
        for _, series in self._series.values():
            counts = [total + count for total, count in zip(counts, series.counts, strict=True)]
        return tuple(counts)

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """Yields the histogram without series."""
        yield HistogramMetricFamily(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yields the histogram."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        last = slice(self._parts - 1, None, self._parts)
        bounds = [*map(floatToGoString, self.bounds[last]), "+Inf"]
        for values, (created, series) in list(self._series.items()):
            totals = list(accumulate(series.counts))
            family.add_metric(values, list(zip(bounds, [*totals[:-1][last], totals[-1]], strict=True)), series.sum)
            labels = dict(zip(self._labels, values, strict=True))
            if self.bounds[0] < 0:  # Then the family leaves out the count, too.
                family.add_sample(f"{self._name}_count", labels, totals[-1])
            family.add_sample(f"{self._name}_created", labels, created)
        yield family
