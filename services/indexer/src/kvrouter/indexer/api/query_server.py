"""Serves the index to other routers over HTTP: the queries of Mooncake Conductor and of Dynamo's standalone indexer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Protocol

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler
from kvrouter.core import local_hashes
from kvrouter.indexer.api.overlap_queries import ANY_GROUP, HASH_BYTES, TOKEN_BYTES, OverlapQuery
from kvrouter.indexer.api.service import IndexerService
from kvrouter.net.auth import HEADER, CallerCheck
from kvrouter.runtime.bounds import bounds_of
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView, Directory
from kvrouter.runtime.http_server import HttpLimits, note_admitted, serving_http, share_of_descriptors
from kvrouter.runtime.process.context import Runtime
from kvrouter.runtime.rpc import Guard
from kvrouter.v1.error_encoding import http_status
from kvrouter.v1.errors import BlockSizeMismatch, KvRouterError, PromptTooLong, UnknownComponent
from kvrouter.v1.indexer_pb2 import FindMatchesResponse

log = structlog.get_logger(component="indexer")

_METHOD = "kvrouter.v1.IndexerService/FindMatches"
"""The call whose permission a query needs."""
_BEARER = "bearer "
_MAX_QUERIES = 64
"""Queries under way, from the first byte of the body."""
_QUERY_SECONDS = 10.0
"""Time for a query, its body included, in seconds."""
_LONG_PROMPT_BYTES = 16_384 * TOKEN_BYTES
"""Longer prompts are hashed in a thread."""
_NUMBER_BYTES = 21
"""Longest element of a list in a body: a hash, a comma and a sign."""
_MAX_FIELDS_BYTES = 64 << 10
_OPEN_PATHS = frozenset({"/health"})


class HttpGuard(Guard, Protocol):
    """Authenticates callers by their headers."""

    def recognizes(self, head: bytes) -> bool:
        """Returns whether the beginning of a request shows a valid credential."""


@dataclass(eq=False)
class QueryServer:
    """Handlers of the queries."""

    indexer: IndexerService
    directory: Directory
    callers: CallerCheck
    """Authenticates as the gRPC server does, with ``guard``."""
    guard: Guard | None
    _: KW_ONLY
    max_prompt_tokens: int

    def __post_init__(self) -> None:
        self._turns = asyncio.Semaphore(_MAX_QUERIES)
        self.running = 0
        """Queries under way."""

    def application(self) -> web.Application:
        """Returns the application with all routes."""
        # A hash stands for a block, so hashes of the longest prompt are no longer than its tokens.
        most = _NUMBER_BYTES * self.max_prompt_tokens + _MAX_FIELDS_BYTES
        application = web.Application(client_max_size=most, middlewares=[_errors_as_json, self._authenticate])
        application.add_routes(
            [
                web.post("/query", partial(self._query, by_hash=False)),
                web.post("/query_by_hash", partial(self._query, by_hash=True)),
                web.get("/workers", self._workers),
                web.get("/health", self._health),
            ]
        )
        return application

    def recognizes(self, head: bytes) -> bool:
        """Returns whether the beginning of a request shows the service token."""
        fields = (line.partition(b":") for line in head.split(b"\r\n")[1:])
        headers = {name.decode("latin-1").lower(): value.decode("latin-1").strip() for name, _, value in fields}
        return self.callers.peer_of((), _shown_token(headers), "").may_call(_METHOD)

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in _OPEN_PATHS:
            certificate = request.get_extra_info("peercert") or {}
            names = tuple(value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS")
            self.callers.peer_of(names, _shown_token(request.headers), request.remote or "").check(_METHOD)
            if self.guard is not None:
                self.guard.check(f"/{_METHOD}", [(name.lower(), value) for name, value in request.headers.items()])
            note_admitted(request)
        return await handler(request)

    async def _query(self, request: web.Request, *, by_hash: bool) -> web.Response:
        try:
            async with asyncio.timeout(_QUERY_SECONDS), self._turns:
                self.running += 1
                try:
                    query = OverlapQuery.parse(
                        await request.read(), by_hash=by_hash, max_prompt_tokens=self.max_prompt_tokens
                    )
                    found = [(view.block_size, await self._find(view, query)) for view in self._views(query)]
                finally:
                    self.running -= 1
        except TimeoutError:
            raise web.HTTPRequestTimeout from None
        return web.json_response(query.answer(found))

    def _views(self, query: OverlapQuery) -> list[ComponentView]:
        """Returns the components that a query is about.

        Raises:
            UnknownComponent: there is none.
            BlockSizeMismatch: the query assumes another block size.
        """
        views = self.directory.components.values()
        chosen = [view for view in views if view.model == query.model and query.group in (ANY_GROUP, view.name.name)]
        if not chosen:
            known = (f"{view.name.name} of {view.model}" for view in views)
            raise UnknownComponent(f"{query.group} of {query.model}", known)
        for view in chosen:
            if query.block_size not in (0, view.block_size):
                raise BlockSizeMismatch(query.block_size, view.block_size)
        return chosen

    async def _find(self, view: ComponentView, query: OverlapQuery) -> FindMatchesResponse:
        block_size = view.block_size
        hashes = query.local_hashes
        if len(hashes) // HASH_BYTES * block_size > self.max_prompt_tokens:
            raise PromptTooLong(len(hashes) // HASH_BYTES * block_size, self.max_prompt_tokens)
        if len(query.tokens) > _LONG_PROMPT_BYTES:
            hashes = await asyncio.to_thread(local_hashes, query.tokens, block_size, query.scope)
        elif query.tokens:
            hashes = local_hashes(query.tokens, block_size, query.scope)
        answer = await self.indexer.find_matches_of_hashes(
            view.name, hashes, block_size=block_size, deadline=Deadline.after(_QUERY_SECONDS)
        )
        return FindMatchesResponse.FromString(answer)

    async def _workers(self, request: web.Request) -> web.Response:
        """Lists the workers in the form of Dynamo, those of a model or a routing group if the request names one."""
        model, group = request.query.get("model_name"), request.query.get("routing_group", ANY_GROUP)
        return web.json_response(
            [
                worker
                for view in self.directory.components.values()
                if model in (None, view.model) and group in (ANY_GROUP, view.name.name)
                for worker in _listed(view)
            ]
        )

    async def _health(self, _: web.Request) -> web.Response:
        is_ready = self.indexer.ready
        return web.json_response({"status": "ready" if is_ready else "not ready"}, status=200 if is_ready else 503)


def _listed(view: ComponentView) -> list[dict[str, Any]]:
    listed = []
    for worker_id, worker in sorted(view.workers.items()):
        endpoint = worker.openai_endpoint or worker.endpoint
        ranks = {str(rank.dp_rank): endpoint for rank in worker.ranks}
        status = "paused" if worker.draining else "active"
        listed.append(
            {
                "instance_id": worker_id,
                "source": "kvrouter",
                "status": status,
                "model_name": worker.model,
                "routing_group": view.name.name,
                "block_size": worker.block_size,
                "endpoints": ranks,
                "listeners": {rank: {"endpoint": endpoint, "status": status} for rank in ranks},
            }
        )
    return listed


def _shown_token(headers: Mapping[str, str]) -> str:
    """Returns the service token in the headers: in that of services, or as a bearer token, which other routers send."""
    authorization = headers.get("authorization", "")
    bearer = authorization[len(_BEARER) :].strip() if authorization.lower().startswith(_BEARER) else ""
    return headers.get(HEADER, bearer)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Returns every failure as ``{"error": text}``, as both other indexers do."""
    try:
        return await handler(request)
    except KvRouterError as error:
        return web.json_response({"error": str(error)}, status=http_status(error.code, error.info.reason))
    except web.HTTPNotFound:
        words = f"{request.path}: expected /query, /query_by_hash, /workers or /health; workers register by themselves"
        return web.json_response({"error": words}, status=404)
    except web.HTTPException as error:
        return web.json_response({"error": f"{request.path}: {error.reason.lower()}"}, status=error.status)
    except Exception:
        log.exception("http.request_failed", path=request.path)
        return web.json_response({"error": "internal error"}, status=500)


