"""Metrics of certificates and of encrypted connections."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvrouter.net.tls import Tls
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class TlsMetrics(Collector):
    """Metrics of the TLS of a process; nothing without TLS."""

    def __init__(self, registry: CollectorRegistry, tls: Tls | None) -> None:
        self._tls = tls
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics."""
        expires = GaugeMetricFamily(
            "kvrouter_tls_certificate_expiry_timestamp_seconds",
            "Time at which the certificate of this process expires, in seconds since 1970; absent without TLS.",
        )
        reloads = CounterMetricFamily(
            "kvrouter_tls_reloads",
            "Changed certificate files, by result: used, or refused while the previous ones stay in use.",
            labels=["result"],
        )
        handshakes = CounterMetricFamily(
            "kvrouter_tls_handshakes", "Encrypted connections to this process that began, accepted or refused."
        )
        if self._tls is not None:
            files = self._tls.files
            if math.isfinite(files.current().expires):
                expires.add_metric([], files.current().expires)
            reloads.add_metric(["used"], files.reloads)
            reloads.add_metric(["refused"], files.failed_reloads)
            handshakes.add_metric([], self._tls.handshakes)
        yield expires
        yield reloads
        yield handshakes
