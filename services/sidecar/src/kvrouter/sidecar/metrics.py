"""Metrics of the sidecar, read from its engines when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvrouter.sidecar.supervisor import EngineSupervisor
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_COUNTS = {
    "registrations": "Times that the engine was registered: at the start, and whenever it had changed.",
    "outages": "Times that the engine was away for longer than --engine-grace-seconds.",
    "load_failures": "Times that the engine's load could not be read.",
    "unusable_values": "Values of the engine's load that were left out: malformed, not finite, negative or of no rank.",
}
_WORKER = ("worker_id",)


class SidecarMetrics(Collector):
    """Counters and gauges of each engine."""

    def __init__(self, registry: CollectorRegistry, engines: Sequence[EngineSupervisor]) -> None:
        self._engines = engines
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Implements Collector."""
        for name, text in _COUNTS.items():
            counter = CounterMetricFamily(f"kvrouter_sidecar_{name}", text, labels=_WORKER)
            for each in self._engines:
                counter.add_metric([str(each.options.worker_id)], each.counts[name])
            yield counter
        requests = CounterMetricFamily(
            "kvrouter_sidecar_requests",
            "Requests that ended: finished, aborted, refused (the request's fault) or failed (the engine's).",
            labels=(*_WORKER, "result"),
        )
        up = GaugeMetricFamily(
            "kvrouter_sidecar_engine_up", "Whether the engine answered when it was last asked.", labels=_WORKER
        )
        running = GaugeMetricFamily("kvrouter_sidecar_running_requests", "Running requests.", labels=_WORKER)
        for each in self._engines:
            worker = str(each.options.worker_id)
            for result, count in sorted(each.results.items()):
                requests.add_metric([worker, result], count)
            up.add_metric([worker], each.is_up)
            running.add_metric([worker], each.engine.running if each.engine else 0)
        yield from (requests, up, running)