@asynccontextmanager
async def serving_queries(
    indexer: IndexerService,
    runtime: Runtime,
    bind: str,
    *,
    max_prompt_tokens: int,
    guard: HttpGuard | None = None,
) -> AsyncIterator[str]:
    """Serves queries while the context lasts; yields the address, host:port, or "" if ``bind`` is empty.

    Raises:
        BindFailed: the port is in use or the address is not one of this machine's.
    """
    if not bind:
        yield ""
        return
    queries = QueryServer(indexer, runtime.directory, runtime.callers, guard, max_prompt_tokens=max_prompt_tokens)
    bounds_of(runtime.registry).add("router_queries", lambda: queries.running, _MAX_QUERIES)
    host, _, port = bind.rpartition(":")
    settings = runtime.settings
    has_token = guard is not None or settings.service_token_file
    async with serving_http(
        queries.application(),
        host.strip("[]") or None,
        int(port),
        HttpLimits(share_of_descriptors(1 / 8), settings.http_header_seconds),
        runtime.registry,
        name="queries",
        tls=runtime.tls,
        recognizes=None if not has_token else queries.recognizes if guard is None else guard.recognizes,
        handler_cancellation=True,
        auto_decompress=False,
        shutdown_timeout=1.0,
    ) as (_, bound):
        log.info("http.listening", address=f"{host}:{bound}", encrypted=runtime.tls is not None)
        yield f"{host}:{bound}"
