"""Workers are killed, frozen and restarted while they stream: clients see whole streams, and nothing stays behind."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import KvRouterError
from kvrouter.v1.common_pb2 import RoutingConstraints
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest, GetWorkerHealthRequest, WorkerHealthState
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

SOAK_WORKERS = 5
SOAK_CLIENTS = 32
SOAK_REQUESTS = 20_000
SOAK_TOKENS = 24
SOAK_PAUSE_SECONDS = 2.0
"""Between two kills."""


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
    view = lambda: next(iter(processes.directory.components.values()))  # noqa: E731
    async with asyncio.timeout(PATIENCE_SECONDS):
        await processes.directory.wait_for(lambda _: len(view().workers) == SOAK_WORKERS)
    frontend = processes.frontend(FRONTEND)
    expected = await undisturbed(frontend, SOAK_TOKENS, SOUND)
    numbers = iter(range(SOAK_REQUESTS))
    failures: list[str] = []
    moved = 0
    kills = 0

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

    async def killer() -> None:
        nonlocal kills
        for number in itertools.cycle(range(SOAK_WORKERS)):
            await processes.kill(f"mocker-{number}")
            kills += 1
            await start_worker(processes, number)
            await asyncio.sleep(SOAK_PAUSE_SECONDS)
            await until_healthy(processes, SOAK_WORKERS - 2)  # A busy machine takes longer to start a worker.

    killing = asyncio.create_task(killer())
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(SOAK_CLIENTS):
                group.create_task(client())
    finally:
        killing.cancel()
        await asyncio.wait([killing])
    assert not failures
    record_property("observed", f"{SOAK_REQUESTS} requests, {kills} kills, {moved} requests were retried or continued")
    await nothing_runs(processes)


async def until_healthy(processes: Processes, workers: int) -> None:
    healthy = 0
    async with asyncio.timeout(PATIENCE_SECONDS):
        while healthy < workers:
            answer = await processes.frontend(FRONTEND).get_worker_health(
                GetWorkerHealthRequest(), deadline=Deadline.after(10)
            )
            healthy = sum(each.state == WorkerHealthState.WORKER_HEALTH_STATE_HEALTHY for each in answer.workers)
            await asyncio.sleep(0.05)


async def start_worker(processes: Processes, number: int) -> None:
    options = ("--worker-id", str(number + 1), "--clock-factor", "4", "--load-report-seconds", "0")
    await processes.start("mocker", f"mocker-{number}", *options)
