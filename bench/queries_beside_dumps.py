"""Latency of FindMatches in one process, alone and while the same index is dumped, compared or written as a snapshot.

    python bench/queries_beside_dumps.py [--seconds 20] [--blocks 500000] [--only none,dump]

An Indexer with NATS and etcd on this machine holds one rank of 500,000 blocks. The benchmark calls the Indexer's object
200 times a second with prompts of 750 blocks, on the loop that serves gRPC too, and measures from the moment at which a
call is due, so that a loop that stands still counts. Beside it runs one of:

- ``none``: nothing;
- ``dump``: another process reads dumps over gRPC, one after the other;
- ``digest``: 20 times a second an event and a heartbeat with the rank's digest arrive, and the digest is compared;
- ``snapshot``: snapshots are taken, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import nats
import uvloop
from kvrouter.core import PrefixIndex
from kvrouter.devtools.system.servers import EtcdServer, NatsServer
from kvrouter.indexer.app import running
from kvrouter.indexer.settings import IndexerSettings
from kvrouter.net.etcd import connect
from kvrouter.net.nats.event_stream import ensure_stream
from kvrouter.runtime.contracts import Indexer
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.process.context import open_runtime
from kvrouter.runtime.process.hosting import Hosted, host
from kvrouter.runtime.rpc import RpcServer, open_channel, remote
from kvrouter.v1 import indexer_pb2
from kvrouter.v1.common_pb2 import Component, LocalHashes, Tier
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.events_pb2 import BlocksRemoved, BlocksStored, KvEvent, KvEventBatch
from kvrouter.v1.indexer_pb2 import DumpRequest, FindMatchesRequest, GetStatsRequest, TakeSnapshotRequest
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, RankRegistration, WorkerRegistration
from rich.console import Console
from rich.table import Table

SERVICE = indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"]
COMPONENT = ComponentName("bench", "queries")
NAMED = Component(namespace=COMPONENT.namespace, name=COMPONENT.name)
RANK = (1, 0)
BLOCK_SIZE = 16
CHAIN_BLOCKS = 1000
CHAINS_IN_BATCH = 16
PROMPT_BLOCKS = 750
QUERIES_PER_SECOND = 200
HEARTBEATS_PER_SECOND = 20
PATIENCE_SECONDS = 120.0
EARLY_SECONDS = 0.002
"""How long before a call is due its task is awake: the loop's timers are no more exact than a millisecond."""


@dataclass
class RankEvents:
    """The events of the rank, and what an index must hold after them."""

    chains: list[list[int]]
    index: PrefixIndex = field(default_factory=PrefixIndex)
    next_event_id: int = 0

    def batches(self) -> list[bytes]:
        """All chains as encoded batches."""
        encoded = []
        for start in range(0, len(self.chains), CHAINS_IN_BATCH):
            chains = self.chains[start : start + CHAINS_IN_BATCH]
            stored = (BlocksStored(engine_hashes=chain, local_hashes=chain) for chain in chains)
            encoded.append(self._batch([KvEvent(tier=Tier.TIER_DEVICE, stored=each) for each in stored]))
            self.index.apply(encoded[-1])
        return encoded

    def change(self) -> bytes:
        """A batch that removes a block the rank has not, after which the index computes the digest again."""
        return self._batch([KvEvent(tier=Tier.TIER_DEVICE, removed=BlocksRemoved(engine_hashes=[0]))])

    def heartbeat(self, digest: int) -> bytes:
        """A heartbeat with a digest."""
        return self._batch([], digest)

    def _batch(self, events: Sequence[KvEvent], digest: int | None = None) -> bytes:
        for event in events:
            event.event_id = self.next_event_id
            self.next_event_id += 1
        return KvEventBatch(
            worker_id=RANK[0],
            dp_rank=RANK[1],
            incarnation=1,
            events=events,
            block_size=BLOCK_SIZE,
            next_event_id=self.next_event_id,
            digest=digest,
            published_unix_ns=time.time_ns(),
        ).SerializeToString()


