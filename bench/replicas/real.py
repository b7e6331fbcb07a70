"""Compares several deciding Scheduler processes with one, over a real NATS and etcd.

    .venv/bin/python bench/replicas/real.py [--rounds 5] [--seconds 12] [--only bursts,batches]

Requests go to the replicas at random, or by prompt prefix as with sharding; their bookings are real. The workers are
simulated by a clock: each computes its prompts one after the other and uses a request's blocks until its end. Nothing
is cached, so mode kv decides by load alone. Schedulers with sync and those without are different processes in different
namespaces.

The values come from the workers, each time a request has been placed: how full the fullest is relative to the mean, the
longest queue of prompt tokens, and the resulting time to first token. Results are medians of the rounds. After each run
every Scheduler must have freed everything, and those with sync must agree by digest.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import cast

import nats
from kvrouter.core import sequence_hashes
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.devtools.system.servers import etcd_server, nats_server
from kvrouter.frontend.schedulers.sharding import PrefixSplit
from kvrouter.net.etcd import connect
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import scheduler_pb2
from kvrouter.v1.common_pb2 import BookingKey, Component, LocalHashes, Role, RoutingRequest
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, RankRegistration, WorkerRegistration
from kvrouter.v1.scheduler_pb2 import FreeRequest, GetStatusRequest, MarkPrefillCompleteRequest, SelectWorkerRequest
from kvrouter.v1.sync_pb2 import ReplicaSyncEvent
from nats.aio.msg import Msg
from prometheus_client import CollectorRegistry

SCHEDULER = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
MODEL, SCHEME = "bench", "xxh3-1337"
WORKERS, TOTAL_BLOCKS, BLOCK_SIZE = 8, 16_384, 16
REPLICAS = 4
TOKENS_PER_SECOND = 30_000
"""Prompt tokens that a worker computes per second."""
PROMPTS = (512, 2048, 6144)
HOLD_SECONDS = (0.3, 1.5)
"""Seconds from the first token to the end of a request."""
APPLICATIONS = 64
SOON_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Case:
    """How many Schedulers decide, and what they know of each other."""

    schedulers: int
    sync: bool = False
    sharded: bool = False

    @property
    def words(self) -> str:
        """Name of the case in the table."""
        if self.schedulers == 1:
            return "1"
        return f"{self.schedulers}, {'sync' if self.sync else 'no sync'}" + (
            ", sharded by prefix" if self.sharded else ""
        )


CASES = (
    Case(1),
    Case(2),
    Case(2, sync=True),
    Case(4),
    Case(4, sync=True),
    Case(4, sharded=True),
    Case(4, sync=True, sharded=True),
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. The first half of its prompt is its application's."""

    at: float
    tokens: int
    hold_seconds: float
    hashes: Sequence[int]


