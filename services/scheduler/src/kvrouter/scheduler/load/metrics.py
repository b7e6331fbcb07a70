"""Load of every rank as metrics, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from kvrouter.scheduler.load.pools import Pools
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_LABELS = ("component", "worker_id", "dp_rank")


class RankLoadMetrics(Collector):
    """Collects the load of every rank that is registered or has bookings, and its relative latency if registered."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Returns the families without samples, so that registering reads nothing."""
        return iter(_families())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Returns the families with a sample for each rank."""
        families = _families()
        for pool in self._pools:
            for (worker_id, dp_rank), load in pool.booked_load.load_by_rank().items():
                labels = (str(pool.name), str(worker_id), str(dp_rank))
                for family, value in zip(families, load[:3], strict=False):
                    family.add_metric(labels, value)
            for (worker_id, dp_rank), latency in zip(
                pool.worker_set.ranks, pool.booked_load.relative_latency().tolist(), strict=True
            ):
                families[-1].add_metric((str(pool.name), str(worker_id), str(dp_rank)), latency)
        return iter(families)


def _families() -> list[GaugeMetricFamily]:
    return [
        GaugeMetricFamily("kvrouter_scheduler_active_blocks", "Distinct blocks of booked requests.", labels=_LABELS),
        GaugeMetricFamily(
            "kvrouter_scheduler_prefill_tokens", "Prompt tokens booked and not yet computed.", labels=_LABELS
        ),
        GaugeMetricFamily("kvrouter_scheduler_active_requests", "Booked requests.", labels=_LABELS),
        GaugeMetricFamily(
            "kvrouter_scheduler_relative_latency",
            "Measured prefill time over that of the component, as mode forecast learned it; 1 while unknown.",
            labels=_LABELS,
        ),
    ]
