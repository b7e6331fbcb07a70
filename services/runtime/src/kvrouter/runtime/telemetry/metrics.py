"""Prometheus metrics, and the HTTP ops server for them.

Every service takes the registry for its metrics as an argument, so several services can share a process and each
test starts with an empty registry.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
from aiohttp import web
from kvrouter import core
from kvrouter.net.budgets import TokenBucket
from kvrouter.net.decoding import Quarantine
from kvrouter.net.rpc.peer_conduct import EvictableCalls
from kvrouter.net.ticks import TICK_SECONDS, seconds_to_tick
from kvrouter.net.tls import Tls
from kvrouter.runtime.config.settings import ServiceSettings
from kvrouter.runtime.http_connections import nobody
from kvrouter.runtime.http_server import HttpLimits, serving_http, share_of_descriptors
from kvrouter.runtime.telemetry.connection_metrics import TlsMetrics
from kvrouter.runtime.telemetry.health import HealthBoard
from kvrouter.runtime.telemetry.histogram import LoopHistogram
from kvrouter.runtime.version import VERSION
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    Counter,
    Gauge,
    Info,
    Metric,
    generate_latest,
)
from prometheus_client.registry import Collector

log = structlog.get_logger(component="ops")

_MAX_CONNECTIONS = 256
"""Limit of connections to the ops server, which only scrapers and probes use."""


def new_registry() -> CollectorRegistry:
    """Returns a registry with the process's own metrics: release, core, memory, CPU time, open files, collections."""
    registry = CollectorRegistry()
    build = Info(
        "kvrouter_build",
        "Release, and implementation of the core: native (Rust) or reference (Python).",
        registry=registry,
    )
    build.info({"version": VERSION, "core": core.IMPLEMENTATION})
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
        registry.register(collector)
    return registry


Exposition = tuple[bytes, float]
"""All metrics as Prometheus text, and the CPU time to write it, seconds."""


@dataclass(frozen=True)
class _Collected(Collector):
    """Collected metrics, in the form that ``generate_latest`` takes."""

    metrics: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        return self.metrics


def _written(collected: _Collected) -> Exposition:
    began = time.thread_time()
    text = generate_latest(collected)
    return text, time.thread_time() - began


