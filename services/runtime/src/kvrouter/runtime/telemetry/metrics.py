"""Prometheus metrics, and the HTTP ops server that exposes them.

Every service takes the registry for its metrics as an argument, so that several services can share a process and each
test starts with an empty registry.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import structlog
from aiohttp import web
from kvrouter import core
from kvrouter.net.tls import Tls
from kvrouter.runtime.http_server import HttpLimits, serving_http, share_of_descriptors
from kvrouter.runtime.http_strangers import nobody
from kvrouter.runtime.telemetry.event_loop import EventLoopMetrics
from kvrouter.runtime.telemetry.health import HealthBoard
from kvrouter.runtime.telemetry.metrics_handler import MetricsHandler
from kvrouter.runtime.telemetry.tls import TlsMetrics
from kvrouter.runtime.version import VERSION
from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    Info,
    generate_latest,
)

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


def ops_application(registry: CollectorRegistry, health: HealthBoard) -> web.Application:
    """Returns the application with ``/metrics``, ``/health`` (always 200) and ``/ready`` (200, or 503 if not ready)."""

    async def exposition() -> bytes:
        return generate_latest(registry)

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
    bind: str, registry: CollectorRegistry, health: HealthBoard, *, header_seconds: float, tls: Tls | None = None
) -> AsyncIterator[str]:
    """Serves the ops endpoints while the context lasts; yields their address, host:port, or "" if ``bind`` is empty.

    Args:
        bind: Address to listen on.
        registry: Metrics to expose; the server's own are added.
        health: Readiness of the services.
        header_seconds: Maximum time for the headers of a request.
        tls: Encrypts connections; None for plain text.

    Raises:
        BindFailed: the port is in use or the address is not one of this machine's.
    """
    TlsMetrics(registry, tls)
    event_loop = asyncio.create_task(EventLoopMetrics(registry).run(), name="event-loop-metrics")
    try:
        async with _serving(bind, registry, health, header_seconds=header_seconds, tls=tls) as bound:
            yield bound
    finally:
        event_loop.cancel()


@asynccontextmanager
async def _serving(
    bind: str, registry: CollectorRegistry, health: HealthBoard, *, header_seconds: float, tls: Tls | None
) -> AsyncIterator[str]:
    if not bind:
        yield ""
        return
    host, _, port = bind.rpartition(":")
    limits = HttpLimits(min(_MAX_CONNECTIONS, share_of_descriptors(1 / 8)), header_seconds)
    application = ops_application(registry, health)
    address = (host.strip("[]") or None, int(port))
    async with serving_http(
        application, *address, limits, registry, name="ops", tls=tls, recognizes=nobody, shutdown_timeout=1.0
    ) as (_, bound):
        log.info("http.listening", address=f"{host}:{bound}", encrypted=tls is not None)
        yield f"{host}:{bound}"
