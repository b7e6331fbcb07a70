"""Metrics of call streams, read from their counts when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from kvrouter.net.calls import CallStreamCounts
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_GAUGES = {
    "streams": ("kvrouter_call_stream_open", "Open call streams."),
    "running": ("kvrouter_call_stream_running_calls", "Calls that run on call streams."),
}
_COUNTERS = {
    "opened": "Call streams that were opened.",
    "calls": "Calls started on call streams.",
    "messages_sent": "Messages written to call streams.",
    "messages_received": "Messages read from call streams.",
    "items_sent": "Requests or responses written, parts counted one by one; divided by messages: the mean batch.",
    "items_received": "Requests or responses read, parts counted one by one.",
}
_LABELS = ("side", "service")


class CallStreamMetrics(Collector):
    """The metrics of all call streams of a process. ``side`` is server or client, ``service`` whom they connect to."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counts: dict[tuple[str, str], CallStreamCounts] = {}
        registry.register(self)

    def client(self, service: str) -> CallStreamCounts:
        """Returns the counts for this process's streams to servers of a service."""
        return self._counts.setdefault(("client", service), CallStreamCounts())

    def server(self) -> CallStreamCounts:
        """Returns the counts for the streams that others open to this process."""
        return self._counts.setdefault(("server", "this"), CallStreamCounts())

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics."""
        for field, (name, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            for labels, counts in self._counts.items():
                gauge.add_metric(labels, getattr(counts, field))
            yield gauge
        for field, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"kvrouter_call_stream_{field}", text, labels=_LABELS)
            for labels, counts in self._counts.items():
                counter.add_metric(labels, getattr(counts, field))
            yield counter
        yield self._by_reason(
            "ended",
            "Call streams that ended, by reason: closed, lost, silent, idle, draining, replaced (by a further stream at"
            " the limit), credential (no longer valid), unread, failed (by a defect here), or the rule that was broken"
            " (columns, draining_twice, flood, garbage, hello, http2, too_long, unfinished, unknown_call, unknown_kind,"
            " version).",
            "reason",
        )
        yield self._by_reason(
            "failed", "Calls that failed, by gRPC status code, or not_sent, unknown or timed_out.", "outcome"
        )

    def _by_reason(self, field: str, text: str, label: str) -> CounterMetricFamily:
        family = CounterMetricFamily(f"kvrouter_call_stream_{field}", text, labels=(*_LABELS, label))
        for labels, counts in self._counts.items():
            for reason, count in getattr(counts, field).items():
                family.add_metric((*labels, reason), count)
        return family
