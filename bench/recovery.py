"""Measures the recovery of an Indexer with real processes: restore, replay, refill, and 2,000 workers that rejoin.

    python bench/recovery.py [--only restore,rejoin] [--workers 2000]

``restore``: 64 workers of 16,384 blocks each. Indexers start with all events in the stream and no snapshot, with a
snapshot, and with neither, so that they fetch everything from the workers: events where the workers still have them,
otherwise whole states. In between, a snapshot is taken under queries. ``rejoin``: 2,000 workers of 512 blocks are
frozen (SIGSTOP) until their leases have expired and the Indexer has dropped their blocks; then all continue at once,
under queries.

Workers are SDK processes (``recovery_workers.py``) beside NATS and etcd on the same machine; the results include what
they cost. Queries ask for a prefix of 512 blocks that every worker holds, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from kvrouter.devtools.system.servers import EtcdServer, NatsServer
from kvrouter.net.etcd import connect, watch_prefix
from kvrouter.runtime.contracts import Indexer
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import indexer_pb2
from kvrouter.v1.common_pb2 import Component, LocalHashes
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.indexer_pb2 import ComponentStats, FindMatchesRequest, GetStatsRequest, TakeSnapshotRequest
from kvrouter.v1.names import service_key
from kvrouter.v1.registry_pb2 import ServiceRegistration
from recovery_workers import COMPONENT, shared_chain
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
WORKER_PROCESSES = 2
QUERIES_PER_SECOND = 100
PATIENCE_SECONDS = 200.0
NAMED = Component(namespace=COMPONENT.namespace, name=COMPONENT.name)
EVERYTHING = FindMatchesRequest(component=NAMED, local_hashes=LocalHashes(hashes=shared_chain()))


@dataclass
class Report:
    """Prints each row as it is measured, and the whole table at the end."""

    table: Table = field(default_factory=lambda: Table("what", "figure"))

    def add(self, what: str, figure: str) -> None:
        self.table.add_row(what, figure)
        print(f"{what}: {figure}", flush=True)


class Process:
    """A process with its log in a file."""

    def __init__(self, log: Path) -> None:
        self.log_path = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, *arguments: str) -> None:
        with self.log_path.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def resident_mb(self, which: str = "VmRSS") -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(which)).split()[1]) / 1e3

    def processor_seconds(self) -> float:
        """Returns the processor time of its threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def logged(self, event: str) -> dict[str, Any] | None:
        """Returns the last log line about an event."""
        lines = [line for line in self.log_path.read_text().splitlines() if f'"event": "{event}"' in line]
        return cast(dict[str, Any], json.loads(lines[-1])) if lines else None


