"""Puts the web page together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.recording.popular_prefixes import PopularPrefixes
from kvrouter.frontend.schedulers.indexer_client import IndexerClient
from kvrouter.frontend.web.observer import Observer
from kvrouter.frontend.web.routes import page_routes
from kvrouter.frontend.web.traffic import Traffic
from kvrouter.runtime.contracts import Frontend, Scheduler
from kvrouter.runtime.overview.services import ServiceQueries, registered_addresses
from kvrouter.runtime.process.context import Runtime

_THIS_FRONTEND, _OWN_SCHEDULER = "this Frontend", "in this process"
"""Addresses of services in this process, as the page shows them."""


@asynccontextmanager
async def open_page(
    runtime: Runtime,
    indexers: IndexerClient,
    metrics: FrontendMetrics,
    prefixes: PopularPrefixes | None,
    frontend: Frontend,
    scheduler: Scheduler | None,
    *,
    asks_frontends: bool,
) -> AsyncIterator[Sequence[web.RouteDef]]:
    """Yields the routes of the page, and observes the system meanwhile.

    Args:
        runtime: Its directory lists the services.
        indexers: The Indexers.
        metrics: Metrics of this Frontend.
        prefixes: Counts prefixes; None for no page.
        frontend: This Frontend.
        scheduler: Scheduler of this process no directory lists.
        asks_frontends: Whether other Frontends answer without a key.
    """
    if prefixes is None:
        yield ()
        return
    directory = runtime.directory
    local: dict[str, object] = {_THIS_FRONTEND: frontend}
    if scheduler is not None:
        local[_OWN_SCHEDULER] = scheduler

    def addresses(kind: str) -> list[str]:
        if kind == "frontend":
            return [_THIS_FRONTEND, *registered_addresses(directory, kind, without=runtime.instance_id)]
        return (
            [_OWN_SCHEDULER] if kind == "scheduler" and scheduler is not None else registered_addresses(directory, kind)
        )

    def note() -> str:
        if not directory.is_synced:
            return "etcd does not answer"
        return "" if addresses("scheduler") else "no Scheduler is registered"

    queries = ServiceQueries(addresses, note, tls=lambda: runtime.tls, local=local)
    observer = Observer(
        directory,
        queries,
        indexers,
        prefixes,
        Traffic(metrics),
        frontend_id=(_THIS_FRONTEND, runtime.instance_id),
        asks_frontends=asks_frontends,
    )
    observing = asyncio.create_task(observer.run(), name="web-page")
    try:
        yield page_routes(observer)
    finally:
        observing.cancel()
        await asyncio.wait([observing])
