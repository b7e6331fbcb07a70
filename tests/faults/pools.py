"""A system of processes: workers behind faulty wires, aggregated or in prefill and decode pools."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import aiohttp
from kvrouter.devtools.system.ports import free_ports
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.frontend_pb2 import GetWorkerHealthRequest, WorkerHealth, WorkerHealthState
from kvrouter.v1.registry_pb2 import ServiceRegistration
from prometheus_client.parser import text_string_to_metric_families

from .faulty_wire import FaultyWire, Garble
from .processes import PATIENCE_SECONDS, Processes
from .throttled_worker import FAST, SLOW

FRONTEND, SCHEDULER = "frontend-0", "scheduler-0"
_POLL_SECONDS = 0.02
_CLOCK_FACTOR = 0.2
"""Engine seconds in a second: each stage of a request takes a good part of a second."""
_MAX_SEQUENCES = 4
_WORKER = (
    *("--clock-factor", str(_CLOCK_FACTOR), "--max-sequences", str(_MAX_SEQUENCES), "--max-batched-tokens", "512"),
    *("--load-report-seconds", "0.2", "--kv-transfer-latency-ms", "150", "--drain-seconds", "0.2"),
)
_FRONTEND = (
    *("--port", "0", "--worker-probe-seconds", "0.2", "--worker-stall-seconds", "2"),
    *("--worker-back-off-seconds", "0.2", "--worker-back-off-max-seconds", "0.5"),
)
# No worker is predicted to hold a prompt, so that each attempt in a decode pool needs a prefill worker.
_SCHEDULER = (
    *("--router-mode", "round-robin", "--remote-prefill-min-tokens", "32", "--kv-transfer-latency-ms", "0"),
    *("--session-grace-seconds", "2"),
)


class Mode(StrEnum):
    """How requests are served."""

    AGGREGATED = "aggregated"
    SEQUENTIAL = "disaggregated, sequential"
    CONCURRENT = "disaggregated, concurrent"


class Pool(StrEnum):
    """A component, by the role of its workers."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Fault(StrEnum):
    """What happens to a worker."""

    KILLED = "killed"
    FROZEN = "frozen"
    RESET = "its connections are reset"
    HALF_OPEN = "its connections fall silent"
    SLOWED = "slowed a hundredfold"
    GARBAGE = "sends random bytes"
    UNDECODABLE = "sends messages that cannot be decoded"


@dataclass
class FaultyWorker:
    """A worker as a process, which Frontends reach through a wire."""

    pool: Pool
    worker_id: int
    wire: FaultyWire
    ports: range
    """Of the worker itself, and of its metrics."""
    processes: Processes
    options: Sequence[str]

    @property
    def name(self) -> str:
        return f"{self.pool}-{self.worker_id}"

    async def start(self) -> None:
        await self.processes.start(
            "mocker",
            self.name,
            *("--worker-id", str(self.worker_id), "--component", self.pool, "--role", self.pool),
            *("--bind", f"127.0.0.1:{self.ports[0]}", "--advertise", self.wire.address),
            *("--http-bind", f"127.0.0.1:{self.ports[1]}"),
            *_WORKER,
            *self.options,
            module="tests.faults.throttled_worker",
        )

    async def strike(self, fault: Fault) -> None:
        """Begins a fault, which lasts until ``heal``."""
        match fault:
            case Fault.KILLED:
                await self.processes.kill(self.name)
            case Fault.FROZEN:
                self.processes.signal(self.name, signal.SIGSTOP)
            case Fault.RESET:
                self.wire.reset()
            case Fault.HALF_OPEN:
                self.wire.silence()
            case Fault.SLOWED:
                self.processes.signal(self.name, SLOW)
            case Fault.GARBAGE:
                self.wire.garble(Garble.BYTES)
            case Fault.UNDECODABLE:
                self.wire.garble(Garble.MESSAGES)

    async def heal(self, fault: Fault) -> None:
        """Ends a fault."""
        match fault:
            case Fault.KILLED:
                await self.start()
            case Fault.FROZEN:
                self.processes.signal(self.name, signal.SIGCONT)
            case Fault.SLOWED:
                self.processes.signal(self.name, FAST)
            case _:
                self.wire.heal()

    async def left(self) -> dict[str, float]:
        """Returns what the engine still has of requests, by metric."""
        found = await _metrics(f"127.0.0.1:{self.ports[1]}")
        names = [f"kvrouter_mocker_{name}" for name in ("running", "waiting", "prefill_tokens", "kept_blocks")]
        return {name: found[name] for name in names if found.get(name)}