def ops_application(registry: CollectorRegistry, health: HealthBoard) -> web.Application:
    """Returns the application with ``/metrics``, ``/health`` (always 200) and ``/ready`` (200, or 503 if not ready)."""

    async def exposition() -> Exposition:
        # Collected on the event loop, where series change. Written in a thread, which takes several times as long.
        began = time.thread_time()
        collected = _Collected(list(registry.collect()))
        seconds = time.thread_time() - began
        text, written_in = await asyncio.to_thread(_written, collected)
        return text, seconds + written_in

    async def alive(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def ready(_: web.Request) -> web.Response:
        body = {"ready": health.ready, "services": dict(health.services)}
        return web.json_response(body, status=200 if health.ready else 503)

    routes: list[tuple[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]] = [
        ("/metrics", MetricsHandler(exposition).send),
        ("/health", alive),
        ("/ready", ready),
    ]
    application = web.Application()
    application.add_routes([web.get(path, handler) for path, handler in routes])
    return application


@asynccontextmanager
async def serving_ops(
    settings: ServiceSettings, registry: CollectorRegistry, health: HealthBoard, tls: Tls | None
) -> AsyncIterator[str]:
    """Serves the ops endpoints while the context lasts; yields their address, host:port, or "" if there is none.

    Args:
        settings: Have the address to listen on.
        registry: Metrics to expose; the server's own are added.
        health: Readiness of the services.
        tls: Encrypts connections; None for plain text.

    Raises:
        BindFailed: the port is in use or the address is not one of this machine's.
    """
    TlsMetrics(registry, tls)
    event_loop = asyncio.create_task(EventLoopMetrics(registry).run(), name="event-loop-metrics")
    try:
        async with _serving(settings, registry, health, tls) as bound:
            yield bound
    finally:
        event_loop.cancel()


@asynccontextmanager
async def _serving(
    settings: ServiceSettings, registry: CollectorRegistry, health: HealthBoard, tls: Tls | None
) -> AsyncIterator[str]:
    if not settings.http_bind:
        yield ""
        return
    host, _, port = settings.http_bind.rpartition(":")
    limits = HttpLimits(min(_MAX_CONNECTIONS, share_of_descriptors(1 / 8)), settings.http_header_seconds)
    application = ops_application(registry, health)
    address = (host.strip("[]") or None, int(port))
    async with serving_http(
        application, *address, limits, registry, name="ops", tls=tls, recognizes=nobody, shutdown_timeout=1.0
    ) as (_, bound):
        log.info("http.listening", address=f"{host}:{bound}", encrypted=tls is not None)
        yield f"{host}:{bound}"


_MOST_UNREAD = 16
"""Responses sent at once. A further one ends the oldest."""
_SECONDS = 10.0
"""Time for a client to read a response, seconds."""
_SHARE = 0.05
"""Share of a core that expositions may use for good. Beyond it, requests get the newest one."""
_BURST_SECONDS = 1.0
"""CPU time they may use at once, seconds."""


class MetricsHandler:
    """Handles requests for metrics with the newest exposition."""

    def __init__(self, exposition: Callable[[], Awaitable[Exposition]]) -> None:
        """``exposition`` collects and writes all metrics."""
        self._exposition = exposition
        self._newest = b""
        self._time = TokenBucket(_SHARE, _BURST_SECONDS)
        self._exposing = asyncio.Lock()
        self.sending = EvictableCalls(_MOST_UNREAD)
        """Responses on the way."""

    async def send(self, request: web.Request) -> web.StreamResponse:
        """Sends the metrics."""
        body = await self._current()
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE_LATEST})
        response.content_length = len(body)
        try:
            async with asyncio.timeout(_SECONDS) as timeout:
                with self.sending.running(timeout):
                    await response.prepare(request)
                    await response.write(body)
                    await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _current(self) -> bytes:
        async with self._exposing:
            if self._time.level() > 0 or not self._newest:
                self._newest, seconds = await self._exposition()
                self._time.take(seconds)
            return self._newest


PERIOD_S = TICK_SECONDS
"""Interval between two measurements, seconds."""

_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


async def lateness() -> AsyncIterator[float]:
    """Yields every ``PERIOD_S`` how many seconds late a timer of the event loop was."""
    while True:
        seconds = seconds_to_tick(PERIOD_S)
        due = time.monotonic() + seconds
        await asyncio.sleep(seconds)
        yield max(0.0, time.monotonic() - due)


class EventLoopMetrics:
    """The lateness of a process's event loop as a histogram."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._late = LoopHistogram(
            "kvrouter_event_loop_late_seconds",
            "Lateness of a timer of the event loop: the time that a new connection, a lease or a probe waits.",
            buckets=_BUCKETS,
            registry=registry,
        ).of()

    async def run(self) -> None:
        """Measures until cancelled."""
        async for seconds in lateness():
            self._late.observe(seconds)


MAX_MODELS = 256
"""Models with series of their own."""
OTHER_MODELS = "other"
"""Label of further models."""


def model_label(model: str, labelled: Collection[str]) -> str:
    """Returns the label of a model: its name, or ``OTHER_MODELS`` if too many others have series already."""
    return model if model in labelled or len(labelled) < MAX_MODELS else OTHER_MODELS


def metered_quarantine(registry: CollectorRegistry) -> Quarantine:
    """Returns the quarantine of a process, which counts its rejections in the registry."""
    rejected = Counter(
        "kvrouter_quarantined",
        "Entries of etcd and messages of NATS that were quarantined because they cannot be decoded.",
        ["source", "reason"],
        registry=registry,
    )
    entries = Gauge("kvrouter_quarantined_entries", "Keys and subjects in quarantine.", registry=registry)
    quarantine = Quarantine(lambda source, reason: rejected.labels(source=source, reason=reason).inc())
    entries.set_function(lambda: quarantine.size)
    return quarantine
