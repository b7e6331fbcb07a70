"""A worker with a block table of its own, which the index is compared with block by block."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvrouter.indexer.replica.component import ComponentIndex
from kvrouter.mocker.adapter import MockEngine
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.publisher.worker import Worker, WorkerConfig, running
from kvrouter.v1.common_pb2 import RankState
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import RankRegistration, WorkerRegistration

from ..event_batches import BLOCK_SIZE

PATIENCE_SECONDS = 40.0


@dataclass
class Cache:
    """An engine's cache: which blocks it holds, kept apart from what the SDK remembers."""

    rank: RankPublisher
    rng: random.Random
    table: dict[int, int | None] = field(default_factory=dict)
    """Parent by engine hash."""
    number: int = 0

    def store(self, blocks: int = 4, parent: int | None = None) -> None:
        first = self.number + 1
        self.number += blocks
        names = list(range(first, first + blocks))
        tokens = [self.rng.randrange(1 << 31) for _ in range(blocks * BLOCK_SIZE)]
        self.rank.stored(token_ids=tokens, engine_hashes=names, parent=parent)
        for name in names:
            self.table[name] = parent
            parent = name

    def evict(self, blocks: int = 1) -> None:
        gone = self.rng.sample(sorted(self.table), min(blocks, len(self.table)))
        for name in gone:
            del self.table[name]
        self.rank.removed(gone)

    def live(self, steps: int = 1) -> None:
        """Stores and evicts as an engine does."""
        for _ in range(steps):
            if len(self.table) > 64:
                self.evict(self.rng.randint(1, 8))
            elif self.table and self.rng.random() < 0.6:
                self.store(self.rng.randint(1, 6), self.rng.choice(sorted(self.table)))
            else:
                self.store(self.rng.randint(1, 6))


def worker_config(component: ComponentName, etcd: str, nats_url: str, worker_id: int, **settings: Any) -> WorkerConfig:
    known: dict[str, Any] = {
        "component": component,
        "model": "m",
        "block_size": BLOCK_SIZE,
        "worker_id": worker_id,
        "ranks": {0: 100},
        "etcd": etcd,
        "nats": nats_url,
        "drain_seconds": 0.2,
        "flush_seconds": 0.2,
        "lease_ttl_seconds": 2,
        "heartbeat_seconds": 0.3,
        "load_report_seconds": 0,
    }
    return WorkerConfig(**(known | settings))


@asynccontextmanager
async def caching(config: WorkerConfig, seed: int = 1) -> AsyncIterator[tuple[Worker, Cache]]:
    """A worker that runs, and its cache."""
    async with running(config, MockEngine({})) as worker:
        await worker.registered()
        yield worker, Cache(worker.rank(0), random.Random(seed))


def registration_of(worker: Worker) -> WorkerRegistration:
    """As etcd has it."""
    return WorkerRegistration(
        worker_id=worker.config.worker_id,
        endpoint=worker.endpoint,
        publishes_events=True,
        transport=worker.transport,
        ranks=[RankRegistration(dp_rank=0, incarnation=worker.incarnation, events_lost=worker.rank(0).is_partial)],
    )


async def resident_blocks(index: ComponentIndex, worker_id: int) -> set[int]:
    """Engine hashes of a worker's blocks in the index."""
    chunks = [RankState.FromString(chunk) async for chunk in index.state.shared.dump_rank((worker_id, 0), 4096)]
    return {block.engine_hash for chunk in chunks for block in chunk.blocks}


async def agrees(index: ComponentIndex, worker: Worker, cache: Cache) -> None:
    """Waits until the index is where the worker is, then compares block by block."""
    expected = (worker.incarnation, cache.rank.stats().next_event_id)
    rank = (worker.config.worker_id, 0)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            at = await index.state.shared.read(lambda core: core.cursor(rank))
            partial = any(info.partial for info in await index.state.shared.ranks() if info[:2] == rank)
            if at == expected and not partial:
                break
            await asyncio.sleep(0.02)
    assert await resident_blocks(index, worker.config.worker_id) == set(cache.table)
