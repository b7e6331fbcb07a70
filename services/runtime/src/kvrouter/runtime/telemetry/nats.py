"""Metrics of the NATS connection of a process."""

from __future__ import annotations

import math

import nats.errors
from kvrouter.net.nats.connection import NatsObserver
from prometheus_client import CollectorRegistry, Counter, Gauge


class NatsMetrics(NatsObserver):
    """Metrics of the NATS connections of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.connected = Gauge(
            "kvrouter_nats_connected",
            "1 while NATS is connected, 0 while it should be, NaN where it is not used.",
            registry=registry,
        )
        self.connected.set(math.nan)
        self.disconnects = Counter("kvrouter_nats_disconnects", "Lost connections.", registry=registry)
        self.slow_consumers = Counter(
            "kvrouter_nats_slow_consumers", "Messages dropped because a subscription was full.", registry=registry
        )
        self.errors = Counter("kvrouter_nats_errors", "Other errors of NATS connections.", registry=registry)

    def on_connected(self) -> None:
        """Implements NatsObserver."""
        self.connected.set(1)

    def on_disconnected(self, *, lost: bool) -> None:
        """Implements NatsObserver."""
        self.connected.set(0)
        if lost:
            self.disconnects.inc()

    def on_error(self, error: Exception) -> bool:
        """Implements NatsObserver."""
        is_full = isinstance(error, nats.errors.SlowConsumerError)
        (self.slow_consumers if is_full else self.errors).inc()
        return False
