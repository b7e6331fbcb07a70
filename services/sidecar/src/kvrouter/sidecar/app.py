"""Assembles a sidecar from its parts and runs it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrouter.runtime.telemetry.connection_metrics import CallerMetrics, expose_servers
from kvrouter.runtime.telemetry.health import HealthBoard
from kvrouter.sidecar.engine_options import EngineOptions, options_of_engines, options_of_pod
from kvrouter.sidecar.followed_engines import POD_SOURCE, FollowedEngines, following_engines
from kvrouter.sidecar.settings import SidecarSettings
from prometheus_client import CollectorRegistry


@asynccontextmanager
async def running(
    settings: SidecarSettings, registry: CollectorRegistry, health: HealthBoard
) -> AsyncIterator[FollowedEngines]:
    """Serves the engines while the context lasts; yields at once.

    An engine that is not ready, or not accepted, is tried again for ever. ``health`` has each engine of the options by
    its URL, and the source of those in pods.

    Raises:
        KeyTaken: another process registered the same worker.
    """
    named = {each.url: each for each in options_of_engines(settings)}
    health.announce([*named, *([] if settings.pods is None else [POD_SOURCE])])

    def options_of(url: str) -> EngineOptions:
        return named.get(url) or options_of_pod(settings, url)

    def on_ready(name: str, ready: bool) -> None:
        if name in health.services:
            health.set_ready(name, ready)

    async with following_engines(settings, options_of, registry, on_ready) as engines:
        CallerMetrics(registry, lambda: [server.callers for each in engines.supervisors for server in each.servers])
        expose_servers(registry, lambda: [server.grpc for each in engines.supervisors for server in each.servers])
        yield engines
