"""The routes of the web page, below ``/ui/``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Final

from aiohttp import web
from kvrouter.frontend.web.observer import Observer
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
