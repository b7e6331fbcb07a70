"""Probes: what counts as silence, and what does not."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import structlog
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.workers.client import WorkerClient, WorkerPool
from kvrouter.frontend.workers.connection import Probe
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.frontend.workers.observed_worker import BackOff
from kvrouter.frontend.workers.probes import StallTrials, WorkerProbes
from kvrouter.runtime.discovery.directory import ComponentView, Directory
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, WorkerRegistration
from prometheus_client import CollectorRegistry

from ....waiting import until

POOL = ComponentName("ns", "pool")


class Workers:
    """A directory of workers, and the channels to them. A probe of a silent one waits."""

    def __init__(self, *endpoints: str) -> None:
        self.requested: Counter[str] = Counter()
        self.forgotten: list[str] = []
        self.answering = {endpoint: asyncio.Event() for endpoint in endpoints}
        self.refusing: set[str] = set()
        self.defective: set[str] = set()
        self.has_streams = False
        self.pongs: dict[str, asyncio.Future[bool]] = {}
        self._changed = asyncio.Event()
        for event in self.answering.values():
            event.set()

    @property
    def components(self) -> Mapping[ComponentName, ComponentView]:
        workers = {
            number: WorkerRegistration(worker_id=number, endpoint=endpoint)
            for number, endpoint in enumerate(self.answering)
        }
        return {POOL: ComponentView(POOL, ComponentDescriptor(), workers)}

    def leave(self, endpoint: str) -> None:
        del self.answering[endpoint]
        self._changed.set()

    async def changes(self) -> AsyncIterator[Workers]:
        while True:
            self._changed.clear()
            yield self
            await self._changed.wait()

    def update(self, _: Mapping[ComponentName, ComponentView]) -> None: ...

    async def forget(self, endpoint: str) -> None:
        self.forgotten.append(endpoint)

    def connection(self, endpoint: str) -> Any:
        return SimpleNamespace(ping=partial(self._ping, endpoint))

    def _ping(self, endpoint: str) -> asyncio.Future[bool] | None:
        if not self.has_streams:
            return None
        self.requested[endpoint] += 1
        pong = self.pongs[endpoint] = asyncio.get_running_loop().create_future()
        if self.answering[endpoint].is_set():
            pong.set_result(True)
        return pong

    async def probe(self, endpoint: str) -> Probe:
        self.requested[endpoint] += 1
        if endpoint in self.defective:
            raise ZeroDivisionError("a defect")
        if endpoint in self.refusing:
            return Probe.UNREACHABLE
        await self.answering[endpoint].wait()
        return Probe.ANSWERED


@asynccontextmanager
async def probing(
    workers: Workers, interval_seconds: float = 0.005, max_missed: int = 3
) -> AsyncIterator[WorkerHealth]:
    health = WorkerHealth(BackOff(), max_missed=max_missed)
    pool = cast(WorkerPool, workers)
    trials = StallTrials(WorkerClient(pool, health, FrontendMetrics(CollectorRegistry())))
    probes = WorkerProbes(cast(Directory, workers), pool, health, trials, interval_seconds=interval_seconds)
    running = asyncio.create_task(probes.run())
    try:
        yield health
    finally:
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()


async def test_only_a_silent_worker_is_suspected_and_its_late_answer_clears_it() -> None:
    workers = Workers("a:1", "b:1")
    async with probing(workers) as health:
        await until(lambda: min(workers.requested.values(), default=0) >= 2 and len(workers.requested) == 2)
        workers.answering["a:1"].clear()
        await until(lambda: [each.worker_id for each in health.avoided(POOL)] == [0])
        requested = workers.requested["a:1"]
        workers.answering["a:1"].set()
        await until(lambda: not health.avoided(POOL))
        assert workers.requested["a:1"] == requested, "the answer to the probe that waited is enough"


async def test_a_worker_whose_port_refuses_is_suspected_at_once_and_probed_again() -> None:
    workers = Workers("a:1")
    workers.refusing.add("a:1")
    async with probing(workers, max_missed=1_000_000) as health:
        await until(lambda: [each.worker_id for each in health.avoided(POOL)] == [0])
        workers.refusing.clear()
        await until(lambda: not health.avoided(POOL))


async def test_a_worker_is_suspected_if_its_stream_answers_no_ping_and_cleared_by_the_late_answer() -> None:
    workers = Workers("a:1", "b:1")
    workers.has_streams = True
    async with probing(workers) as health:
        await until(lambda: len(workers.requested) == 2)
        workers.answering["a:1"].clear()
        await until(lambda: [each.worker_id for each in health.avoided(POOL)] == [0])
        workers.answering["a:1"].set()
        workers.pongs["a:1"].set_result(True)
        await until(lambda: not health.avoided(POOL))


async def test_a_worker_whose_stream_ends_is_probed_another_way() -> None:
    workers = Workers("a:1")
    workers.has_streams = True
    workers.answering["a:1"].clear()
    async with probing(workers, max_missed=1_000_000) as health:
        await until(lambda: "a:1" in workers.pongs)
        workers.refusing.add("a:1")
        workers.pongs["a:1"].set_result(False)
        await until(lambda: [each.worker_id for each in health.avoided(POOL)] == [0])


async def test_an_answer_that_hits_a_defect_counts_against_its_worker_alone() -> None:
    workers = Workers("a:1", "b:1")
    workers.defective.add("a:1")
    with structlog.testing.capture_logs() as logs:
        async with probing(workers, max_missed=1_000_000) as health:
            await until(
                lambda: [each.worker_id for each in health.avoided(POOL)] == [0] and workers.requested["a:1"] > 3
            )
            workers.defective.clear()
            await until(lambda: not health.avoided(POOL))
    assert [entry["endpoint"] for entry in logs if entry["event"] == "worker.probe_failed"] == ["a:1"]


async def test_a_gateway_whose_own_loop_stood_still_suspects_nobody() -> None:
    workers = Workers("a:1")
    workers.answering["a:1"].clear()
    async with probing(workers, interval_seconds=0.05) as health:
        await until(lambda: workers.requested["a:1"] == 1)
        before = health.status()[0].missed_probes
        time.sleep(0.5)  # noqa: ASYNC251 - as the loop of a process that was frozen for ten intervals
        await until(lambda: health.status()[0].missed_probes > before)
        assert health.suspected == 0
        workers.answering["a:1"].set()
        await until(lambda: workers.requested["a:1"] >= 2)
        assert health.suspected == 0


async def test_a_worker_with_requests_is_probed_in_every_interval_however_many_are_idle() -> None:
    workers = Workers("busy:1", *(f"idle:{number}" for number in range(300)))
    async with probing(workers) as health:
        await until(lambda: len(workers.requested) == 301)
        call = health.begin("busy:1", 1)
        before = workers.requested.copy()
        await until(lambda: workers.requested["busy:1"] >= before["busy:1"] + 10)
        call.end()
        again = workers.requested - before
        assert sum(again.values()) < 300, "all idle workers were probed meanwhile"
        workers.answering["busy:1"].clear()


async def test_a_worker_that_left_is_not_probed_any_more_and_its_connection_is_closed() -> None:
    workers = Workers("a:1", "b:1")
    async with probing(workers) as health:
        await until(lambda: len(workers.requested) == 2)
        workers.leave("a:1")
        await until(lambda: "a:1" not in health.endpoints())
        requested = workers.requested["b:1"]
        await until(lambda: workers.requested["b:1"] >= requested + 3)
        seen = workers.requested["a:1"]
        await until(lambda: workers.requested["b:1"] >= requested + 6)
        assert workers.requested["a:1"] == seen
        assert workers.forgotten == ["a:1"]