def arrivals(pattern: str, seconds: float, seed: int) -> list[Arrival]:
    """Returns ``bursts``, one second in three at ten times the rate, or ``batches``, 16 at once every 0.4 s."""
    rng = Random(seed)
    popularity = list(accumulate(1 / (rank + 1) for rank in range(APPLICATIONS)))
    found: list[Arrival] = []
    at = 0.0
    while at < seconds:
        at += rng.expovariate(100.0 if at % 3 < 1 else 10.0) if pattern == "bursts" else 0.4
        for _ in range(1 if pattern == "bursts" else 16):
            tokens = rng.choice(PROMPTS)
            blocks = tokens // BLOCK_SIZE
            (application,) = rng.choices(range(APPLICATIONS), cum_weights=popularity)
            shared = [application << 32 | place for place in range(blocks // 2)]
            own = [rng.getrandbits(64) for _ in range(blocks - len(shared))]
            found.append(Arrival(at, tokens, rng.uniform(*HOLD_SECONDS), [*shared, *own]))
    return found


@dataclass
class Workers:
    """The actual load of the workers."""

    blocks: list[int] = field(default_factory=lambda: [0] * WORKERS)
    computed_at: list[float] = field(default_factory=lambda: [0.0] * WORKERS)
    fullest: list[float] = field(default_factory=list)
    queues: list[float] = field(default_factory=list)

    def place(self, worker: int, blocks: int, tokens: int, now: float) -> float:
        """Adds a request. Returns the time of its first token."""
        self.blocks[worker] += blocks
        self.computed_at[worker] = max(now, self.computed_at[worker]) + tokens / TOKENS_PER_SECOND
        self.fullest.append(max(self.blocks) / fmean(self.blocks))
        self.queues.append((max(self.computed_at) - now) * TOKENS_PER_SECOND)
        return self.computed_at[worker]


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """Results of a run."""

    fullest: float
    queue: float
    ttft_mean_ms: float
    ttft_p99_ms: float


@dataclass
class Lag:
    """Seconds from a caller's response until its booking arrives on NATS; negative where NATS was faster."""

    answered: dict[str, float] = field(default_factory=dict)
    heard: dict[str, float] = field(default_factory=dict)

    async def take(self, message: Msg) -> None:
        """Receives an announcement of a Scheduler."""
        event = ReplicaSyncEvent.FromString(message.data)
        if "add_request" in event:
            self.heard[event.add_request.booking.request_id] = time.monotonic()

    def words(self) -> str:
        """Returns the median and the 99th percentile as text."""
        lags = sorted(self.heard[key] - at for key, at in self.answered.items() if key in self.heard)
        middle, late = (f"{lags[int(share * (len(lags) - 1))] * 1e3:.1f} ms" for share in (0.5, 0.99))
        return f"{len(lags):,} bookings were heard of {middle} after their caller had its answer, p99 {late}"


async def play(
    schedulers: Sequence[Scheduler], case: Case, requests: Sequence[Arrival], seed: int, lag: Lag
) -> RunStatistics:
    """Sends requests to the first of the Schedulers."""
    deal, split, workers = Random(seed), PrefixSplit(), Workers()
    waits: list[float] = []
    run = uuid.uuid4().hex
    began = time.monotonic() + 0.1

    def replica(request: Arrival) -> Scheduler:
        if not case.sharded:
            return schedulers[deal.randrange(case.schedulers)]
        hashes = b"".join(each.to_bytes(8, "little") for each in request.hashes)
        return schedulers[split.shard(sequence_hashes(hashes)) % case.schedulers]

    async def one(number: int, request: Arrival) -> None:
        scheduler = replica(request)
        await asyncio.sleep(began + request.at - time.monotonic())
        booking = BookingKey(request_id=f"{run}-{number}")
        routing = RoutingRequest(
            model=MODEL,
            local_hashes=LocalHashes(hashes=request.hashes),
            prompt_tokens=request.tokens,
            block_size=BLOCK_SIZE,
        )
        arrived = time.monotonic()
        chosen = await scheduler.select_worker(
            SelectWorkerRequest(request=routing, booking=booking), deadline=Deadline.after(SOON_SECONDS)
        )
        now = lag.answered[booking.request_id] = time.monotonic()
        worker = chosen.rank.worker_id - 1
        first_at = workers.place(worker, len(request.hashes), request.tokens, now)
        waits.append(first_at - arrived)
        await asyncio.sleep(first_at - time.monotonic())
        soon = Deadline.after(SOON_SECONDS)
        await scheduler.mark_prefill_complete(MarkPrefillCompleteRequest(booking=booking), deadline=soon)
        await asyncio.sleep(request.hold_seconds)
        workers.blocks[worker] -= len(request.hashes)
        await scheduler.free(FreeRequest(booking=booking), deadline=Deadline.after(SOON_SECONDS))

    async with asyncio.TaskGroup() as group:
        for number, request in enumerate(requests):
            group.create_task(one(number, request))
    await until_empty(schedulers, agree=case.sync)
    waits.sort()
    return RunStatistics(
        fmean(workers.fullest), fmean(workers.queues), fmean(waits) * 1e3, waits[int(0.99 * (len(waits) - 1))] * 1e3
    )


async def until_empty(schedulers: Sequence[Scheduler], *, agree: bool) -> None:
    """Waits until no Scheduler counts any load and, with sync, all agree."""
    async with asyncio.timeout(SOON_SECONDS):
        while True:
            answers = [
                await each.get_status(GetStatusRequest(), deadline=Deadline.after(SOON_SECONDS)) for each in schedulers
            ]
            components = [answer.components[0] for answer in answers]
            loads = [rank.active_blocks + rank.active_requests for each in components for rank in each.ranks]
            known = [
                {(each.scheduler_id, each.next_sequence, each.bookings, each.digest) for each in component.replicas}
                for component in components
            ]
            agreed = all(len(each) == len(schedulers) and each == known[0] for each in known)
            if not any(loads) and (agreed or not agree):
                return
            await asyncio.sleep(0.1)


@asynccontextmanager
async def running(url: str, etcd: str, namespace: str, logs: Path, *, sync: bool) -> AsyncIterator[list[Scheduler]]:
    """Runs Schedulers until they are ready and know the workers."""
    await register(etcd, ComponentName(namespace, "pool"))
    async with AsyncExitStack() as stack:
        for number in range(REPLICAS):
            arguments = [sys.executable, "-m", "kvrouter.scheduler", "--nats", url, "--etcd", etcd]
            arguments += ["--namespace", namespace, "--instance-id", f"scheduler-{number}", "--http-bind", ""]
            arguments += ["--no-assume-kv-reuse", "--overload-lag-ms", "0", *(["--replica-sync"] if sync else [])]
            command = Command(f"{namespace}-{number}", arguments, os.environ)
            process = await ManagedProcess.start(command, logs)
            stack.push_async_callback(process.stop, 5.0)
        directory = Directory(etcd, namespace, CollectorRegistry())
        following = asyncio.create_task(directory.run())
        try:
            async with asyncio.timeout(60):
                await directory.wait_for(
                    lambda seen: sum(each.ready for each in seen.services("scheduler").values()) == REPLICAS
                )
        finally:
            following.cancel()
            await asyncio.wait({following})
        stubs = [
            cast(Scheduler, remote(SCHEDULER, await stack.enter_async_context(open_channel(each.endpoint))))
            for _, each in sorted(directory.services("scheduler").items())
        ]
        await until_empty(stubs, agree=sync)
        yield stubs


async def register(etcd: str, name: ComponentName) -> None:
    """Registers workers that nobody calls."""
    component = Component(namespace=name.namespace, name=name.name)
    described = ComponentDescriptor(
        component=component, model=MODEL, block_size=BLOCK_SIZE, hash_scheme=SCHEME, role=Role.ROLE_BOTH
    )
    async with connect(etcd) as client:
        await client.put(name.descriptor_key.encode(), described.SerializeToString())
        for worker_id in range(1, WORKERS + 1):
            registration = WorkerRegistration(
                worker_id=worker_id,
                component=component,
                model=MODEL,
                endpoint=f"127.0.0.1:{worker_id}",
                block_size=BLOCK_SIZE,
                hash_scheme=SCHEME,
                ranks=[RankRegistration(incarnation=1, total_blocks=TOTAL_BLOCKS)],
            )
            await client.put(name.worker_key(worker_id).encode(), registration.SerializeToString())


def table(runs: Mapping[Case, Sequence[RunStatistics]]) -> str:
    """Returns Markdown: a row for each case, medians with the lowest and the highest."""

    def cell(values: Sequence[float], shape: str) -> str:
        return f"{median(values):{shape}} ({min(values):{shape}} - {max(values):{shape}})"

    lines = ["| deciding Schedulers | fullest / mean | queue | TTFT mean | p99 |", "|---|---|---|---|---|"]
    for case, found in runs.items():
        cells = (
            cell([each.fullest for each in found], ".2f"),
            cell([each.queue for each in found], ",.0f"),
            cell([each.ttft_mean_ms for each in found], ",.0f"),
            cell([each.ttft_p99_ms for each in found], ",.0f"),
        )
        lines.append(f"| {case.words} | {' | '.join(cells)} |")
    return "\n".join(lines)


async def measure(patterns: Sequence[str], rounds: int, seconds: float) -> None:
    """Runs all cases round by round, and prints a table for each pattern."""
    runs: dict[str, dict[Case, list[RunStatistics]]] = {name: {case: [] for case in CASES} for name in patterns}
    with tempfile.TemporaryDirectory() as scratch:
        async with AsyncExitStack() as stack:
            root = Path(scratch)
            url = await stack.enter_async_context(nats_server(root / "nats"))
            etcd = await stack.enter_async_context(etcd_server(root / "etcd"))
            alone = await stack.enter_async_context(running(url, etcd, "alone", root, sync=False))
            synced = await stack.enter_async_context(running(url, etcd, "synced", root, sync=True))
            lag, client = Lag(), await nats.connect(url)
            stack.push_async_callback(client.close)
            await client.subscribe(ComponentName("synced", "pool").sync_subject, cb=lag.take)
            for group in (alone, synced):  # connections open, code is warm
                await play(group, Case(REPLICAS), arrivals("batches", 1.0, rounds), rounds, Lag())
            for seed in range(rounds):
                for name in patterns:
                    requests = arrivals(name, seconds, seed)
                    for case in CASES:
                        run_statistics = await play(synced if case.sync else alone, case, requests, seed, lag)
                        runs[name][case].append(run_statistics)
    for name, found in runs.items():
        print(f"\n{name}, medians of {rounds} rounds (least - most)\n\n{table(found)}", flush=True)
    print(f"\n{lag.words()}", flush=True)


def main() -> int:
    """Runs the command line. Exit status 1 if Schedulers disagree or did not free everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--only", default="bursts,batches")
    options = parser.parse_args()
    try:
        asyncio.run(measure(options.only.split(","), options.rounds, options.seconds))
    except (TimeoutError, KvRouterError) as error:
        print(f"not free, or not in agreement: {error!r}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
