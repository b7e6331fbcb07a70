"""Metrics of a process's gRPC servers: how full their bounds are, and the connections that they closed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol
from weakref import WeakKeyDictionary

from kvrouter.net.call_gate import CallGate
from kvrouter.net.calls import CallStreamServer
from kvrouter.net.peer_conduct import PeerConduct
from kvrouter.runtime.bounds import bounds_of
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector


class GrpcServer(Protocol):
    """What bounds the calls of a server."""

    @property
    def gate(self) -> CallGate:
        """What admits calls."""

    @property
    def call_streams(self) -> CallStreamServer:
        """The call streams."""


Conducts = Callable[[], Iterable[PeerConduct]]


def expose_servers(registry: CollectorRegistry, servers: Callable[[], Iterable[GrpcServer]]) -> None:
    """Exposes the bounds of servers, each as one of all servers together, and counts connections that they closed."""

    def add(
        name: str,
        used: Callable[[GrpcServer], int],
        limit: Callable[[GrpcServer], int],
        *,
        evicts: bool = False,
    ) -> None:
        bounds_of(registry).add(
            name,
            lambda: sum(map(used, servers())),
            lambda: sum(map(limit, servers())),
            when_full="evicts" if evicts else "refuses",
        )

    add("grpc_calls", lambda server: server.gate.calls, lambda server: server.gate.max_calls)
    add(
        "grpc_calls_for_everybody",
        lambda server: len(server.gate.for_everybody),
        lambda server: server.gate.for_everybody.limit,
        evicts=True,
    )
    add(
        "call_streams",
        lambda server: server.call_streams.counts.streams,
        lambda server: server.call_streams.limits.server_streams,
        evicts=True,
    )
    add(
        "call_stream_calls",
        lambda server: server.call_streams.counts.running,
        lambda server: server.call_streams.limits.server_calls,
    )
    add(
        "unfinished_request_bytes",
        lambda server: server.call_streams.counts.unfinished_bytes,
        lambda server: server.call_streams.limits.server_unfinished_bytes,
    )
    add(
        "unread_response_bytes",
        lambda server: server.call_streams.counts.unread_bytes,
        lambda server: server.call_streams.limits.server_unread_bytes,
    )
    expose_conduct(registry, lambda: [server.gate.conduct for server in servers()])


def expose_conduct(registry: CollectorRegistry, conducts: Conducts) -> None:
    """Counts the connections that were closed, besides those of earlier calls with this registry."""
    closed = _closed.get(registry)
    if closed is None:
        closed = _closed[registry] = _ClosedConnections(registry)
    closed.conducts.append(conducts)


class _ClosedConnections(Collector):
    """Counts the connections that the gRPC servers of a registry closed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.conducts: list[Conducts] = []
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yields the metric."""
        closed = CounterMetricFamily(
            "kvrouter_grpc_connections_closed",
            "gRPC connections closed because of too many calls without a credential.",
        )
        closed.add_metric([], sum(conduct.closed for conducts in self.conducts for conduct in conducts()))
        yield closed


_closed: WeakKeyDictionary[CollectorRegistry, _ClosedConnections] = WeakKeyDictionary()
