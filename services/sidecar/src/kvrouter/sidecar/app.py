"""Assembles a sidecar from its parts and runs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import aiohttp
from kvrouter.engines.keys import EngineKeys
from kvrouter.engines.relay.metrics import RelayMetrics
from kvrouter.engines.servers.http import EngineHttp
from kvrouter.runtime.telemetry.connections import CallerMetrics, expose_servers
from kvrouter.runtime.telemetry.health import HealthBoard
from kvrouter.sidecar.engine_options import options_of_engines
from kvrouter.sidecar.metrics import SidecarMetrics
from kvrouter.sidecar.settings import SidecarSettings
from kvrouter.sidecar.supervisor import EngineSupervisor
from prometheus_client import CollectorRegistry


@asynccontextmanager
async def running(
    settings: SidecarSettings, registry: CollectorRegistry, health: HealthBoard
) -> AsyncIterator[list[EngineSupervisor]]:
    """Serves the engines while the context lasts; yields their supervisors at once.

    An engine that is not ready, or not accepted, is tried again for ever. ``health`` has each engine by its URL.

    Raises:
        KeyTaken: another process registered the same worker.
    """
    options = list(options_of_engines(settings))
    keys = EngineKeys(settings.engine_keys_file)
    health.announce(each.url for each in options)
    # Each running request has a connection of its own.
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:
        engines = [
            EngineSupervisor(
                each,
                EngineHttp(
                    session,
                    each.url,
                    key_headers=partial(keys.headers, settings.component),
                    answer_seconds=settings.answer_seconds,
                ),
                partial(health.set_ready, each.url),
            )
            for each in options
        ]
        SidecarMetrics(registry, engines)
        CallerMetrics(registry, lambda: [server.callers for engine in engines for server in engine.servers])
        expose_servers(registry, lambda: [server for engine in engines for server in engine.servers])
        RelayMetrics(registry, {engine.options.worker_id: engine.relayed for engine in engines})
        async with asyncio.TaskGroup() as tasks:
            for engine in engines:
                tasks.create_task(engine.run())
            try:
                yield engines
            finally:
                for engine in engines:
                    engine.stop()
