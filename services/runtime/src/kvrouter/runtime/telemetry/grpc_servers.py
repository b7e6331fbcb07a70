"""Metrics of a process's gRPC servers: how full their bounds are, and the connections that they closed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol
from weakref import WeakKeyDictionary

from kvrouter.net.calls import CallStreamServer
from kvrouter.net.rpc.call_gate import CallGate
from kvrouter.net.rpc.peer_conduct import PeerConduct
from kvrouter.runtime.bounds import WhenFull, bounds_of
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


class _SummedBounds:
    """Bounds of servers, each as one of all servers together."""

    def __init__(self, registry: CollectorRegistry, servers: Callable[[], Iterable[GrpcServer]]) -> None:
        self._bounds = bounds_of(registry)
        self._servers = servers

    def add(
        self,
        name: str,
        used: Callable[[GrpcServer], int],
        limit: Callable[[GrpcServer], int],
        when_full: WhenFull = "refuses",
    ) -> None:
        self._bounds.add(
            name,
            lambda: sum(map(used, self._servers())),
            lambda: sum(map(limit, self._servers())),
            when_full=when_full,
        )


def expose_servers(registry: CollectorRegistry, servers: Callable[[], Iterable[GrpcServer]]) -> None:
    """Exposes the bounds of servers, and counts the connections that they closed."""
    bounds = _SummedBounds(registry, servers)
    bounds.add("grpc_calls", lambda each: each.gate.calls, lambda each: each.gate.max_calls)
    bounds.add(
        "grpc_calls_for_everybody",
        lambda each: len(each.gate.for_everybody),
        lambda each: each.gate.for_everybody.limit,
        "evicts",
    )
    bounds.add(
        "grpc_calls_waiting_for_refusal",
        lambda each: len(each.gate.refusals),
        lambda each: each.gate.refusals.limit,
        "evicts",
    )
    bounds.add(
        "call_streams",
        lambda each: each.call_streams.counts.streams,
        lambda each: each.call_streams.limits.server_streams,
        "evicts",
    )
    bounds.add(
        "call_stream_calls",
        lambda each: each.call_streams.counts.running,
        lambda each: each.call_streams.limits.server_calls,
    )
    bounds.add(
        "unfinished_request_bytes",
        lambda each: each.call_streams.counts.unfinished_bytes,
        lambda each: each.call_streams.limits.server_unfinished_bytes,
    )
    bounds.add(
        "unread_response_bytes",
        lambda each: each.call_streams.counts.unread_bytes,
        lambda each: each.call_streams.limits.server_unread_bytes,
    )
    expose_conduct(registry, lambda: [each.gate.conduct for each in servers()])


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
