"""Services as processes that share a NATS and an etcd, and streams that run through them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from kvrouter.frontend.schedulers.scheduler_choice import rendezvous
from kvrouter.runtime.contracts import Frontend, Indexer, Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import frontend_pb2, indexer_pb2, scheduler_pb2
from kvrouter.v1.common_pb2 import RoutingConstraints, RoutingRequest, TokenIds
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.scheduler_pb2 import GetPotentialLoadsRequest, GetStatusRequest, GetStatusResponse, QueueStatus
from kvrouter.v1.worker_pb2 import StopConditions
from prometheus_client import CollectorRegistry

_SERVICES = {
    "frontend": frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"],
    "indexer": indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"],
    "scheduler": scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
}
TREE = Path(__file__).parents[2]
MODEL = "mock-model"
SCHEDULERS = ("scheduler-0", "scheduler-1")
PATIENCE_SECONDS = 60.0
GRACE_SECONDS = 2.0
UNSHARDED = ("--overload-lag-ms", "0")
"""Keeps a Scheduler on a busy machine from having its requests sharded: then none has all sessions for a minute."""
STEADY = ("--scheduler-heartbeat-timeout-seconds", "6")
"""Keeps a Frontend at a Scheduler that a busy machine stops for seconds. It leaves one that is killed at once."""
TOKENS = 200
"""Of streams that are awaited to their end: at a tenth of the clock they last longer than it takes to start 500."""


@dataclass
class Processes:
    """Services as processes, and what is registered of them."""

    where: list[str]
    directory: Directory
    stack: AsyncExitStack
    running: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    _stubs: dict[tuple[str, str], Any] = field(default_factory=dict)

    async def start(
        self,
        kind: str,
        name: str,
        *options: str,
        clock: Path | None = None,
        module: str = "",
        python: Path | None = None,
        log: Path | None = None,
    ) -> None:
        """Starts a service; of several in one process, ``kind`` is their roles with commas between them.

        ``clock`` shifts its clock. ``module`` runs in place of the service's own. ``python`` is the interpreter of
        another release. ``log`` is the file that its log is appended to.
        """
        service = ("kvrouter.cli.main", "serve", "--roles", kind) if "," in kind else (module or f"kvrouter.{kind}",)
        launcher = ["-m", "tests.faults.shifted_clock", str(clock)] if clock else ["-m"]
        command = [str(python or sys.executable), *launcher, *service, *self.where, "--instance-id", name, *options]
        with (log or Path(os.devnull)).open("ab") as stderr:
            self.running[name] = await asyncio.create_subprocess_exec(*command, stderr=stderr, cwd=TREE)
        self.stack.push_async_callback(self.kill, name)

    async def ready(self, kind: str, name: str) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.directory.wait_for(lambda seen: name in seen.services(kind) and seen.services(kind)[name].ready)
        channel = await self.stack.enter_async_context(open_channel(self.directory.services(kind)[name].endpoint))
        self._stubs[kind, name] = remote(_SERVICES[kind], channel)

    def registered_at(self, worker_id: int) -> int:
        """Returns when a worker's process registered, nanoseconds since 1970; 0 if none is registered."""
        views = self.directory.components.values()
        return max(
            (view.workers[worker_id].registered_unix_ns for view in views if worker_id in view.workers), default=0
        )

    async def until_registered(self, worker_id: int, after: int) -> None:
        """Returns when a process of a worker is registered that did so after a time, nanoseconds since 1970."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.directory.wait_for(lambda _: self.registered_at(worker_id) > after)

    async def kill(self, name: str) -> None:
        process = self.running[name]
        if process.returncode is None:
            process.kill()
            await process.wait()

    def knows(self, name: str) -> bool:
        """Returns whether a Frontend was ready, so that it can be called."""
        return ("frontend", name) in self._stubs

    def frontend(self, name: str) -> Frontend:
        return cast(Frontend, self._stubs["frontend", name])

    def indexer(self, name: str) -> Indexer:
        return cast(Indexer, self._stubs["indexer", name])

    def scheduler(self, name: str) -> Scheduler:
        return cast(Scheduler, self._stubs["scheduler", name])

    def signal(self, name: str, which: signal.Signals) -> None:
        self.running[name].send_signal(which)

    async def booked(self, name: str) -> int:
        """Bookings that a Scheduler counts."""
        asked = RoutingRequest(model=MODEL, token_ids=TokenIds(ids=[1]))
        answer = await self.scheduler(name).get_potential_loads(
            GetPotentialLoadsRequest(request=asked), deadline=Deadline.after(10)
        )
        return sum(load.active_requests for load in answer.loads)

    async def status(self, name: str) -> GetStatusResponse:
        """What a Scheduler believes."""
        return await self.scheduler(name).get_status(GetStatusRequest(), deadline=Deadline.after(10))

    async def health(self, name: str) -> frontend_pb2.GetWorkerHealthResponse:
        """What a Frontend observes of the workers."""
        asked = frontend_pb2.GetWorkerHealthRequest()
        return await self.frontend(name).get_worker_health(asked, deadline=Deadline.after(10))

    async def until_idle(self, scheduler: str, frontend: str) -> None:
        """Returns when nothing is booked and no call is under way. Bookings end before the calls at workers do."""
        await self.until_booked(scheduler, 0)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while any(each.calls for each in (await self.health(frontend)).workers):
                await asyncio.sleep(0.05)

    async def requests_by_worker(self, name: str) -> dict[int, int]:
        """Requests that a Scheduler counts at each worker."""
        ranks = (await self.status(name)).components[0].ranks
        return {each.rank.worker_id: each.active_requests for each in ranks}

    async def queued(self, name: str) -> QueueStatus:
        """What waits at a Scheduler."""
        return (await self.status(name)).components[0].queued

    async def deciding(self, frontends: int, names: tuple[str, str] = SCHEDULERS) -> tuple[str, str]:
        """Of two processes, that whose Scheduler holds the sessions of all the Frontends, and the other one.

        A Frontend that saw one Scheduler before the other has its session there until it saw both.
        """
        sessions: list[int] = []
        chosen: set[str | None] = set()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    sessions = [(await self.status(name)).sessions for name in names]
                    chosen = {rendezvous(component, names) for component in self.directory.components}
                    if chosen == {names[0]} and sessions == [frontends, 0]:
                        return names
                    if chosen == {names[1]} and sessions == [0, frontends]:
                        return names[1], names[0]
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{names} have {sessions} sessions, not all of {frontends} at {chosen}") from None

    async def until_booked(self, name: str, count: int, patience_seconds: float = PATIENCE_SECONDS) -> set[int]:
        """Returns when a Scheduler counts so many bookings: all the counts that it had on the way."""
        last: object = None
        seen = set[int]()
        try:
            async with asyncio.timeout(patience_seconds):
                while last != count:
                    try:
                        last = booked = await self.booked(name)
                        seen.add(booked)
                    except KvRouterError as error:
                        last = error
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{name} has {last!r} bookings, not {count}") from None
        return seen


@asynccontextmanager
async def _watching(etcd_endpoint: str, namespace: str) -> AsyncIterator[Directory]:
    directory = Directory(etcd_endpoint, namespace, CollectorRegistry())
    following = asyncio.create_task(directory.run())
    try:
        yield directory
    finally:
        following.cancel()
        await asyncio.wait({following})


async def start_workers(processes: Processes, clock_factor: float | tuple[float, float], *engine: str) -> None:
    """Two workers; a ``clock_factor`` below 1 makes them slow, or one of them."""
    factors = clock_factor if isinstance(clock_factor, tuple) else (clock_factor, clock_factor)
    for number, factor in enumerate(factors):
        options = ("--worker-id", str(number + 1), "--clock-factor", str(factor), "--max-sequences", "512")
        await processes.start("mocker", f"mocker-{number}", *options, *engine, "--load-report-seconds", "0")


async def start_system(
    processes: Processes,
    *,
    schedulers: int,
    frontends: int,
    clock_factor: float | tuple[float, float],
    mode: str = "round-robin",
    engine: Sequence[str] = (),
    frontend: Sequence[str] = (),
    scheduler: Sequence[str] = (),
) -> None:
    """Two workers of slow engines, and services that are ready."""
    await start_services(
        processes, schedulers=schedulers, frontends=frontends, mode=mode, frontend=frontend, scheduler=scheduler
    )
    await start_workers(processes, clock_factor, *engine)
    await services_ready(processes, schedulers=schedulers, frontends=frontends, workers=2)


async def start_services(
    processes: Processes,
    *,
    schedulers: int,
    frontends: int,
    mode: str = "round-robin",
    frontend: Sequence[str] = (),
    scheduler: Sequence[str] = (),
) -> None:
    """Starts services, which are ready once there are workers."""
    options = ("--session-grace-seconds", str(GRACE_SECONDS), *UNSHARDED)
    for number in range(schedulers):
        await processes.start("scheduler", f"scheduler-{number}", *options, "--router-mode", mode, *scheduler)
    for number in range(frontends):
        await processes.start("frontend", f"frontend-{number}", "--port", "0", *STEADY, *frontend)


async def services_ready(processes: Processes, *, schedulers: int, frontends: int, workers: int) -> None:
    """Returns when the services are ready and each knows so many workers, and nothing is booked."""
    for number in range(schedulers):
        name = f"scheduler-{number}"
        await processes.ready("scheduler", name)
        await processes.until_booked(name, 0)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while sum(len(each.ranks) for each in (await processes.status(name)).components) < workers:
                await asyncio.sleep(0.05)
    for number in range(frontends):
        name = f"frontend-{number}"
        await processes.ready("frontend", name)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len((await processes.health(name)).workers) < workers:
                await asyncio.sleep(0.05)


async def streamed(
    frontend: Frontend, number: int, max_tokens: int, prompt_tokens: int = 40, worker_id: int | None = None
) -> int:
    """Runs a request to its end, at one worker where that is given. Returns the tokens it got.

    It has no deadline: one that a busy machine reaches would end the load that a test counts on.
    """
    request = FrontendServiceGenerateRequest(
        model=MODEL,
        token_ids=TokenIds(ids=range(number * prompt_tokens, (number + 1) * prompt_tokens)),
        stop_conditions=StopConditions(max_tokens=max_tokens),
        constraints=RoutingConstraints(worker_id=worker_id),
    )
    tokens = 0
    async for piece in frontend.generate(request, deadline=Deadline.never()):
        tokens += len(piece.output.token_ids)
    return tokens


async def cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Ends tasks; returns when they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@asynccontextmanager
async def system(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[Processes]:
    """No process yet; those that are started are killed at the end."""
    async with _watching(etcd_endpoint, namespace) as directory, AsyncExitStack() as stack:
        where = ["--nats", nats_url, "--etcd", etcd_endpoint, "--namespace", namespace, "--http-bind", ""]
        yield Processes(where, directory, stack)
