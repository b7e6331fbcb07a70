"""Puts the web page together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.recording.popular_prefixes import PopularPrefixes
from kvrouter.frontend.schedulers.indexer_client import IndexerClient
from kvrouter.frontend.web.observer import Observer, OwnHealth
from kvrouter.frontend.web.routes import page_routes
from kvrouter.frontend.web.traffic import Traffic
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.runtime.overview.services import ServiceQueries, registered_addresses
from kvrouter.runtime.process.context import Runtime


@asynccontextmanager
async def open_page(
    runtime: Runtime,
    indexers: IndexerClient,
    metrics: FrontendMetrics,
    prefixes: PopularPrefixes | None,
    own_health: OwnHealth | None,
) -> AsyncIterator[Sequence[web.RouteDef]]:
    """Yields the routes of the page, and observes the system meanwhile; no routes if ``prefixes`` is None.

    ``own_health`` is set if Frontends ask for a key: it returns this one's own view of the workers.
    """
    if prefixes is None:
        yield ()
        return
    directory = runtime.directory
    queries = ServiceQueries(
        lambda kind: registered_addresses(directory, kind), lambda: _note(directory), tls=lambda: runtime.tls
    )
    observer = Observer(directory, queries, indexers, prefixes, Traffic(metrics), own_health)
    observing = asyncio.create_task(observer.run(), name="web-page")
    try:
        yield page_routes(observer)
    finally:
        observing.cancel()
        await asyncio.wait([observing])


def _note(directory: Directory) -> str:
    if not directory.is_synced:
        return "etcd does not answer"
    return "" if directory.services("scheduler") else "no Scheduler is registered"
