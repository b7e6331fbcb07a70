"""CPU that an overlap query on a call stream costs the Indexer: 750 hashes, 16 workers, 16 queries at once."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.stack import service_environment
from kvrouter.net.calls import CallStreamClient
from kvrouter.runtime.contracts import Indexer
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import remote_on_call_stream
from kvrouter.v1 import indexer_pb2
from kvrouter.v1.common_pb2 import Component, LocalHashes
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.indexer_pb2 import FindMatchesRequest
from samples import Samples
from systems import Servers, running_servers
from usage import cpu_seconds

sys.path.insert(0, str(Path(__file__).parents[1]))

from recovery_workers import CHAIN_BLOCKS, COMPONENT, chain, shared_chain

WORKERS, HASHES, AT_ONCE = 16, 750, 16
_READY_SECONDS = 60.0


async def overlap(samples: Samples, directory: Path, rounds: int, seconds: float, say: Callable[[str], None]) -> None:
    """Measures queries of prompts of which every worker holds the first two thirds."""
    rest = chain(random.Random(0), HASHES - CHAIN_BLOCKS)
    query = FindMatchesRequest(
        component=Component(namespace=COMPONENT.namespace, name=COMPONENT.name),
        local_hashes=LocalHashes(hashes=shared_chain() + rest),
    )
    async with running_servers(directory) as servers:
        pid, address = await _indexer(servers)
        client = CallStreamClient(address, client_name="benchmark")
        running = asyncio.create_task(client.run())
        service = remote_on_call_stream(indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"], client)
        indexer = cast(Indexer, service)
        await _until_whole(indexer, query)
        for round_number in range(rounds):
            values = await _measure(indexer, query, pid, seconds)
            samples.add("overlap", "Indexer", round_number, values)
            say(f"overlap query: {values['cpu_us']:,.0f} µs, p50 {values['p50_us']:,.0f} µs")
        running.cancel()
        await asyncio.wait([running])


async def _indexer(servers: Servers) -> tuple[int, str]:
    """Starts an Indexer and the workers that it knows. Returns its process id and address."""
    environment = service_environment(os.environ)
    address = f"127.0.0.1:{free_port()}"
    where = ("--etcd", servers.etcd.endpoint, "--nats", servers.nats.url)
    script = str(Path(__file__).parents[1] / "recovery_workers.py")
    amounts = ("--first", "1", "--workers", str(WORKERS), "--blocks", str(CHAIN_BLOCKS), "--buffer-events", "1000")
    await servers.start("workers", (sys.executable, script, *where, *amounts), environment)
    options = ("--namespace", COMPONENT.namespace, "--bind", address)
    process = await servers.start("indexer", (sys.executable, "-m", "kvrouter.indexer", *where, *options), environment)
    return process.pid, address


async def _until_whole(indexer: Indexer, query: FindMatchesRequest) -> None:
    """Waits until every worker is found with the whole chain."""
    async with asyncio.timeout(_READY_SECONDS):
        while True:
            try:
                answer = await indexer.find_matches(query, deadline=Deadline.after(2))
                if list(answer.device_blocks) == [CHAIN_BLOCKS] * WORKERS:
                    return
            except KvRouterError:
                pass
            await asyncio.sleep(0.1)


async def _measure(indexer: Indexer, query: FindMatchesRequest, pid: int, seconds: float) -> dict[str, float]:
    spent: list[float] = []
    end = time.perf_counter() + seconds

    async def ask() -> None:
        while (began := time.perf_counter()) < end:
            await indexer.find_matches(query, deadline=Deadline.after(30))
            spent.append(1e6 * (time.perf_counter() - began))

    before = cpu_seconds(pid)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(ask())
    cuts = statistics.quantiles(spent, n=100)
    return {
        "cpu_us": 1e6 * (cpu_seconds(pid) - before) / len(spent),
        "p50_us": cuts[49],
        "p99_us": cuts[98],
        "per_second": len(spent) / seconds,
    }
