"""Assembles a sidecar from its parts and runs it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrouter.runtime.telemetry.connections import CallerMetrics, expose_servers
from kvrouter.runtime.telemetry.health import HealthBoard
from kvrouter.sidecar.engine_options import options_of_engines
from kvrouter.sidecar.followed_engines import FollowedEngines, following_engines
from kvrouter.sidecar.settings import SidecarSettings
from prometheus_client import CollectorRegistry


@asynccontextmanager
async def running(
    settings: SidecarSettings, registry: CollectorRegistry, health: HealthBoard
) -> AsyncIterator[FollowedEngines]:
    """Serves the engines while the context lasts; yields at once.

    An engine that is not ready, or not accepted, is tried again for ever. ``health`` has each engine by its URL.

    Raises:
        KeyTaken: another process registered the same worker.
    """
    named = {each.url: each for each in options_of_engines(settings)}
    health.announce(named)
    async with following_engines(settings, named.__getitem__, registry, health.set_ready) as engines:
        CallerMetrics(registry, lambda: [server.callers for each in engines.supervisors for server in each.servers])
        expose_servers(registry, lambda: [server for each in engines.supervisors for server in each.servers])
        yield engines