@dataclass
class System:
    """Servers, workers, and one Indexer at a time."""

    directory: Path
    nats: NatsServer
    etcd: EtcdServer
    stack: AsyncExitStack
    farms: list[Process] = field(default_factory=list)
    started: int = 0

    async def fill(self, workers: int, blocks: int, buffer_events: int = 200_000) -> float:
        """Starts workers. Returns the seconds until all have published everything."""
        began = time.monotonic()
        share = workers // WORKER_PROCESSES
        for number in range(WORKER_PROCESSES):
            farm = Process(self.directory / f"workers-{number}.log")
            self.stack.push_async_callback(farm.kill)
            await farm.start(
                str(HERE / "recovery_workers.py"),
                *("--etcd", self.etcd.endpoint, "--nats", self.nats.url),
                *("--first", str(1 + number * share), "--workers", str(share), "--blocks", str(blocks)),
                *("--buffer-events", str(buffer_events)),
            )
            self.farms.append(farm)
        for farm in self.farms:
            assert farm.process.stdout is not None
            if (await farm.process.stdout.readline()).strip() != b"filled":
                raise RuntimeError(f"workers ended: {farm.log_path.read_text()[-2000:]}")
        return time.monotonic() - began

    def signal(self, which: signal.Signals) -> None:
        for farm in self.farms:
            farm.process.send_signal(which)

    @asynccontextmanager
    async def indexer(self, *options: str) -> AsyncIterator[tuple[Process, Indexer, float]]:
        """Starts an Indexer. Returns the process, a stub and its start time."""
        self.started += 1
        name = f"indexer-{self.started}"
        process = Process(self.directory / f"{name}.log")
        began = time.monotonic()
        try:
            await process.start(
                *("-m", "kvrouter.indexer", "--namespace", COMPONENT.namespace, "--instance-id", name),
                *("--etcd", self.etcd.endpoint, "--nats", self.nats.url, "--http-bind", "", *options),
            )
            async with open_channel(await self._endpoint(name)) as channel:
                service = remote(indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"], channel)
                yield process, cast(Indexer, service), began
        finally:
            await process.kill()
            await self._forget(name)

    async def _endpoint(self, name: str) -> str:
        key = service_key(COMPONENT.namespace, "indexer", name)
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for change in watch_prefix(self.etcd.endpoint, key):
                value = getattr(change, "value", None) or getattr(change, "entries", {}).get(key)
                if value:
                    return ServiceRegistration.FromString(value).endpoint
        raise AssertionError("unreachable: the watch does not end")

    async def _forget(self, name: str) -> None:
        """Removes the record of a killed Indexer, which would count as a live replica until its lease ends."""
        async with connect(self.etcd.endpoint) as client:
            await client.delete(COMPONENT.applied_key(name).encode())


async def until(service: Indexer, done: Callable[[ComponentStats], bool], every: float = 0.05) -> float:
    """Waits for a condition on the component's statistics. Returns the time. A poll costs the Indexer time per rank."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                answer = await service.get_stats(GetStatsRequest(component=NAMED), deadline=Deadline.after(30))
                if done(answer.components[0]):
                    return time.monotonic()
            except KvRouterError:
                pass
            await asyncio.sleep(every)


def whole(workers: int, blocks: int) -> Callable[[ComponentStats], bool]:
    return lambda stats: stats.ready and stats.blocks == workers * blocks


def compared(workers: int, blocks: int) -> Callable[[ComponentStats], bool]:
    return lambda stats: whole(workers, blocks)(stats) and sum(rank.verified for rank in stats.ranks) == workers


@dataclass
class Queries:
    """Results of one query that is repeated all the time."""

    milliseconds: list[float] = field(default_factory=list)
    failed: int = 0

    def __str__(self) -> str:
        if len(self.milliseconds) < 2:
            return f"{len(self.milliseconds)} queries, {self.failed} failed"
        cuts = statistics.quantiles(self.milliseconds, n=100, method="inclusive")
        longest = max(self.milliseconds)
        return (
            f"{len(self.milliseconds)} queries, {self.failed} failed; p50 {cuts[49]:.2f} ms, p99 {cuts[98]:.1f} ms,"
            f" longest {longest:.1f} ms"
        )


@asynccontextmanager
async def asking(service: Indexer) -> AsyncIterator[Queries]:
    """Repeats a query while the context is open."""
    queries = Queries()

    async def ask() -> None:
        while True:
            began = time.perf_counter()
            try:
                await service.find_matches(EVERYTHING, deadline=Deadline.after(30))
                queries.milliseconds.append(1e3 * (time.perf_counter() - began))
            except KvRouterError:
                queries.failed += 1
            await asyncio.sleep(max(0.0, 1 / QUERIES_PER_SECOND - (time.perf_counter() - began)))

    task = asyncio.create_task(ask())
    try:
        yield queries
    finally:
        task.cancel()
        await asyncio.wait({task})


async def restore(system: System, report: Report) -> None:
    workers, blocks = 64, 16_384
    total = workers * blocks
    seconds = await system.fill(workers, blocks)
    report.add(f"{workers} workers publish {blocks:,} blocks each", f"{seconds:.1f} s")
    async with system.indexer() as (process, service, began):
        ready = await until(service, whole(workers, blocks)) - began
        caught = process.logged("caught up") or {}
        report.add(
            "replayed from the stream",
            f"{total / caught['seconds']:,.0f} blocks/s ({caught['messages']:,} messages in {caught['seconds']:.2f} s)",
        )
        report.add("start to ready, by the stream alone", f"{ready:.2f} s")
        async with asking(service) as queries:
            await asyncio.sleep(5)
        report.add("queries at rest", str(queries))
        began = time.monotonic()
        async with asking(service) as queries:
            await service.take_snapshot(TakeSnapshotRequest(component=NAMED), deadline=Deadline.after(60))
        report.add("snapshot taken, read back and verified", f"{time.monotonic() - began:.2f} s")
        report.add("queries meanwhile", str(queries))
    async with system.indexer() as (process, service, began):
        ready = await until(service, whole(workers, blocks)) - began
        restored = process.logged("restored") or {}
        report.add(
            "restored from the snapshot",
            f"{restored['blocks'] / restored['seconds']:,.0f} blocks/s ({restored['seconds']:.2f} s)",
        )
        report.add("start to ready, by the snapshot", f"{ready:.2f} s")
    await refill(system, report, "their events", workers, blocks)


async def refill(system: System, report: Report, what: str, workers: int, blocks: int) -> None:
    async with system.indexer("--reset-states") as (process, service, began):
        back = await until(service, compared(workers, blocks)) - began
        most = process.resident_mb("VmHWM")
        report.add(
            f"start to whole, from {what}",
            f"{back:.2f} s ({workers * blocks / back:,.0f} blocks/s; {most:.0f} MB at most)",
        )


async def refetch(system: System, report: Report) -> None:
    """Drops the workers' events except for the newest, so that only their whole states can be fetched."""
    workers, blocks = 64, 16_384
    await system.fill(workers, blocks, buffer_events=16)
    await refill(system, report, "their states", workers, blocks)


async def rejoin(system: System, report: Report, workers: int) -> None:
    blocks = 512
    seconds = await system.fill(workers, blocks)
    report.add(f"{workers:,} workers start and publish {blocks} blocks each", f"{seconds:.1f} s")
    async with system.indexer("--worker-grace-seconds", "1") as (process, service, began):
        back = await until(service, compared(workers, blocks), 0.5) - began
        report.add("start to compared with all of them", f"{back:.2f} s")
        async with asking(service) as queries:
            await asyncio.sleep(5)
        report.add("queries at rest", str(queries))
        report.add("memory at rest", f"{process.resident_mb():.0f} MB")
        system.signal(signal.SIGSTOP)
        await until(service, lambda stats: stats.blocks == 0, 0.5)
        system.signal(signal.SIGCONT)
        began, spent = time.monotonic(), process.processor_seconds()
        async with asking(service) as queries:
            back = await until(service, compared(workers, blocks), 0.5) - began
        spent = process.processor_seconds() - spent
        report.add(
            "all workers rejoin, until their blocks are back and compared",
            f"{back:.2f} s ({spent:.2f} s of processor time in the Indexer)",
        )
        report.add("queries meanwhile", str(queries))
        report.add("memory at most", f"{process.resident_mb('VmHWM'):.0f} MB")


@asynccontextmanager
async def running() -> AsyncIterator[System]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        servers = NatsServer(directory / "nats"), EtcdServer(directory / "etcd")
        async with AsyncExitStack() as stack:
            for server in servers:
                await server.start()
                stack.push_async_callback(server.kill)
            yield System(directory, *servers, stack)


async def main(only: list[str], workers: int) -> None:
    report = Report()
    if "restore" in only:
        async with running() as system:
            await restore(system, report)
        async with running() as system:
            await refetch(system, report)
    if "rejoin" in only:
        async with running() as system:
            await rejoin(system, report, workers)
    Console(width=None if sys.stdout.isatty() else 160).print(report.table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="restore,rejoin", help="parts to run, separated by commas")
    parser.add_argument("--workers", type=int, default=2000, help="workers that rejoin")
    chosen = parser.parse_args()
    asyncio.run(main(chosen.only.split(","), chosen.workers))
