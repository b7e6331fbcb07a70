"""Metrics of the simulated engine, and of its lateness against its own clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvrouter.mocker.driver import EngineDriver
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_LATENESS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


def lateness_histogram(registry: CollectorRegistry) -> Histogram:
    """Returns the histogram of lateness, which the machine causes, not the engine model."""
    return Histogram(
        "kvrouter_mocker_step_lateness_seconds",
        "Engine seconds by which the outputs of a step were late.",
        buckets=_LATENESS_BUCKETS,
        registry=registry,
    )


class Loads(Collector):
    """Each rank's load and cache, and prompt tokens with those that came out of the cache, read when scraped.

    One collector for all: a registry compares the names of each with those of all others.
    """

    def __init__(self, drivers: Mapping[int, EngineDriver]) -> None:
        self._drivers = drivers

    def collect(self) -> Iterator[Metric]:
        """Yields gauges and counters."""
        loads = {str(dp_rank): driver.engine.load() for dp_rank, driver in self._drivers.items()}
        for field, text in (
            ("running", "Requests that hold KV blocks."),
            ("waiting", "Requests in the queue."),
            ("active_blocks", "KV blocks in use."),
            ("cached_blocks", "KV blocks that hold reusable content and are in use by nobody."),
            ("total_blocks", "KV blocks that there are."),
            ("prefill_tokens", "Tokens to be computed before the next outputs."),
        ):
            gauge = GaugeMetricFamily(f"kvrouter_mocker_{field}", text, labels=["dp_rank"])
            for label, load in loads.items():
                gauge.add_metric([label], getattr(load, field))
            yield gauge
        for total, text in (
            ("prompt_tokens_total", "Prompt tokens of requests that got a first token."),
            ("cached_tokens_total", "Those of them that came out of the cache, in any tier."),
            ("host_tokens_total", "Those of the cached ones that were loaded from host memory."),
            ("shared_tokens_total", "Those of the cached ones that were loaded from shared storage."),
        ):
            family = CounterMetricFamily(f"kvrouter_mocker_{total}", text, labels=["dp_rank"])
            for dp_rank, driver in self._drivers.items():
                family.add_metric([str(dp_rank)], getattr(driver, total))
            yield family
