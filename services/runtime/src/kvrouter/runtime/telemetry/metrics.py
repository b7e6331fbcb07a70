"""Prometheus metrics and the small HTTP server beside each service that shows them.

Every service object takes the registry that its metrics go to, so that several services share a process and tests start
from nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import structlog
from aiohttp import web
from kvrouter import core
from kvrouter.runtime.http_server import HttpLimits, serving_http, share_of_descriptors
from kvrouter.runtime.telemetry.health import HealthBoard
from kvrouter.runtime.version import VERSION
from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    Info,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

log = structlog.get_logger(component="ops")

_MAX_CONNECTIONS = 256
"""Scrapers and probes."""


def new_registry() -> CollectorRegistry:
    """A registry with the figures of the process: release, core, memory, CPU time, open files, garbage collection."""
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
    """``/metrics``; ``/health``: the process answers; ``/ready``: 200 if every service in it is ready, else 503."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def alive(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def ready(_: web.Request) -> web.Response:
        body = {"ready": health.ready, "services": dict(health.services)}
        return web.json_response(body, status=200 if health.ready else 503)

    routes: list[tuple[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]] = [
        ("/metrics", metrics),
        ("/health", alive),
        ("/ready", ready),
    ]
    application = web.Application()
    application.add_routes([web.get(path, handler) for path, handler in routes])
    return application


@asynccontextmanager
async def serving_ops(
    bind: str, registry: CollectorRegistry, health: HealthBoard, *, header_seconds: float
) -> AsyncIterator[str]:
    """The ops server while the context lasts; yields its address, host:port, or nothing where ``bind`` is empty.

    Args:
        bind: The address to listen on.
        registry: The metrics that it shows, its own among them.
        health: What is ready.
        header_seconds: Time for the headers of a request.

    Raises:
        BindFailed: the address cannot be listened on.
    """
    if not bind:
        yield ""
        return
    host, _, port = bind.rpartition(":")
    limits = HttpLimits(min(_MAX_CONNECTIONS, share_of_descriptors(1 / 8)), header_seconds)
    application = ops_application(registry, health)
    address = (host.strip("[]") or None, int(port))
    async with serving_http(application, *address, limits, registry, name="ops", shutdown_timeout=1.0) as (_, bound):
        log.info("http.listening", address=f"{host}:{bound}")
        yield f"{host}:{bound}"
