"""Routing in the caller's process: a Frontend without servers, and the services it needs."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from typing import Any, cast

from kvrouter.client.calls import Calls
from kvrouter.client.client import DEFAULT_TIMEOUT_SECONDS
from kvrouter.client.routing_calls import RoutingCalls
from kvrouter.frontend import app as frontend
from kvrouter.frontend.schedulers.scheduler_choice import LocalScheduler, RemoteSchedulers, SchedulerSource
from kvrouter.frontend.service import FrontendService
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.indexer import app as indexer
from kvrouter.indexer.api.service import IndexerService
from kvrouter.indexer.settings import IndexerSettings
from kvrouter.router.local_calls import LocalCalls
from kvrouter.router.options import check_names, settings_of
from kvrouter.runtime.config.settings import ServiceSettings
from kvrouter.runtime.contracts import Frontend, Indexer, Scheduler
from kvrouter.runtime.process.context import Runtime, open_runtime
from kvrouter.scheduler import app as scheduler
from kvrouter.scheduler.settings import SchedulerSettings
from kvrouter.v1.errors import NotReady

_POLL_SECONDS = 0.02
"""Interval of readiness checks."""


class Router(RoutingCalls):
    """Routes in the event loop in which its context is entered. A program may have several.

    By default it runs a Scheduler and an Indexer of its own, so it needs only NATS and etcd. Of the load it then
    knows its own bookings and the reports of workers, not the bookings of others.
    """

    def __init__(
        self,
        *,
        model: str = "",
        runs_scheduler: bool = True,
        runs_indexer: bool = True,
        name: str = "python",
        timeout: float | None = DEFAULT_TIMEOUT_SECONDS,
        ready_seconds: float = 30.0,
        **options: Any,
    ) -> None:
        """Starts nothing yet.

        Args:
            model: Model of calls without one.
            runs_scheduler: Whether to run a Scheduler here; otherwise the registered ones decide.
            runs_indexer: Whether to run an Indexer here; otherwise the registered ones are asked.
            name: Name of this router in the logs of services; at most 64 bytes.
            timeout: Deadline of calls without one, seconds; None for ``request_timeout_seconds``.
            ready_seconds: Longest time until requests can be routed, seconds.
            options: Options of the services, such as ``nats``, ``etcd``, ``namespace``, ``router_mode`` or
                ``static_workers``, with their names in docs/reference/options.md.

        Raises:
            BadRequest: an option is unknown or invalid.
        """
        super().__init__(model=model, name=name, timeout=timeout)
        kinds: list[type[ServiceSettings]] = [FrontendSettings]
        self._settings = settings_of(FrontendSettings, options)
        self._scheduling: SchedulerSettings | None = None
        self._indexing: IndexerSettings | None = None
        if runs_scheduler:
            kinds.append(SchedulerSettings)
            self._scheduling = settings_of(SchedulerSettings, options)
        # Listed workers publish no events.
        if runs_indexer and not self._settings.static_workers:
            kinds.append(IndexerSettings)
            self._indexing = settings_of(IndexerSettings, options)
        check_names(kinds, options)
        self._ready_seconds = ready_seconds
        self._stopping = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._service: FrontendService | None = None

    async def _open(self) -> None:
        """Returns when requests can be routed.

        Raises:
            NotReady: etcd, NATS or a Scheduler was not reached in time.
        """
        ready = asyncio.Event()
        # A task of its own: a failure of the services fails the calls, and does not cancel the caller's task.
        self._running = asyncio.create_task(self._run(ready), name="kvrouter router")
        waiting = asyncio.create_task(ready.wait())
        try:
            await asyncio.wait(
                [waiting, self._running], timeout=self._ready_seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waiting.cancel()
            if not ready.is_set():
                await self._close()
        if not ready.is_set():
            raise self._not_ready(f"requests cannot be routed after {self._ready_seconds:g} s")

    async def _close(self) -> None:
        if self._running is None:
            return
        self._stopping.set()
        await asyncio.wait([self._running])

    @property
    def _calls(self) -> Calls:
        if self._service is None:
            raise self._not_ready("the services of this router have stopped")
        return LocalCalls(cast(Frontend, self._service))

    def _not_ready(self, what: str) -> NotReady:
        failure = None
        if self._running is not None and self._running.done() and not self._running.cancelled():
            failure = self._running.exception()
        cause = "" if failure is None else f": {failure!r}"
        advice = "Check that NATS and etcd can be reached, and that workers are registered."
        return NotReady(f"{what}{cause}", advice=advice)

    async def _run(self, ready: asyncio.Event) -> None:
        async with AsyncExitStack() as running:
            runtime = await running.enter_async_context(open_runtime(self._settings))
            indexing: IndexerService | None = None
            if self._indexing is not None:
                indexing = await running.enter_async_context(indexer.running(self._indexing, runtime))
            schedulers = await self._schedulers(runtime, indexing, running)
            service = await running.enter_async_context(
                frontend.running(self._settings, runtime, schedulers, cast("Indexer | None", indexing))
            )
            stopping = asyncio.create_task(self._stopping.wait())
            running.callback(stopping.cancel)
            while not (stopping.done() or (_has_workers(runtime) and service.ready() and _is_ready(indexing))):
                await asyncio.wait([stopping], timeout=_POLL_SECONDS)
            self._service = service
            running.callback(self._stopped)
            if not stopping.done():
                ready.set()
            await stopping

    async def _schedulers(
        self, runtime: Runtime, indexing: IndexerService | None, running: AsyncExitStack
    ) -> SchedulerSource:
        if self._scheduling is None:
            return await running.enter_async_context(
                aclosing(
                    RemoteSchedulers(
                        runtime.directory,
                        client_name=runtime.instance_id,
                        counts=runtime.call_streams.client("scheduler"),
                    )
                )
            )
        found = None if indexing is None else lambda _: indexing
        scheduling = await running.enter_async_context(scheduler.running(self._scheduling, runtime, found))
        return LocalScheduler(cast(Scheduler, scheduling))

    def _stopped(self) -> None:
        self._service = None


def _has_workers(runtime: Runtime) -> bool:
    return any(view.workers for view in runtime.directory.components.values())


def _is_ready(indexing: IndexerService | None) -> bool:
    return indexing is None or indexing.ready
