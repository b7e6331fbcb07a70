"""Metrics of connections that a gRPC server closed."""

from __future__ import annotations

from collections.abc import Iterator

from kvrouter.net.peer_conduct import PeerConduct
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector


class ClosedConnections(Collector):
    """Counts the connections of a gRPC server that were closed."""

    def __init__(self, registry: CollectorRegistry, conduct: PeerConduct) -> None:
        self._conduct = conduct
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yields the metric."""
        closed = CounterMetricFamily(
            "kvrouter_grpc_connections_closed",
            "gRPC connections closed because of too many calls without a credential.",
        )
        closed.add_metric([], self._conduct.closed)
        yield closed
