"""Serves an engine's HTTP API, and answers 503 while the engine is loading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware
from kvrouter.mocker.serving.control import CONTROL_PREFIX, Control, Handler
from kvrouter.mocker.serving.errors import ApiError
from kvrouter.mocker.serving.http_responses import json_response
from kvrouter.mocker.serving.service import EngineService
from kvrouter.mocker.serving.settings import EngineServerSettings
from kvrouter.runtime.http_server import HttpLimits, serving_http, share_of_descriptors
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

log = structlog.get_logger(component="mocker")

_MAX_BODY_BYTES = 64 << 20
ErrorBody = Callable[[str, ApiError], dict[str, Any]]
"""Returns the body of an error response to a path, in the engine's format."""


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """A running server."""

    url: str
    """URL without a path, http://host:port."""
    service: EngineService
    """The engines behind it."""


def address_of(bind: str) -> tuple[str, int]:
    """Returns host and port of an address."""
    host, _, port = bind.rpartition(":")
    return host.strip("[]"), int(port)


def reachable(host: str) -> str:
    """Returns the host at which other processes of this machine reach a server that listens on ``host``."""
    return "127.0.0.1" if host in ("", "0.0.0.0", "::", "*") else host  # noqa: S104


@asynccontextmanager
async def running(works: Sequence[Coroutine[None, None, None]]) -> AsyncIterator[None]:
    """Runs endless work while the context lasts."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


@asynccontextmanager
async def serving_engine_api(
    settings: EngineServerSettings,
    routes: Sequence[web.RouteDef],
    error_body: ErrorBody,
    is_open: Callable[[str], bool],
    registry: CollectorRegistry,
) -> AsyncIterator[str]:
    """Serves the routes while the context lasts; yields the address, host:port.

    ``is_open`` returns whether a path needs no key.

    Raises:
        BindFailed: the address cannot be listened on.
    """
    loop = asyncio.get_running_loop()
    loaded_at = loop.time() + settings.loading_seconds

    @web.middleware
    async def loading(request: web.Request, handler: Handler) -> web.StreamResponse:
        if loop.time() < loaded_at:
            raise ApiError(503, "the model is loading")
        return await handler(request)

    control = Control(error_body)

    @web.middleware
    async def controlled(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await control.observe(request, handler)

    application = web.Application(
        client_max_size=_MAX_BODY_BYTES,
        middlewares=[_errors_as_json(error_body), loading, _keyed(settings.api_key, is_open), controlled],
    )
    application.add_routes([*routes, *control.routes()])
    limits = HttpLimits(share_of_descriptors(1 / 2), settings.http_header_seconds)
    async with serving_http(
        application,
        *address_of(settings.bind),
        limits,
        registry,
        name="mocker",
        handler_cancellation=True,
        shutdown_timeout=settings.drain_seconds,
    ) as (host, port):
        log.info("http.listening", address=f"{host}:{port}")
        yield f"{host}:{port}"


def _keyed(api_key: SecretStr, is_open: Callable[[str], bool]) -> Middleware:
    expected = f"Bearer {api_key.get_secret_value()}"

    @web.middleware
    async def keyed(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_known = not api_key or request.headers.get("Authorization") == expected
        if is_known or is_open(request.path) or request.path.startswith(CONTROL_PREFIX):
            return await handler(request)
        return json_response({"error": "Unauthorized"}, 401)

    return keyed


def _errors_as_json(error_body: ErrorBody) -> Middleware:
    @web.middleware
    async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            return json_response(error_body(request.path, error), error.status)
        except web.HTTPException as error:
            return json_response({"detail": error.reason}, error.status)

    return errors