@dataclass
class Pools:
    """The processes of one system."""

    mode: Mode
    processes: Processes
    workers: list[FaultyWorker]

    @property
    def frontend(self) -> Frontend:
        return self.processes.frontend(FRONTEND)

    def struck(self, pool: Pool) -> FaultyWorker:
        """Returns the worker of a pool that faults strike."""
        return next(worker for worker in self.workers if worker.pool is pool)

    async def health(self, worker: FaultyWorker) -> WorkerHealth | None:
        """Returns what the Frontend believes of a worker; None if it does not know it."""
        answer = await self.frontend.get_worker_health(GetWorkerHealthRequest(), deadline=Deadline.after(10))
        return next((each for each in answer.workers if each.worker_id == worker.worker_id), None)

    async def until_all_serve(self) -> None:
        """Returns when every worker is registered, known to the Scheduler and tried by the Frontend."""

        async def missing() -> object:
            health = {worker.name: await self.health(worker) for worker in self.workers}
            status = await self.processes.status(SCHEDULER)
            known = {rank.rank.worker_id for component in status.components for rank in component.ranks}
            return [
                f"{worker.name}: {health[worker.name]}"
                for worker in self.workers
                if not _is_tried(health[worker.name]) or worker.worker_id not in known
            ]

        await until_nothing(missing, "these workers do not serve")

    async def until_nothing_is_left(self) -> None:
        """Returns when no booking, no call and no request is left anywhere."""
        await until_nothing(self._left, "this is left")

    async def _left(self) -> object:
        status = await self.processes.status(SCHEDULER)
        left: dict[str, object] = {
            f"worker {rank.rank.worker_id} in the Scheduler": load
            for component in status.components
            for rank in component.ranks
            if any(load := (rank.active_requests, rank.active_blocks, rank.prefill_tokens))
        }
        queued = sum(component.queued.requests for component in status.components)
        left |= {name: count for name, count in (("bookings", status.bookings), ("queued", queued)) if count}
        registration = cast(ServiceRegistration, self.processes.directory.services("frontend")[FRONTEND])
        metrics = await _metrics(registration.http_endpoint)
        for gauge in ("kvrouter_frontend_live_bookings", "kvrouter_frontend_requests_in_flight"):
            if metrics[gauge]:
                left[gauge] = metrics[gauge]
        for worker in self.workers:
            health = await self.health(worker)
            if health is not None and health.calls:
                left[f"calls to {worker.name}"] = health.calls
            if engine := await worker.left():
                left[worker.name] = engine
        return left


def _is_tried(health: WorkerHealth | None) -> bool:
    """Returns whether a worker gets requests, if only one at a time."""
    suspected = WorkerHealthState.WORKER_HEALTH_STATE_SUSPECTED
    return health is not None and health.state != suspected and not health.retry_in_ms


async def until_nothing(found: Callable[[], Awaitable[object]], what: str) -> None:
    """Returns when a function finds nothing; a process that is away means not yet."""
    last: object = None
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    last = await found()
                    if not last:
                        return
                except (KvRouterError, OSError, aiohttp.ClientError) as error:
                    last = error
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise AssertionError(f"{what}: {last!r}") from None


async def _metrics(address: str) -> dict[str, float]:
    """Returns the sum of each metric's samples."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
        session.get(f"http://{address}/metrics") as response,
    ):
        families = text_string_to_metric_families(await response.text())
    return {family.name: sum(sample.value for sample in family.samples) for family in families}


@asynccontextmanager
async def running_pools(
    processes: Processes,
    mode: Mode,
    rng: random.Random,
    *,
    scheduler: Sequence[str] = (),
    engine: Sequence[str] = (),
) -> AsyncIterator[Pools]:
    """Two workers in each pool, and services that are ready; with further options of Scheduler and workers."""
    pools = (Pool.BOTH,) if mode is Mode.AGGREGATED else (Pool.PREFILL, Pool.DECODE)
    handover = "concurrent" if mode is Mode.CONCURRENT else "sequential"
    workers = []
    await processes.start("scheduler", SCHEDULER, *_SCHEDULER, *scheduler)
    await processes.start("frontend", FRONTEND, *_FRONTEND)
    for number, pool in enumerate(pool for pool in pools for _ in range(2)):
        ports = free_ports(2)
        wire = FaultyWire(ports[0], rng)
        await processes.stack.enter_async_context(wire.laid())
        worker = FaultyWorker(pool, number + 1, wire, ports, processes, ("--handover", handover, *engine))
        await worker.start()
        workers.append(worker)
    for kind, name in (("scheduler", SCHEDULER), ("frontend", FRONTEND)):
        await processes.ready(kind, name)
    system = Pools(mode, processes, workers)
    await system.until_all_serve()
    yield system
