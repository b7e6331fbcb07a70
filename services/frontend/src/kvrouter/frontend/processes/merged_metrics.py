"""Merges the metrics of several processes into one exposition.

Counters and histograms are summed, including the counts of processes that died since: Prometheus takes a sum that
falls for a restart. Gauges keep one series for each process, with the label ``process``: only some of them add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_SUMMED = ("counter", "histogram")

_Series = tuple[str, tuple[tuple[str, str], ...]]
"""Name of a sample and its labels."""


class MergedMetrics(Collector):
    """The metrics of all processes, as they reported them last."""

    def __init__(self) -> None:
        self._current: dict[str, list[Metric]] = {}
        self._families: dict[str, tuple[str, str]] = {}
        """Help text and type of each summed family."""
        self._ended: dict[str, dict[_Series, float]] = {}
        """Counts of processes that died, by family."""

    def report(self, process: str, text: str) -> None:
        """Replaces the metrics of a process by the given exposition."""
        self._current[process] = list(text_string_to_metric_families(text))

    def end(self, process: str) -> None:
        """Keeps the counts of a process that has died, and drops its gauges."""
        for family in self._current.pop(process, ()):
            if family.type in _SUMMED:
                self._families[family.name] = family.documentation, family.type
                _add(self._ended.setdefault(family.name, {}), [family])

    def exposition(self) -> bytes:
        """Returns the merged metrics in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: the names are known only when a process has reported."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yields the merged families."""
        summed = {name: dict(counts) for name, counts in self._ended.items()}
        families = dict(self._families)
        gauges: dict[str, Metric] = {}
        for process, reported in self._current.items():
            for family in reported:
                if family.type in _SUMMED:
                    families[family.name] = family.documentation, family.type
                    _add(summed.setdefault(family.name, {}), [family])
                    continue
                gauge = gauges.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    gauge.add_sample(sample.name, {**sample.labels, "process": process}, sample.value)
        for name, counts in summed.items():
            merged = Metric(name, *families[name])
            for (sample_name, labels), value in counts.items():
                merged.add_sample(sample_name, dict(labels), value)
            yield merged
        yield from gauges.values()


def _add(counts: dict[_Series, float], families: Iterable[Metric]) -> None:
    for family in families:
        for sample in family.samples:
            series = sample.name, tuple(sample.labels.items())
            counts[series] = counts.get(series, 0.0) + sample.value
