"""A rank picked for a request, its progress there, and the death of the engine it runs at.

The endpoint picker protocol has IP addresses and ports, no names.

Names in the registered URLs are resolved in the background. The first IPv4 address counts, or else the first IPv6
address. If a name cannot be resolved any more, its last address stays.

A death counts against the request's prompt.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import structlog
from kvrouter.engines.openai_server import is_alive
from kvrouter.frontend.metrics import ModelMetrics
from kvrouter.frontend.schedulers.booking_updates import LiveBooking
from kvrouter.frontend.schedulers.scheduler_link import SchedulerLink
from kvrouter.frontend.workers.failures import WorkerFailure
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.frontend.workers.poison_prompts import RequestDeaths
from kvrouter.runtime.discovery.directory import ComponentView, Directory
from kvrouter.v1.frontend_pb2 import RoutedOn
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import WorkerRegistration

log = structlog.get_logger(component="endpoint-picker")

_SCAN_SECONDS = 0.1
"""Interval in which new names are looked for."""
_RESOLVE_SECONDS = 5.0
"""Interval in which each name is resolved again."""


class _Server(NamedTuple):
    host: str
    """Name or IP address; empty for no server."""
    port: int
    is_name: bool


class EngineAddresses:
    """The addresses of all registered engines."""

    def __init__(self, directory: Directory, resolve: Callable[[str], Awaitable[str]] | None = None) -> None:
        """``resolve`` returns the address of a name, and raises OSError if it has none; None asks the system."""
        self._directory = directory
        self._resolve = resolve or _first_address
        self._resolved: dict[str, str] = {}
        self._due: dict[str, float] = {}
        """When each name is resolved next, seconds of the monotonic clock."""
        self._of_workers: dict[ComponentName, tuple[ComponentView, Mapping[int, str]]] = {}
        """What ``of_workers`` has returned, until a name has another address."""

    def of_workers(self, view: ComponentView) -> Mapping[int, str]:
        """Returns the addresses of a component's workers by id, without those that have none."""
        known = self._of_workers.get(view.name)
        if known is None or known[0] is not view:
            found = {worker_id: address for worker_id, worker in view.workers.items() if (address := self.of(worker))}
            known = self._of_workers[view.name] = view, found
        return known[1]

    def of(self, worker: WorkerRegistration) -> str:
        """Returns the address of a worker's OpenAI API, IP:port; empty if it has none or its name is unresolved."""
        host, port, is_name = _server(worker.openai_endpoint)
        if is_name:
            host = self._resolved.get(host, "")
        if not host:
            return ""
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def run(self) -> None:
        """Resolves names until it is cancelled."""
        while True:
            await self.resolve_due()
            await asyncio.sleep(_SCAN_SECONDS)

    async def resolve_due(self) -> None:
        """Resolves names that are new, or were resolved a while ago, and forgets those of engines that have gone."""
        names = {
            server.host
            for view in self._directory.components.values()
            for worker in view.workers.values()
            if (server := _server(worker.openai_endpoint)).is_name
        }
        for known in (self._resolved, self._due):
            for gone in known.keys() - names:
                del known[gone]
        for left in self._of_workers.keys() - self._directory.components.keys():
            del self._of_workers[left]
        now = time.monotonic()
        due = [name for name in names if self._due.get(name, 0.0) <= now]
        async with asyncio.TaskGroup() as group:
            for name in due:
                group.create_task(self._resolve_one(name))

    async def _resolve_one(self, name: str) -> None:
        is_new = name not in self._due
        try:
            address = await self._resolve(name)
            if address != self._resolved.get(name):
                self._resolved[name] = address
                self._of_workers.clear()
        except OSError as error:
            if is_new or name in self._resolved:
                log.warning("engine.unresolved", name=name, last_address=self._resolved.get(name, ""), cause=str(error))
        self._due[name] = time.monotonic() + _RESOLVE_SECONDS


@lru_cache(4096)
def _server(url: str) -> _Server:
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        ip_address(host)
    except ValueError:
        return _Server(host, port, is_name=bool(host))
    return _Server(host, port, is_name=False)


async def _first_address(name: str) -> str:
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda each: each[0] != socket.AF_INET)
    return str(found[0][4][0])


