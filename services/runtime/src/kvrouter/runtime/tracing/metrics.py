"""Metrics of tracing."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class TracingMetrics:
    """Counts spans, so that it shows if a collector is away or too slow."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ended = Counter("kvrouter_trace_spans", "Spans that were sampled and have ended.", registry=registry)
        self.exported = Counter(
            "kvrouter_trace_spans_exported",
            "Spans by outcome of their export: exported or failed. Those that are neither are queued or were dropped.",
            ["outcome"],
            registry=registry,
        )
