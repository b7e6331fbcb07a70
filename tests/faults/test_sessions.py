"""Load survives what kills processes: a Frontend's goes with it, a Scheduler's moves to another, exactly."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from kvrouter.runtime.contracts import Frontend, Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery import Directory
from kvrouter.runtime.errors import KvRouterError
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import frontend_pb2, scheduler_pb2
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.indexer_pb2 import TokenIds
from kvrouter.v1.scheduler_pb2 import GetPotentialLoadsRequest, GetStatusRequest, HeldStatus, RoutingRequest
from kvrouter.v1.worker_pb2 import StopConditions
from prometheus_client import CollectorRegistry

_FRONTEND = frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"]
_SCHEDULER = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
MODEL = "mock-model"
PATIENCE_SECONDS = 60.0
STREAMS = 500
GRACE_SECONDS = 2.0


@dataclass
class Processes:
    """Services as processes, and what is registered of them."""

    where: list[str]
    directory: Directory
    stack: AsyncExitStack
    running: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    _stubs: dict[str, Any] = field(default_factory=dict)

    async def start(self, kind: str, name: str, *options: str) -> None:
        command = [sys.executable, "-m", f"kvrouter.{kind}", *self.where, "--instance-id", name, *options]
        self.running[name] = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        self.stack.push_async_callback(self.kill, name)

    async def ready(self, kind: str, name: str) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.directory.wait_for(lambda seen: name in seen.services(kind) and seen.services(kind)[name].ready)
        channel = await self.stack.enter_async_context(open_channel(self.directory.services(kind)[name].endpoint))
        self._stubs[name] = remote(_SCHEDULER if kind == "scheduler" else _FRONTEND, channel)

    async def kill(self, name: str) -> None:
        process = self.running[name]
        if process.returncode is None:
            process.kill()
            await process.wait()

    def frontend(self, name: str) -> Frontend:
        return cast(Frontend, self._stubs[name])

    def scheduler(self, name: str) -> Scheduler:
        return cast(Scheduler, self._stubs[name])

    async def booked(self, name: str) -> int:
        """Bookings that a Scheduler counts."""
        asked = RoutingRequest(model=MODEL, token_ids=TokenIds(ids=[1]))
        answer = await self.scheduler(name).get_potential_loads(
            GetPotentialLoadsRequest(request=asked), deadline=Deadline.after(10)
        )
        return sum(load.active_requests for load in answer.loads)

    async def held(self, name: str) -> HeldStatus:
        """What waits at a Scheduler."""
        answer = await self.scheduler(name).get_status(GetStatusRequest(), deadline=Deadline.after(10))
        return answer.components[0].held

    async def until_booked(self, name: str, count: int) -> None:
        last: object = None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while last != count:
                    try:
                        last = await self.booked(name)
                    except KvRouterError as error:
                        last = error
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{name} has {last!r} bookings, not {count}") from None


@pytest.fixture
async def processes(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[Processes]:
    async with _watching(etcd_endpoint, namespace) as directory, AsyncExitStack() as stack:
        where = ["--nats", nats_url, "--etcd", etcd_endpoint, "--namespace", namespace, "--http-bind", ""]
        yield Processes(where, directory, stack)


@asynccontextmanager
async def _watching(etcd_endpoint: str, namespace: str) -> AsyncIterator[Directory]:
    directory = Directory(etcd_endpoint, namespace, CollectorRegistry())
    following = asyncio.create_task(directory.run())
    try:
        yield directory
    finally:
        following.cancel()
        await asyncio.wait({following})


async def start_system(
    processes: Processes,
    *,
    schedulers: int,
    frontends: int,
    clock_factor: float,
    mode: str = "round-robin",
    engine: Sequence[str] = (),
) -> None:
    """Two workers of slow engines, and services that are ready."""
    grace = ("--session-grace-seconds", str(GRACE_SECONDS))
    for number in range(schedulers):
        await processes.start("scheduler", f"scheduler-{number}", *grace, "--router-mode", mode)
    for number in range(frontends):
        await processes.start("frontend", f"frontend-{number}", "--port", "0")
    for number in range(2):
        options = ("--worker-id", str(number + 1), "--clock-factor", str(clock_factor), "--max-sequences", "512")
        await processes.start("mocker", f"mocker-{number}", *options, *engine, "--load-report-seconds", "0")
    for number in range(schedulers):
        await processes.ready("scheduler", f"scheduler-{number}")
        await processes.until_booked(f"scheduler-{number}", 0)
    for number in range(frontends):
        await processes.ready("frontend", f"frontend-{number}")


async def streamed(frontend: Frontend, number: int, max_tokens: int, prompt_tokens: int = 40) -> int:
    """Runs a request to its end. Returns the tokens it got."""
    request = FrontendServiceGenerateRequest(
        model=MODEL,
        token_ids=range(number * prompt_tokens, (number + 1) * prompt_tokens),
        stop_conditions=StopConditions(max_tokens=max_tokens),
    )
    tokens = 0
    async for piece in frontend.generate(request, deadline=Deadline.after(120)):
        tokens += len(piece.output.token_ids)
    return tokens


async def test_the_load_of_a_killed_frontend_goes_and_no_other(processes: Processes) -> None:
    await start_system(processes, schedulers=1, frontends=2, clock_factor=0.02)
    doomed, other = processes.frontend("frontend-0"), processes.frontend("frontend-1")
    lost = [asyncio.create_task(streamed(doomed, number, 1000)) for number in range(STREAMS)]
    kept = [asyncio.create_task(streamed(other, STREAMS + number, 1000)) for number in range(20)]
    try:
        await processes.until_booked("scheduler-0", STREAMS + 20)
        await processes.kill("frontend-0")
        outcomes = await asyncio.gather(*lost, return_exceptions=True)
        assert all(isinstance(outcome, KvRouterError) for outcome in outcomes)
        await processes.until_booked("scheduler-0", 20)
        for task in kept:
            task.cancel()
        await processes.until_booked("scheduler-0", 0)
    finally:
        for task in (*lost, *kept):
            task.cancel()
        await asyncio.wait([*lost, *kept])


async def test_the_load_of_a_killed_scheduler_moves_whole_and_no_request_is_lost(processes: Processes) -> None:
    await start_system(processes, schedulers=2, frontends=1, clock_factor=0.5)
    frontend = processes.frontend("frontend-0")
    running = [asyncio.create_task(streamed(frontend, number, 1500)) for number in range(100)]
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while 100 not in (booked := [await processes.booked(f"scheduler-{number}") for number in range(2)]):
                await asyncio.sleep(0.05)
        first, second = ("scheduler-0", "scheduler-1") if booked[0] else ("scheduler-1", "scheduler-0")
        assert await processes.booked(second) == 0, "replicas do not share this component"
        await processes.kill(first)
        late = [asyncio.create_task(streamed(frontend, 100 + number, 1500)) for number in range(20)]
        running += late
        await processes.until_booked(second, 120)
        assert await asyncio.gather(*running) == [1500] * 120
        await processes.until_booked(second, 0)
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)


async def test_a_frontend_and_its_scheduler_killed_at_once_leave_nothing(processes: Processes) -> None:
    await start_system(processes, schedulers=2, frontends=2, clock_factor=0.02)
    doomed, other = processes.frontend("frontend-0"), processes.frontend("frontend-1")
    running = [asyncio.create_task(streamed(doomed, number, 1000)) for number in range(50)]
    running += [asyncio.create_task(streamed(other, 50 + number, 1000)) for number in range(5)]
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while 55 not in (booked := [await processes.booked(f"scheduler-{number}") for number in range(2)]):
                await asyncio.sleep(0.05)
        first, second = ("scheduler-0", "scheduler-1") if booked[0] else ("scheduler-1", "scheduler-0")
        await asyncio.gather(processes.kill("frontend-0"), processes.kill(first))
        await processes.until_booked(second, 5)
        for task in running:
            task.cancel()
        await processes.until_booked(second, 0)
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)


async def test_requests_that_a_killed_scheduler_held_wait_at_another_as_old_as_they_are(processes: Processes) -> None:
    engine = ("--num-blocks", "80")
    await start_system(processes, schedulers=2, frontends=1, clock_factor=1.0, mode="forecast", engine=engine)
    frontend = processes.frontend("frontend-0")
    running = [asyncio.create_task(streamed(frontend, number, 100, 320)) for number in range(16)]
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not any(held := [(await processes.held(f"scheduler-{number}")).requests for number in range(2)]):
                await asyncio.sleep(0.02)
        first, second = ("scheduler-0", "scheduler-1") if held[0] else ("scheduler-1", "scheduler-0")
        seen = time.monotonic()
        await processes.kill(first)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                asked = time.monotonic()
                if (moved := await processes.held(second)).requests:
                    break
                await asyncio.sleep(0.02)
        assert moved.oldest_age_ms >= (asked - seen) * 1e3, "they had arrived before they were seen to wait"
        assert await asyncio.gather(*running) == [100] * 16
        await processes.until_booked(second, 0)
        assert (await processes.held(second)).requests == 0
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
