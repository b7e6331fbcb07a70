"""Queued requests as metrics, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from kvrouter.scheduler.queue.queued_requests import QueuedRequests
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class QueueMetrics(Collector):
    """Collects length and oldest age of every component's queue."""

    def __init__(self, queued: QueuedRequests) -> None:
        self._queued = queued

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Returns the families without samples, so that registering reads nothing."""
        return iter(_families())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Returns the families with a sample for each component that has queued any request."""
        families = _families()
        for name, depth in self._queued.depths().items():
            for family, value in zip(families, depth, strict=True):
                family.add_metric([str(name)], value)
        return iter(families)


def _families() -> list[GaugeMetricFamily]:
    labels = ["component"]
    return [
        GaugeMetricFamily("kvrouter_scheduler_queue_length", "Queued requests.", labels=labels),
        GaugeMetricFamily(
            "kvrouter_scheduler_queued_oldest_seconds", "Time since the oldest queued request arrived.", labels=labels
        ),
    ]
