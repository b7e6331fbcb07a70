"""Metrics of the endpoint picker."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class PickerMetrics:
    """What the endpoint picker counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "kvrouter_endpoint_picker_requests",
            "Requests of gateways by gRPC code: OK when the response ended, CANCELLED when the client disconnected.",
            ["code"],
            registry=registry,
        )
        self.fallbacks = Counter(
            "kvrouter_endpoint_picker_fallbacks",
            "Requests that another endpoint served than the chosen one.",
            registry=registry,
        )
        self.running = Gauge(
            "kvrouter_endpoint_picker_running_requests", "Requests of gateways in progress.", registry=registry
        )