_RESET = "upstream_reset_before_response_started"
_RESET_AFTER_SENDING = tuple(
    f"{_RESET}{{{reason}" for reason in ("connection_termination", "remote_reset", "protocol_error")
)


_LOOK_SECONDS = 0.5
"""Longest time for a look at the engine: the gateway waits for the picker, Envoy as shipped for 0.7 s."""


class EngineWatch:
    """The engine of one request, from the choice to the end of the response. ``end`` must follow."""

    def __init__(
        self, worker: WorkerRegistration, health: WorkerHealth, deaths: RequestDeaths, session: aiohttp.ClientSession
    ) -> None:
        """Begins to watch.

        Args:
            worker: The worker of the engine.
            health: Health of the workers.
            deaths: The deaths the request has seen.
            session: Connections to engines, which show whether one lives.
        """
        self._worker = worker
        self._deaths = deaths
        self._session = session
        self._call = health.begin(worker.endpoint)
        self._call.watch(self._reconsider)

    def responded(self) -> None:
        """Records the first output."""
        self._call.responded()

    async def answered(self, status: int, details: str) -> None:
        """Looks whether the engine died, if the response is an error.

        A gateway answers with an error itself if it could not connect to the engine, which is no death.

        Args:
            status: Status of the response.
            details: Envoy's attribute ``response.code_details``; empty if it is not sent.
        """
        # An engine that answers 503 has not begun with the request. Without details it may be the gateway's own.
        failed = status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.SERVICE_UNAVAILABLE
        if details.startswith(_RESET_AFTER_SENDING) or (failed and not details.startswith(_RESET)):
            await self._look()

    async def broke_off(self) -> None:
        """Looks whether the engine died, since its response ended early. The client may have left as well."""
        await self._look(may_die_later=False)

    def end(self) -> None:
        """Ends the watch."""
        self._call.end()

    async def _look(self, *, may_die_later: bool = True) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                lives = await is_alive(self._session, self._worker.openai_endpoint)
                if may_die_later or not lives:
                    self._add("it failed the request", connection_lost=not lives)
                    await self._deaths.shared()

    def _reconsider(self) -> None:
        if self._call.is_lost:
            self._add("its registration has ended, and it does not answer")

    def _add(self, what: str, *, connection_lost: bool = False) -> None:
        fate = self._call.fate(connection_lost=connection_lost)
        self._deaths.add(WorkerFailure(self._worker.worker_id, "lost", what, fate=fate))


@dataclass(slots=True, eq=False)
class Pick:
    """A booking. ``end`` must follow; further calls have no effect."""

    booking: LiveBooking
    link: SchedulerLink
    """The Scheduler that made it."""
    endpoints: Sequence[str]
    """The chosen endpoint, then fallbacks, as host:port."""
    headers: Mapping[str, str]
    """Headers for the engine, such as the rank it shall use, and who holds more of the prompt."""
    engine: EngineWatch
    """The engine, which may die of the request."""
    metrics: ModelMetrics
    """Metrics of the model."""
    overlap_blocks: int
    """Predicted overlap: leading blocks of the prompt the rank has in device memory."""
    routed_on: RoutedOn
    """The decision's knowledge of the prompt."""
    output_tokens: int = 0
    """Number of output tokens so far, as far as it can be seen: one for each event, and one for other responses."""
    has_ended: bool = False

    def responded(self, tokens: int, *, is_stream: bool) -> None:
        """Accounts for further output tokens: the first ones end the prefill."""
        if self.has_ended:
            return
        if not self.output_tokens:
            self.link.prefill_complete(self.booking)
            self.engine.responded()
        self.output_tokens += tokens
        if is_stream:
            self.link.report_output(self.booking, self.output_tokens)

    def end(self, cached_tokens: int | None = None, output_tokens: int | None = None) -> None:
        """Frees the booking.

        Args:
            cached_tokens: Prompt tokens the engine found in its cache; None if it did not report them.
            output_tokens: Length of the output; None if the engine did not report it.
        """
        if self.has_ended:
            return
        self.has_ended = True
        self.engine.end()
        self.link.free(self.booking, cached_tokens, output_tokens=output_tokens)
        if cached_tokens is not None:
            booking = self.booking
            self.metrics.found_cached(cached_tokens, booking.predicted_cached_tokens, booking.prompt_tokens)
