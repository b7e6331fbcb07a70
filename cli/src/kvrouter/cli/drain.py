"""``kvrouter drain`` and ``kvrouter undrain``: take a worker out of service and back, and show the progress."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeVar

from kvrouter.cli.arguments import named_component
from kvrouter.cli.errors import CommandFailed
from kvrouter.cli.terminal import PlainConsole
from kvrouter.cli.top.sources import Where, open_schedulers
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.errors import DependencyAway, KvRouterError
from kvrouter.v1.pages import all_pages
from kvrouter.v1.scheduler_pb2 import DrainWorkerRequest, GetStatusRequest, UndrainWorkerRequest

_CALL_SECONDS = 10.0
_INTERVAL_SECONDS = 0.5
"""Interval between two looks at the running requests."""

_T = TypeVar("_T")


async def drain(
    where: Where, component: str, worker_id: int, *, migrate_after_seconds: float | None, wait_seconds: float
) -> None:
    """Drains a worker, and waits until no request runs on it.

    Args:
        where: Schedulers to call.
        component: The component, ``namespace/name``.
        worker_id: The worker.
        migrate_after_seconds: Time after which running requests continue elsewhere; None lets them end.
        wait_seconds: Longest wait for running requests; 0 does not wait.

    Raises:
        WrongUsage: the component's name is invalid.
        CommandFailed: the worker is unknown, no Scheduler answers, or requests still run after the wait.
    """
    request = DrainWorkerRequest(component=named_component(component), worker_id=worker_id)
    if migrate_after_seconds is not None:
        request.migrate_after_ms = round(migrate_after_seconds * 1000)
    console = PlainConsole()
    async with open_schedulers(where) as schedulers:
        answer = await _first(schedulers.values(), lambda each: each.drain_worker(request, deadline=_soon()))
        console.print(f"worker {worker_id} gets no new requests{' (as before)' if answer.was_draining else ''}")
        deadline, shown = Deadline.after(wait_seconds), -1
        while wait_seconds:
            running = await _running(schedulers.values(), request.component, worker_id)
            if running != shown:
                requests = {0: "no request runs", 1: "1 request runs"}.get(running, f"{running} requests run")
                console.print(f"{requests} on it")
                shown = running
            if not running:
                return
            if deadline.expired:
                raise CommandFailed(
                    f"{running} requests still run on worker {worker_id} after {wait_seconds:g} s; it stays drained. "
                    "Wait longer, or give --timeout so that they continue on other workers"
                )
            await asyncio.sleep(_INTERVAL_SECONDS)


async def undrain(where: Where, component: str, worker_id: int) -> None:
    """Ends the drain of a worker.

    Raises:
        WrongUsage: the component's name is invalid.
        CommandFailed: the worker is unknown, or no Scheduler answers.
    """
    request = UndrainWorkerRequest(component=named_component(component), worker_id=worker_id)
    async with open_schedulers(where) as schedulers:
        answer = await _first(schedulers.values(), lambda each: each.undrain_worker(request, deadline=_soon()))
    outcome = "gets requests again" if answer.was_draining else "was not drained"
    PlainConsole().print(f"worker {worker_id} {outcome}")


def _soon() -> Deadline:
    return Deadline.after(_CALL_SECONDS)


async def _first(schedulers: Iterable[Scheduler], call: Callable[[Scheduler], Awaitable[_T]]) -> _T:
    """Calls one Scheduler after the other until one answers, since any of them can write to etcd."""
    failure = CommandFailed("no Scheduler is known")
    for scheduler in schedulers:
        try:
            return await call(scheduler)
        except DependencyAway as error:
            failure = CommandFailed(str(error))
        except KvRouterError as error:
            raise CommandFailed(str(error)) from None
    raise failure


async def _running(schedulers: Iterable[Scheduler], component: Component, worker_id: int) -> int:
    """Returns the requests that are booked on a worker, at whichever Scheduler."""
    most = 0
    for scheduler in schedulers:
        try:
            request, deadline = GetStatusRequest(component=component), _soon()
            pages = all_pages(partial(scheduler.get_status, deadline=deadline), request)
            components = [each async for page in pages for each in page.components]
        except KvRouterError as error:
            raise CommandFailed(f"a Scheduler does not answer: {error.message}") from None
        ranks = [rank for each in components for rank in each.ranks if rank.rank.worker_id == worker_id]
        most = max(most, sum(rank.active_requests for rank in ranks))
    return most
