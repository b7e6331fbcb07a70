"""Metrics of the connections of a process: gRPC servers, call streams, callers, TLS, NATS."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from weakref import WeakKeyDictionary

import nats.errors
from kvrouter.net.auth import CallerCheck
from kvrouter.net.calls import CallStreamCounts
from kvrouter.net.http2.received_call import MAX_RECEIVED_BYTES
from kvrouter.net.nats.connection import NatsObserver
from kvrouter.net.rpc.peer_conduct import PeerConduct
from kvrouter.net.rpc.server import GrpcServer
from kvrouter.net.tls import Tls
from kvrouter.runtime.bounds import WhenFull, bounds_of
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Conducts = Callable[[], Iterable[PeerConduct]]


def expose_servers(registry: CollectorRegistry, servers: Callable[[], Iterable[GrpcServer]]) -> None:
    """Exposes the bounds of servers, each as one of all servers together, and counts the connections they closed."""
    bounds = bounds_of(registry)

    def add(
        name: str,
        used: Callable[[GrpcServer], int],
        limit: Callable[[GrpcServer], int],
        when_full: WhenFull = "refuses",
    ) -> None:
        bounds.add(name, lambda: sum(map(used, servers())), lambda: sum(map(limit, servers())), when_full=when_full)

    add("grpc_received_bytes", lambda each: each.received.bytes, lambda _: MAX_RECEIVED_BYTES)
    add("grpc_calls", lambda each: each.gate.calls, lambda each: each.gate.max_calls)
    add(
        "grpc_calls_for_everybody",
        lambda each: len(each.gate.for_everybody),
        lambda each: each.gate.for_everybody.limit,
        "evicts",
    )
    add(
        "grpc_calls_waiting_for_refusal",
        lambda each: len(each.gate.refusals),
        lambda each: each.gate.refusals.limit,
        "evicts",
    )
    add(
        "call_streams",
        lambda each: each.call_streams.counts.streams,
        lambda each: each.call_streams.limits.server_streams,
        "evicts",
    )
    add(
        "call_stream_calls",
        lambda each: each.call_streams.counts.running,
        lambda each: each.call_streams.limits.server_calls,
    )
    add(
        "unfinished_request_bytes",
        lambda each: each.call_streams.counts.unfinished_bytes,
        lambda each: each.call_streams.limits.server_unfinished_bytes,
    )
    add(
        "unread_response_bytes",
        lambda each: each.call_streams.counts.unread_bytes,
        lambda each: each.call_streams.limits.server_unread_bytes,
    )
    expose_conduct(registry, lambda: [each.gate.conduct for each in servers()])


def expose_conduct(registry: CollectorRegistry, conducts: Conducts) -> None:
    """Counts the closed connections, besides those of earlier calls with this registry."""
    closed = _closed.get(registry)
    if closed is None:
        closed = _closed[registry] = _ClosedConnections(registry)
    closed.conducts.append(conducts)


class _ClosedConnections(Collector):
    """Counts the connections the gRPC servers of a registry closed."""

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
        """Returns the counts for the streams others open to this process."""
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


class CallerMetrics(Collector):
    """Counts of the checks of callers in a process."""

    def __init__(self, registry: CollectorRegistry, checks: Callable[[], Iterable[CallerCheck]]) -> None:
        """``checks`` returns those of the process's gRPC servers."""
        self._checks = checks
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yields the metric."""
        refused = CounterMetricFamily(
            "kvrouter_refused_callers",
            "Calls of processes that may not call this one, by reason: role (of the certificate) or token.",
            labels=["reason"],
        )
        for reason in ("role", "token"):
            refused.add_metric([reason], sum(check.refused[reason] for check in self._checks()))
        yield refused


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
