"""Workers are killed, frozen and restarted while they stream: clients see whole streams, and nothing stays behind."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import KvRouterError
from kvrouter.v1.common_pb2 import RoutingConstraints
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest, GetWorkerHealthRequest
from kvrouter.v1.registry_pb2 import WorkerRegistration
from kvrouter.v1.worker_pb2 import FinishReason, SamplingOptions, StopConditions

from .processes import MODEL, PATIENCE_SECONDS, Processes, start_system
from .rig import FULL

Report = Callable[[str, object], None]
FRONTEND, SCHEDULER = "frontend-0", "scheduler-0"
LOST, SOUND = 1, 2
PROBING = ("--worker-probe-seconds", "0.2")
PROMPT_TOKENS = 40
STREAMS = 64 if FULL else 12
TOKENS = 300 if FULL else 150
"""A stream lasts seconds, so that each is in the middle of its output when its worker fails."""

SOAK_WORKERS = 8
SOAK_MIN_WORKERS = 2
"""Workers that are never killed together, so that no request meets only dead ones."""
SOAK_CLIENTS = 32
SOAK_REQUESTS = 20_000
SOAK_TOKENS = 24
SOAK_PERIOD_SECONDS = 2.0


@dataclass
class Stream:
    """A request with a seed, whose output depends on nothing but the seed."""

    number: int
    max_tokens: int
    constraints: RoutingConstraints = field(default_factory=RoutingConstraints)
    tokens: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    finish: FinishReason = FinishReason.FINISH_REASON_UNSPECIFIED

    async def run(self, frontend: Frontend) -> None:
        first = self.number * PROMPT_TOKENS
        request = FrontendServiceGenerateRequest(
            model=MODEL,
            token_ids=range(first, first + PROMPT_TOKENS),
            stop_conditions=StopConditions(max_tokens=self.max_tokens),
            sampling_options=SamplingOptions(seed=self.number % 7),
            constraints=self.constraints,
        )
        async for each in frontend.generate(request, deadline=Deadline.after(120)):
            self.tokens.extend(each.output.token_ids)
            self.finish = each.output.finish_reason
            if each.HasField("routing"):
                self.workers.append(each.routing.rank.worker_id)


async def undisturbed(frontend: Frontend, max_tokens: int, worker_id: int) -> dict[int, list[int]]:
    """Returns the output for each seed."""
    alone = RoutingConstraints(worker_id=worker_id)
    streams = [Stream(number, max_tokens, alone) for number in range(7)]
    await asyncio.gather(*[stream.run(frontend) for stream in streams])
    return {stream.number % 7: stream.tokens for stream in streams}


async def nothing_runs(processes: Processes) -> None:
    await processes.until_booked(SCHEDULER, 0)
    health = await processes.frontend(FRONTEND).get_worker_health(GetWorkerHealthRequest(), deadline=Deadline.after(10))
    assert all(each.calls == 0 for each in health.workers)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP] if FULL else [signal.SIGKILL])
async def test_streams_continue_when_their_worker_is_lost(
    processes: Processes, how: signal.Signals, record_property: Report
) -> None:
    await start_system(processes, schedulers=1, frontends=1, clock_factor=1.0, frontend=PROBING)
    frontend = processes.frontend(FRONTEND)
    expected = await undisturbed(frontend, TOKENS, SOUND)
    streams = [Stream(number, TOKENS) for number in range(STREAMS)]
    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(stream.run(frontend))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not all(stream.tokens for stream in streams):
                await asyncio.sleep(0.01)
        processes.signal("mocker-0", how)
    assert all(stream.tokens == expected[stream.number % 7] for stream in streams)
    assert {stream.finish for stream in streams} == {FinishReason.FINISH_REASON_LENGTH}
    moved = Counter(tuple(stream.workers) for stream in streams)
    assert moved.keys() == {(SOUND,), (LOST, SOUND)}
    record_property("observed", f"{moved[LOST, SOUND]} of {STREAMS} streams moved, each equal to an undisturbed one")
    if how is signal.SIGSTOP:
        processes.signal("mocker-0", signal.SIGCONT)
    await nothing_runs(processes)


@pytest.mark.timeout(900)
@pytest.mark.skipif(not FULL, reason="runs for minutes: KVROUTER_FAULTS=full")
async def test_no_request_fails_while_a_worker_is_killed_every_two_seconds(
    processes: Processes, record_property: Report
) -> None:
    await start_system(processes, schedulers=1, frontends=1, clock_factor=4.0, frontend=PROBING)
    for number in range(2, SOAK_WORKERS):
        await start_worker(processes, number)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await processes.directory.wait_for(lambda _: len(registered(processes)) == SOAK_WORKERS)
    frontend = processes.frontend(FRONTEND)
    expected = await undisturbed(frontend, SOAK_TOKENS, SOUND)
    numbers = iter(range(SOAK_REQUESTS))
    failures: list[str] = []
    moved = 0

    async def client() -> None:
        nonlocal moved
        for number in numbers:
            stream = Stream(number, SOAK_TOKENS)
            try:
                await stream.run(frontend)
            except KvRouterError as error:
                failures.append(str(error))
                continue
            assert stream.tokens == expected[number % 7]
            moved += len(stream.workers) > 1

    killer = Killer(processes)
    killing = asyncio.create_task(killer.run())
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(SOAK_CLIENTS):
                group.create_task(client())
    finally:
        killing.cancel()
        await asyncio.wait([killing])
    observed = f"{SOAK_REQUESTS} requests, {killer}, {moved} requests were retried or continued"
    record_property("observed", observed)
    assert not failures, f"{len(failures)} of {observed}: {failures[:10]}"
    await nothing_runs(processes)


class Killer:
    """Kills a worker every two seconds by the clock, while those that it killed before start again."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._began = time.monotonic()
        self._kills: list[float] = []
        """Seconds since the begin."""
        self._killed = dict[int, str]()
        """Address at which a worker was killed last. Its registration stays until its lease ends or it serves again."""
        self._postponed = 0
        self._fewest = SOAK_WORKERS

    async def run(self) -> None:
        """Kills those first that have served longest."""
        numbers = deque(range(SOAK_WORKERS))
        for kill in itertools.count(1):
            await asyncio.sleep(max(0.0, self._began + kill * SOAK_PERIOD_SECONDS - time.monotonic()))
            serving = [number for number in numbers if self._endpoint(number) not in ("", self._killed.get(number))]
            self._fewest = min(self._fewest, len(serving))
            if len(serving) <= SOAK_MIN_WORKERS:  # A busy machine takes long to start workers.
                self._postponed += 1
                continue
            number = serving[0]
            self._killed[number] = self._endpoint(number)
            await self._processes.kill(f"mocker-{number}")
            self._kills.append(time.monotonic() - self._began)
            await start_worker(self._processes, number)
            numbers.remove(number)
            numbers.append(number)

    def _endpoint(self, number: int) -> str:
        worker = registered(self._processes).get(number + 1)
        return "" if worker is None else worker.endpoint

    def __str__(self) -> str:
        pauses = [later - earlier for earlier, later in itertools.pairwise(self._kills)]
        return (
            f"{len(self._kills)} kills of {SOAK_WORKERS} workers in {time.monotonic() - self._began:.0f} s"
            f" (pauses {min(pauses):.1f} to {max(pauses):.1f} s, {self._postponed} kills were postponed,"
            f" {self._fewest} workers or more served)"
        )


def registered(processes: Processes) -> Mapping[int, WorkerRegistration]:
    """Returns the registrations of all workers by id."""
    return next(iter(processes.directory.components.values())).workers


async def start_worker(processes: Processes, number: int) -> None:
    options = ("--worker-id", str(number + 1), "--clock-factor", "4", "--load-report-seconds", "0")
    await processes.start("mocker", f"mocker-{number}", *options)
