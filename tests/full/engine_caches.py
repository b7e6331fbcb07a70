"""An engine's own cache, driven at random in a process, with a relay and an index that follow its events."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvrouter.core import local_hashes
from kvrouter.devtools.system.ports import free_ports
from kvrouter.engines.events.vllm_sglang_events import Dialect
from kvrouter.indexer.replica.component import ComponentIndex
from kvrouter.relay.settings import RelaySettings
from kvrouter.v1.common_pb2 import BlockRecord, RankState, Tier
from kvrouter.v1.indexer_pb2 import FindMatchesResponse
from kvrouter.v1.names import ComponentName

from ..integration.indexer.indexing import connected, indexing
from ..integration.indexer.resync.truth import registration_of
from ..integration.relay.engine import Relay, relaying
from ..waiting import until

BLOCK = 16
"""Tokens per block of the caches."""
OPERATIONS = 20
"""Operations between two comparisons."""
WORKER = 5


class EngineCache:
    """A process in which an engine's own cache works and publishes its events."""

    def __init__(self, process: asyncio.subprocess.Process, events: str, replay: str) -> None:
        self.events = events
        self.replay = replay
        self.prompts: list[list[int]] = []
        self.cached: list[int] = []
        """Tokens of each of ``prompts`` that a request would find in the cache now."""
        self._process = process

    async def operate(self, operations: int) -> tuple[int, Counter[int]]:
        """Returns how many batches were published so far, and the copies of each block."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(b"%d\n" % operations)
        line = await self._process.stdout.readline()
        assert line, "the process ended: see cache.log"
        answer = json.loads(line)
        self.prompts, self.cached = answer.get("prompts", []), answer.get("cached", [])
        return answer["published"], Counter(answer["blocks"])


@asynccontextmanager
async def _working(python: str, script: Path, directory: Path, *arguments: str) -> AsyncIterator[EngineCache]:
    ports = free_ports(2)
    bound = [f"tcp://*:{port}" for port in ports]  # vLLM connects to what has no asterisk.
    events, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    with (directory / "cache.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *("nice", "-n", "10", python, str(script), *bound, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            limit=1 << 20,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"},
        )
    try:
        yield EngineCache(process, events, replay)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def copies(blocks: Iterable[BlockRecord], tier: Tier) -> Counter[int]:
    """Returns the copies of each block in a tier."""
    return Counter({block.engine_hash: each.copies for block in blocks for each in block.copies if each.tier == tier})


@dataclass(frozen=True)
class Followed:
    """An engine's cache, and a relay and an index that follow it."""

    cache: EngineCache
    relay: Relay
    index: ComponentIndex
    tier: Tier
    """Where the cache has the blocks that it names."""

    async def after(self, operations: int) -> Counter[int]:
        """Returns the copies in the cache after operations whose events the relay has applied."""
        published, held = await self.cache.operate(operations)
        await until(lambda: self.relay.count("messages_total") == published)
        return held

    def known(self) -> Counter[int]:
        """Returns the copies of each block that the relay's rank has."""
        chunks = self.relay.worker.rank(0).state_chunks()
        return copies((block for chunk in chunks for block in chunk.blocks), self.tier)

    async def indexed(self) -> Counter[int]:
        """Returns the copies of each block in the index."""
        chunks = [RankState.FromString(each) async for each in self.index.state.shared.dump_rank((WORKER, 0), 4096)]
        return copies((block for chunk in chunks for block in chunk.blocks), self.tier)

    async def predicted(self) -> list[int]:
        """Returns the tokens of each prompt of the cache that the index has."""
        reusable = [local_hashes(each[: (len(each) - 1) // BLOCK * BLOCK], BLOCK) for each in self.cache.prompts]
        answers = [await self.index.state.shared.find_matches(hashes) for hashes in reusable]
        return [BLOCK * FindMatchesResponse.FromString(each).device_blocks[0] for each in answers]


@asynccontextmanager
async def followed(
    python: str,
    script: Path,
    directory: Path,
    *arguments: str,
    engine: Dialect,
    tier: Tier = Tier.TIER_DEVICE,
    **where: str,
) -> AsyncIterator[Followed]:
    """Runs a script that drives the cache of an engine, with a relay and an index."""
    async with _working(python, script, directory, *arguments) as cache:
        await cache.operate(OPERATIONS)  # before anybody listens
        settings = RelaySettings(
            **where,
            engine=engine,
            kv_events=cache.events,
            kv_replay=cache.replay,
            model="m",
            block_size=BLOCK,
            worker_id=WORKER,
        )
        component = ComponentName(where["namespace"], "workers")
        async with (
            relaying(settings) as relay,
            connected(where["nats"]) as connection,
            indexing(connection, component, block_size=BLOCK) as index,
        ):
            index.update_workers({WORKER: registration_of(relay.worker)})
            await relay.is_connected()
            yield Followed(cache, relay, index, tier)
            assert index.state.events.tally.repairs == 0


async def compare(each: Followed, rounds: int) -> tuple[int, int]:
    """Compares relay and index with the cache while it works. Returns evictions, and rounds with a block twice."""
    evicted, repeated = 0, 0
    held: Counter[int] = Counter()
    for _ in range(rounds):
        before, held = held, await each.after(OPERATIONS)
        assert each.known() == held
        async with asyncio.timeout(30):
            while await each.indexed() != held or await each.predicted() != each.cache.cached:
                await asyncio.sleep(0.01)
        evicted += (before - held).total()
        repeated += max(held.values(), default=0) > 1
    assert each.relay.worker.rank(0).stats().unknown_removals == 0
    return evicted, repeated
