"""Sees the death of the engine a gateway's request runs at, which counts against the request's prompt."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from http import HTTPStatus

import aiohttp
from kvrouter.engines.openai_server import is_alive
from kvrouter.frontend.workers.failures import WorkerFailure
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.frontend.workers.poison_prompts import RequestDeaths
from kvrouter.v1.registry_pb2 import WorkerRegistration

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
