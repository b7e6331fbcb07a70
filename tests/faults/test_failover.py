"""Workers are killed, frozen and restarted while they stream: clients see whole streams, and nothing stays behind."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import RoutingConstraints, TokenIds
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.registry_pb2 import WorkerRegistration
from kvrouter.v1.worker_pb2 import FinishReason, SamplingOptions, StopConditions

from .pools import Mode, Pool
from .processes import MODEL, PATIENCE_SECONDS, Processes, services_ready, start_services, start_system
from .rig import FULL

Report = Callable[[str, object], None]
FRONTEND, SCHEDULER = "frontend-0", "scheduler-0"
LOST, SOUND = 1, 2
PROBING = ("--worker-probe-seconds", "0.2")
PROMPT_TOKENS = 40
STREAMS = 64 if FULL else 12
TOKENS = 300 if FULL else 150
CLOCK_FACTORS = (0.1, 1.0)
"""The worker that is lost is slow, so that its streams are in the middle of their output then."""

SOAK_WORKERS = 8
SOAK_MIN_WORKERS = 2
"""Workers of each pool that are never killed together, so that no request meets only dead ones."""
SOAK_CLIENTS = 32
SOAK_REQUESTS = 20_000
SOAK_TOKENS = 24
SOAK_PERIOD_SECONDS = 2.0
SOAK_PREFILLS = ("--remote-prefill-min-tokens", "32", "--kv-transfer-latency-ms", "0")
"""Options of a Scheduler that leaves every prompt to the prefill workers."""


@dataclass
class Stream:
    """A request with a seed, whose output depends on nothing but the seed."""

    number: int
    max_tokens: int
    constraints: RoutingConstraints = field(default_factory=RoutingConstraints)
    tokens: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    prefills: set[int] = field(default_factory=set)
    """Workers that computed the prompt for these."""
    finish: FinishReason = FinishReason.FINISH_REASON_UNSPECIFIED

    async def run(self, frontend: Frontend) -> None:
        first = self.number * PROMPT_TOKENS
        request = FrontendServiceGenerateRequest(
            model=MODEL,
            token_ids=TokenIds(ids=range(first, first + PROMPT_TOKENS)),
            stop_conditions=StopConditions(max_tokens=self.max_tokens),
            sampling_options=SamplingOptions(seed=self.number % 7),
            constraints=self.constraints,
        )
        async for each in frontend.generate(request, deadline=Deadline.after(120)):
            self.tokens.extend(each.output.token_ids)
            self.finish = each.output.finish_reason
            if each.HasField("routing"):
                self.workers.append(each.routing.rank.worker_id)
            if each.routing.HasField("prefill_rank"):
                self.prefills.add(each.routing.prefill_rank.worker_id)


async def undisturbed(frontend: Frontend, max_tokens: int, worker_id: int) -> dict[int, list[int]]:
    """Returns the output for each seed."""
    alone = RoutingConstraints(worker_id=worker_id)
    streams = [Stream(number, max_tokens, alone) for number in range(7)]
    await asyncio.gather(*[stream.run(frontend) for stream in streams])
    return {stream.number % 7: stream.tokens for stream in streams}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP] if FULL else [signal.SIGKILL])
async def test_streams_continue_when_their_worker_is_lost(
    processes: Processes, how: signal.Signals, record_property: Report
) -> None:
    probing = PROBING if how is signal.SIGSTOP else ()
    await start_system(processes, schedulers=1, frontends=1, clock_factor=CLOCK_FACTORS, frontend=probing)
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
    await processes.until_idle(SCHEDULER, FRONTEND)


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not FULL, reason="runs for minutes: KVROUTER_FAULTS=full")
@pytest.mark.parametrize("mode", [Mode.AGGREGATED, Mode.SEQUENTIAL])
async def test_no_request_fails_while_a_worker_is_killed_every_two_seconds(
    processes: Processes, mode: Mode, record_property: Report
) -> None:
    await start_services(processes, schedulers=1, frontends=1, frontend=PROBING, scheduler=SOAK_PREFILLS)
    pools = [Pool.BOTH] if mode is Mode.AGGREGATED else [Pool.PREFILL, Pool.DECODE]
    workers = [SoakWorker(number, pools[number % len(pools)], processes) for number in range(SOAK_WORKERS)]
    for worker in workers:
        await worker.start()
    await services_ready(processes, schedulers=1, frontends=1, workers=SOAK_WORKERS)
    frontend = processes.frontend(FRONTEND)
    expected = await undisturbed(frontend, SOAK_TOKENS, SOUND)
    numbers = iter(range(SOAK_REQUESTS))
    failures: list[str] = []
    moved = prefilled = 0

    async def client() -> None:
        nonlocal moved, prefilled
        for number in numbers:
            stream = Stream(number, SOAK_TOKENS)
            try:
                await stream.run(frontend)
            except KvRouterError as error:
                failures.append(error.message)
                continue
            assert stream.tokens == expected[number % 7]
            moved += len(stream.workers) > 1
            prefilled += bool(stream.prefills)

    killer = Killer(workers)
    killing = asyncio.create_task(killer.run())
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(SOAK_CLIENTS):
                group.create_task(client())
    finally:
        killing.cancel()
        await asyncio.wait([killing])
    observed = f"{SOAK_REQUESTS} requests, {killer}, {moved} requests were retried or continued"
    if mode is not Mode.AGGREGATED:
        observed += f", {prefilled} prompts came from prefill workers"
        assert prefilled > SOAK_REQUESTS / 2, observed
    record_property("observed", observed)
    assert not failures, f"{len(failures)} of {observed}: {failures[:10]}"
    await processes.until_idle(SCHEDULER, FRONTEND)


@dataclass
class SoakWorker:
    """A worker of the soak."""

    number: int
    pool: Pool
    processes: Processes
    killed_at: str = ""
    """Address at which it was killed last. Its registration stays until its lease ends or it serves again."""

    @property
    def serves(self) -> bool:
        registration = registered(self.processes).get(self.number + 1)
        return registration is not None and registration.endpoint != self.killed_at

    async def start(self) -> None:
        place = ("--worker-id", str(self.number + 1), "--component", self.pool, "--role", self.pool)
        speed = ("--clock-factor", "4", "--max-sequences", "512", "--load-report-seconds", "0")
        await self.processes.start("mocker", f"mocker-{self.number}", *place, *speed)

    async def kill(self) -> None:
        self.killed_at = registered(self.processes)[self.number + 1].endpoint
        await self.processes.kill(f"mocker-{self.number}")


class Killer:
    """Kills a worker every two seconds by the clock, while those that it killed before start again."""

    def __init__(self, workers: Sequence[SoakWorker]) -> None:
        self._workers = deque(workers)
        """Those that were killed last come last."""
        self._began = time.monotonic()
        self._kills: list[float] = []
        """Seconds since the begin."""
        self._postponed = 0
        self._fewest = len(workers)
        """Workers of one pool that served."""

    async def run(self) -> None:
        """Kills those first that have served longest."""
        for kill in itertools.count(1):
            await asyncio.sleep(max(0.0, self._began + kill * SOAK_PERIOD_SECONDS - time.monotonic()))
            serving = Counter(worker.pool for worker in self._workers if worker.serves)
            self._fewest = min(self._fewest, *(serving[worker.pool] for worker in self._workers))
            spare = [each for each in self._workers if each.serves and serving[each.pool] > SOAK_MIN_WORKERS]
            if not spare:  # A busy machine takes long to start workers.
                self._postponed += 1
                continue
            worker = spare[0]
            await worker.kill()
            self._kills.append(time.monotonic() - self._began)
            await worker.start()
            self._workers.remove(worker)
            self._workers.append(worker)

    def __str__(self) -> str:
        pauses = [later - earlier for earlier, later in itertools.pairwise(self._kills)]
        return (
            f"{len(self._kills)} kills of {len(self._workers)} workers in {time.monotonic() - self._began:.0f} s"
            f" (pauses {min(pauses):.1f} to {max(pauses):.1f} s, {self._postponed} kills were postponed,"
            f" {self._fewest} workers of a pool or more served)"
        )


def registered(processes: Processes) -> Mapping[int, WorkerRegistration]:
    """Returns the registrations of all workers by id."""
    views = processes.directory.components.values()
    return {worker_id: worker for view in views for worker_id, worker in view.workers.items()}
