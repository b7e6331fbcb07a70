"""The web page, put together, and its routes below ``/ui/``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Final

from aiohttp import web
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.recording.popular_prefixes import PopularPrefixes
from kvrouter.frontend.schedulers.indexer_client import IndexerClient
from kvrouter.frontend.web.observer import Observer
from kvrouter.frontend.web.traffic import Traffic
from kvrouter.runtime.contracts import Frontend, Scheduler
from kvrouter.runtime.overview.services import ServiceQueries, registered_addresses
from kvrouter.runtime.process.context import Runtime
from kvrouter.v1.errors import BadRequest

ROOT: Final = "/ui/"
_FILES = {
    "index.html": "text/html",
    "page.js": "text/javascript",
    "charts.js": "text/javascript",
    "page.css": "text/css",
    "icon.svg": "image/svg+xml",
}
_HEADERS: Mapping[str, str] = {
    # Everything is the Frontend's own, and nothing else may embed it.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
PUBLIC_PATHS: Final = frozenset({"/", ROOT.removesuffix("/"), ROOT, *(f"{ROOT}{name}" for name in _FILES)})
"""Paths that say nothing about the system: the page itself, without its data."""


def page_routes(observer: Observer) -> list[web.RouteDef]:
    """Returns the routes of the page and of its data."""

    async def redirect(request: web.Request) -> web.StreamResponse:  # noqa: ARG001
        return web.Response(status=302, headers={"Location": ROOT})

    async def overview(request: web.Request) -> web.Response:  # noqa: ARG001
        return web.json_response(await observer.overview(), headers=_HEADERS)

    async def decision(request: web.Request) -> web.Response:
        number = request.match_info["decision_id"]
        if not number.isascii() or not number.isdigit() or int(number) >= 1 << 64:
            raise BadRequest("expected the id of a decision", field="decision_id", advice="Send a number of 64 bits.")
        found = await observer.decision(request.query.get("scheduler", ""), int(number))
        return web.json_response(found, headers=_HEADERS)

    return [
        web.get("/", redirect),
        web.get(ROOT.removesuffix("/"), redirect),
        *(_static(name, kind) for name, kind in _FILES.items()),
        web.get(f"{ROOT}data/overview", overview),
        web.get(f"{ROOT}data/decisions/{{decision_id}}", decision),
    ]


def _static(name: str, kind: str) -> web.RouteDef:
    body = (files("kvrouter.frontend.web") / "static" / name).read_bytes()

    async def send(request: web.Request) -> web.Response:  # noqa: ARG001
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)

    return web.get(ROOT if name == "index.html" else f"{ROOT}{name}", send)


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