@dataclass
class Indexing:
    """An Indexer that holds the rank."""

    service: Indexer
    server: RpcServer
    connection: Any
    events: RankEvents

    async def publish(self, batch: bytes) -> None:
        await self.connection.jetstream().publish(COMPONENT.events_subject(*RANK), batch)

    async def size(self) -> tuple[int, int]:
        """(blocks, times that a digest differed)"""
        answer = await self.service.get_stats(GetStatsRequest(component=NAMED), deadline=Deadline.after(30))
        stats = answer.components[0]
        return stats.blocks, sum(rank.drifts for rank in stats.ranks)


@asynccontextmanager
async def indexing(directory: Path, blocks: int) -> AsyncIterator[Indexing]:
    """Starts the servers and an Indexer, and publishes the rank."""
    draw = random.Random(1)
    chains = [[draw.getrandbits(64) for _ in range(CHAIN_BLOCKS)] for _ in range(blocks // CHAIN_BLOCKS)]
    events = RankEvents(chains)
    async with AsyncExitStack() as stack:
        nats_server, etcd_server = NatsServer(directory / "nats"), EtcdServer(directory / "etcd")
        for server in (nats_server, etcd_server):
            await server.start()
            stack.push_async_callback(server.kill)
        descriptor = ComponentDescriptor(component=NAMED, model="m", block_size=BLOCK_SIZE, hash_scheme="xxh3-1337")
        registration = WorkerRegistration(
            worker_id=RANK[0],
            component=NAMED,
            model="m",
            block_size=BLOCK_SIZE,
            hash_scheme="xxh3-1337",
            publishes_events=True,
            ranks=[RankRegistration(dp_rank=RANK[1], incarnation=1)],
        )
        async with connect(etcd_server.endpoint) as client:
            await client.put(COMPONENT.descriptor_key.encode(), descriptor.SerializeToString())
            await client.put(COMPONENT.worker_key(RANK[0]).encode(), registration.SerializeToString())
        connection = await nats.connect(nats_server.url)
        stack.push_async_callback(connection.close)
        await ensure_stream(connection.jetstream(), COMPONENT)
        settings = IndexerSettings(
            namespace=COMPONENT.namespace,
            etcd=etcd_server.endpoint,
            nats=nats_server.url,
            bind="127.0.0.1:0",
            http_bind="127.0.0.1:0",
            instance_id="bench",
            compare_seconds=0.1,
            log_level="warning",
        )
        runtime = await stack.enter_async_context(open_runtime(settings))
        service = await stack.enter_async_context(running(settings, runtime))
        stopping, started = asyncio.Event(), asyncio.get_running_loop().create_future()
        hosted = Hosted("indexer", service, lambda: service.ready)
        hosting = asyncio.create_task(host(runtime, [hosted], stopping, started=started.set_result))
        try:
            there = Indexing(cast(Indexer, service), await started, connection, events)
            for batch in events.batches():
                await there.publish(batch)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not service.ready or await there.size() != (len(chains) * CHAIN_BLOCKS, 0):  # noqa: ASYNC110 - polled
                    await asyncio.sleep(0.1)
            yield there
        finally:
            stopping.set()
            await hosting


async def query(service: Indexer, chains: Sequence[Sequence[int]], seconds: float) -> list[float]:
    """Returns the milliseconds from when each call was due to its answer."""
    prompts = [LocalHashes(hashes=chain[:PROMPT_BLOCKS]) for chain in chains[:64]]
    requests = [FindMatchesRequest(component=NAMED, local_hashes=prompt) for prompt in prompts]
    taken = []
    began = time.perf_counter()
    for number in range(int(seconds * QUERIES_PER_SECOND)):
        due = began + number / QUERIES_PER_SECOND
        await asyncio.sleep(max(0.0, due - EARLY_SECONDS - time.perf_counter()))
        while time.perf_counter() < due:  # noqa: ASYNC110 - gives the loop to all that is due before
            await asyncio.sleep(0)
        answer = await service.find_matches(requests[number % len(requests)], deadline=Deadline.after(10))
        taken.append((time.perf_counter() - due) * 1e3)
        assert answer.device_blocks[0] == PROMPT_BLOCKS
    return taken


@asynccontextmanager
async def dumping(there: Indexing) -> AsyncIterator[Callable[[], int]]:
    """Reads dumps in another process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--dump-from", f"127.0.0.1:{there.server.port}"), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    count = 0

    async def follow(lines: asyncio.StreamReader) -> None:
        nonlocal count
        async for _ in lines:
            count += 1

    following = asyncio.create_task(follow(process.stdout))
    try:
        yield lambda: count
    finally:
        process.kill()
        await process.wait()
        await following


async def dump_from(address: str) -> None:
    """Reads dumps until killed; prints a line for each."""
    async with open_channel(address) as channel:
        service = cast(Indexer, remote(SERVICE, channel))
        while True:
            blocks = 0
            async for response in service.dump(DumpRequest(component=NAMED), deadline=Deadline.after(PATIENCE_SECONDS)):
                blocks += len(response.state.blocks)
            print(blocks, flush=True)


@asynccontextmanager
async def repeating(once: Callable[[], Any]) -> AsyncIterator[Callable[[], int]]:
    """Does something again and again."""
    count = 0

    async def repeat() -> None:
        nonlocal count
        while True:
            await once()
            count += 1

    task = asyncio.create_task(repeat())
    try:
        yield lambda: count
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def beside(there: Indexing, what: str) -> AsyncIterator[Callable[[], int]]:
    """Runs the work of a name; yields a function that returns how often it was done."""
    digest = there.events.index.digest(RANK)
    assert digest is not None

    async def beat() -> None:
        await there.publish(there.events.change())
        await there.publish(there.events.heartbeat(digest))
        await asyncio.sleep(1 / HEARTBEATS_PER_SECOND)

    async def snapshot() -> None:
        try:
            await there.service.take_snapshot(
                TakeSnapshotRequest(component=NAMED), deadline=Deadline.after(PATIENCE_SECONDS)
            )
        except KvRouterError as error:
            raise SystemExit(f"no snapshot: {error.message}") from error

    if what == "none":
        yield lambda: 0
    elif what == "dump":
        async with dumping(there) as count:
            yield count
    else:
        async with repeating(beat if what == "digest" else snapshot) as count:
            yield count


async def measure(only: Sequence[str], seconds: float, blocks: int) -> None:
    """Measures each part and prints a table."""
    table = Table("beside", "done", "p50, ms", "p99, ms", "p99.9, ms", "longest, ms")
    with tempfile.TemporaryDirectory() as directory:
        async with indexing(Path(directory), blocks) as there:
            await query(there.service, there.events.chains, 1.0)
            for what in only:
                async with beside(there, what) as count:
                    await asyncio.sleep(1.0)
                    before = count()
                    taken = await query(there.service, there.events.chains, seconds)
                    done = count() - before
                cuts = statistics.quantiles(taken, n=1000, method="inclusive")
                times = [cuts[499], cuts[989], cuts[998], max(taken)]
                table.add_row(what, str(done), *(f"{each:.2f}" for each in times))
                print(what, done, *(f"{each:.2f}" for each in times), flush=True)
            assert await there.size() == (len(there.events.chains) * CHAIN_BLOCKS, 0), "the index lost blocks"
    Console().print(table)


def main() -> None:
    """Runs the benchmark, or the process that reads dumps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="none,dump,digest,snapshot", help="parts, separated by commas")
    parser.add_argument("--seconds", type=float, default=20.0, help="time of each part")
    parser.add_argument("--blocks", type=int, default=500_000, help="blocks of the rank")
    parser.add_argument("--dump-from", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.dump_from:
        asyncio.run(dump_from(options.dump_from))
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(measure(options.only.split(","), options.seconds, options.blocks))


if __name__ == "__main__":
    main()
