"""Processes of the previous release work with those of this one: none fails a request, and bookings end."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from kvrouter.devtools.system.ports import free_ports
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import TokenIds
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.worker_pb2 import StopConditions

from ...faults.processes import MODEL, PATIENCE_SECONDS, Processes, system
from ...faults.test_rolling_restarts import LoadBalancer
from ...integration.sidecar.rig import events_at
from . import previous_release

SERVICES = ("indexer", "scheduler", "frontend")
_FIRST_WORKER_IDS = {"mocker": 1, "sidecar": 11}
KINDS = (*SERVICES, *_FIRST_WORKER_IDS)
"""In the order of an upgrade."""
REPLICAS = 2
AT_ONCE = 8
STEP = 40
"""Requests that complete before the next process is replaced."""
PROMPT_TOKENS = 320


@pytest.fixture(scope="module")
def older() -> Path:
    """Interpreter of the previous release."""
    try:
        return previous_release.python()
    except previous_release.NoHistory as reason:
        pytest.skip(str(reason))


@pytest.fixture
async def processes(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[Processes]:
    """Processes in a namespace of the test's own; none runs yet."""
    async with system(nats_url, etcd_endpoint, namespace) as found:
        yield found


@dataclass
class MixedSystem:
    """Two processes of each kind, each of this release or of the previous one."""

    processes: Processes
    older: Path
    directory: Path
    names: dict[tuple[str, int], str] = field(default_factory=dict)
    """The process of each kind and number that runs now."""
    _engines: dict[int, int] = field(default_factory=dict)
    """Ports of the engine servers beside sidecars."""

    async def start(self, kind: str, number: int, *, is_older: bool) -> None:
        """Starts a process under a new name, as a new pod has, and returns when it is ready."""
        name = f"{kind}-{number}-{'old' if is_older else 'new'}"
        self.names[kind, number] = name
        await self.processes.start(
            *(kind, name, *self._options(kind, number)),
            python=self.older if is_older else None,
            log=self.directory / f"{name}.log",
        )
        if kind in SERVICES:
            await self.processes.ready(kind, name)

    def _options(self, kind: str, number: int) -> tuple[str, ...]:
        if kind == "scheduler":
            return "--router-mode", "kv", "--replica-sync"
        if kind == "frontend":
            return "--port", "0"
        if kind == "mocker":
            return "--worker-id", str(_worker_id(kind, number)), "--model", MODEL, "--load-report-seconds", "0.5"
        if kind == "sidecar":
            engine = f"http://127.0.0.1:{self._engines[number]}"
            return "--worker-id", str(_worker_id(kind, number)), "--engine", engine
        return ()

    async def start_engines(self) -> None:
        """Starts the engine servers that stay what they are while the sidecars beside them are replaced."""
        for number in range(REPLICAS):
            port, live, replay = free_ports(3)
            self._engines[number] = port
            await self.processes.start(
                *("mocker", f"engine-{number}", "--openai", "--model", MODEL, "--enable-prompt-tokens-details"),
                *("--bind", f"127.0.0.1:{port}", "--kv-events-config", events_at(live, replay)),
            )

    async def replace(self, kind: str, number: int, *, is_older: bool) -> None:
        """Stops a process in order and starts the same one of the other release. Returns when it serves.

        A rolling upgrade waits for that too. Otherwise all workers stop before the first one is back.
        """
        name = self.names[kind, number]
        worker_id = None if kind in SERVICES else _worker_id(kind, number)
        earlier = 0 if worker_id is None else self.processes.registered_at(worker_id)
        self.processes.signal(name, signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await self.processes.running[name].wait() == 0, f"{name}: {self.log(name)[-5:]}"
        await self.start(kind, number, is_older=is_older)
        if worker_id is not None:
            await self.processes.until_registered(worker_id, after=earlier)

    def log(self, name: str) -> list[dict[str, object]]:
        """Returns the events of a process; warnings of Python itself are no events."""
        lines = (self.directory / f"{name}.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def errors(self) -> list[str]:
        """Returns what the logs of all processes say at level error."""
        found = []
        for path in sorted(self.directory.glob("*.log")):
            found += [f"{path.stem}: {line}" for line in self.log(path.stem) if line.get("level") == "error"]
        return found

    async def until_workers(self) -> None:
        """Returns when every worker is registered and its cache is in both Indexers."""
        expected = {_worker_id(kind, number) for number in range(REPLICAS) for kind in _FIRST_WORKER_IDS}

        def complete(_: object) -> bool:
            components = self.processes.directory.components.values()
            return {worker for each in components for worker in each.workers} == expected

        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.processes.directory.wait_for(complete)

    async def until_cached(self) -> None:
        """Returns when a repeated prompt is predicted, and found, in a worker's cache by way of each Frontend."""
        for number in range(REPLICAS):
            prompt = range(10_000 * (number + 1), 10_000 * (number + 1) + PROMPT_TOKENS)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not all(await self._repeated(self.names["frontend", number], prompt)):
                    await asyncio.sleep(0.1)

    async def _repeated(self, frontend: str, prompt: range) -> tuple[int, int]:
        """Runs a request. Returns predicted blocks and cached tokens."""
        request = FrontendServiceGenerateRequest(
            model=MODEL, token_ids=TokenIds(ids=prompt), stop_conditions=StopConditions(max_tokens=4)
        )
        predicted = cached = 0
        async for piece in self.processes.frontend(frontend).generate(request, deadline=Deadline.after(60)):
            predicted = max(predicted, piece.routing.predicted_overlap_blocks)
            cached = max(cached, piece.output.cached_tokens)
        return predicted, cached

    async def until_idle(self) -> None:
        """Returns when no Scheduler has a booking."""
        for number in range(REPLICAS):
            await self.processes.until_booked(self.names["scheduler", number], 0)


def _worker_id(kind: str, number: int) -> int:
    return _FIRST_WORKER_IDS[kind] + number


@asynccontextmanager
async def loaded(processes: Processes) -> AsyncIterator[LoadBalancer]:
    """Runs requests while the context lasts. No request may fail."""
    balancer, stopped = LoadBalancer(processes), asyncio.Event()
    async with asyncio.TaskGroup() as clients:
        for _ in range(AT_ONCE):
            clients.create_task(balancer.run(stopped))
        try:
            yield balancer
            await balancer.until_completed(STEP)
        finally:
            stopped.set()
    assert not balancer.failures


async def started(mixed: MixedSystem, older: frozenset[str]) -> None:
    """Starts everything; the kinds in ``older`` are of the previous release."""
    await mixed.start_engines()
    for kind in KINDS:
        for number in range(REPLICAS):
            await mixed.start(kind, number, is_older=kind in older)
    await mixed.until_workers()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
async def test_an_older_process_works_with_newer_ones(
    kind: str, older: Path, processes: Processes, tmp_path: Path
) -> None:
    mixed = MixedSystem(processes, older, tmp_path)
    await started(mixed, frozenset({kind}))
    async with loaded(processes):
        await mixed.until_cached()
    await mixed.until_idle()
    assert not mixed.errors()


@pytest.mark.timeout(1200)
async def test_a_rolling_upgrade_and_the_way_back_fail_no_request(
    older: Path, processes: Processes, tmp_path: Path
) -> None:
    mixed = MixedSystem(processes, older, tmp_path)
    await started(mixed, frozenset(KINDS))
    async with loaded(processes) as balancer:
        for kinds, is_older in ((KINDS, False), (KINDS[::-1], True)):
            for kind in kinds:
                for number in range(REPLICAS):
                    await mixed.replace(kind, number, is_older=is_older)
                    await balancer.until_completed(STEP)
            await mixed.until_workers()
            await mixed.until_cached()
    await mixed.until_idle()
    assert not mixed.errors()
