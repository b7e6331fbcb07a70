"""Metrics of calls that were refused because of who called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvrouter.net.auth import CallerCheck
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class CallerMetrics(Collector):
    """Counts of the checks of callers in a process."""

    def __init__(self, registry: CollectorRegistry, checks: Callable[[], Iterable[CallerCheck]]) -> None:
        """``checks`` returns those of the process's gRPC servers."""
        self._checks = checks
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yields the metric."""
        refused = CounterMetricFamily(
            "kvrouter_refused_callers",
            "Calls of processes that may not call this one, by reason: role (of the certificate) or token.",
            labels=["reason"],
        )
        for reason in ("role", "token"):
            refused.add_metric([reason], sum(check.refused[reason] for check in self._checks()))
        yield refused
