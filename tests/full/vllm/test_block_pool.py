"""The index holds what vLLM's own block pool holds, copy by copy, while requests come and go at random."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvrouter.devtools.system.ports import free_ports
from kvrouter.indexer.replica.component import ComponentIndex
from kvrouter.relay.settings import RelaySettings
from kvrouter.v1.common_pb2 import BlockRecord, RankState
from kvrouter.v1.names import ComponentName

from ...integration.indexer.indexing import connected, indexing
from ...integration.indexer.resync.truth import registration_of
from ...integration.relay.engine import Relay, relaying, until

BLOCK = 16
ROUNDS = 100
OPERATIONS = 20
WORKER = 5


class Pool:
    """The process with vLLM's pool."""

    def __init__(self, process: asyncio.subprocess.Process, events: str, replay: str) -> None:
        self.events = events
        self.replay = replay
        self._process = process

    async def operate(self, operations: int) -> tuple[int, Counter[int]]:
        """Returns how many batches were published so far, and the copies of each block."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(b"%d\n" % operations)
        line = await self._process.stdout.readline()
        assert line, "the process ended: see pool.log"
        answer = json.loads(line)
        return answer["published"], Counter(answer["blocks"])


@asynccontextmanager
async def block_pool(python: str, directory: Path, seed: int, sessions: float) -> AsyncIterator[Pool]:
    ports = free_ports(2)
    bound = [f"tcp://*:{port}" for port in ports]  # vLLM connects to what has no asterisk.
    events, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    script = str(Path(__file__).with_name("block_pool.py"))
    with (directory / "pool.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *("nice", "-n", "10", python, script, *bound, str(seed), str(sessions)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            limit=1 << 20,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"},
        )
    try:
        yield Pool(process, events, replay)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def copies(blocks: Iterable[BlockRecord]) -> Counter[int]:
    return Counter({block.engine_hash: block.copies[0].copies for block in blocks})


@dataclass(frozen=True)
class Followed:
    """A pool, and a relay and an index that follow it."""

    pool: Pool
    relay: Relay
    index: ComponentIndex

    async def after(self, operations: int) -> Counter[int]:
        """Returns the copies in the pool after operations whose events the relay has applied."""
        published, held = await self.pool.operate(operations)
        await until(lambda: self.relay.count("messages_total") == published)
        return held

    def known(self) -> Counter[int]:
        """Returns the copies of each block that the relay's rank has."""
        return copies(block for chunk in self.relay.worker.rank(0).state_chunks() for block in chunk.blocks)

    async def indexed(self) -> Counter[int]:
        """Returns the copies of each block in the index."""
        chunks = [RankState.FromString(each) async for each in self.index.state.shared.dump_rank((WORKER, 0), 4096)]
        return copies(block for chunk in chunks for block in chunk.blocks)


@asynccontextmanager
async def followed(python: str, directory: Path, seed: int, sessions: float, **where: str) -> AsyncIterator[Followed]:
    async with block_pool(python, directory, seed, sessions) as pool:
        await pool.operate(OPERATIONS)  # before anybody listens
        settings = RelaySettings(
            **where, kv_events=pool.events, kv_replay=pool.replay, model="m", block_size=BLOCK, worker_id=WORKER
        )
        component = ComponentName(where["namespace"], "workers")
        async with (
            relaying(settings) as relay,
            connected(where["nats"]) as connection,
            indexing(connection, component, block_size=BLOCK) as index,
        ):
            index.update_workers({WORKER: registration_of(relay.worker)})
            await relay.is_connected()
            yield Followed(pool, relay, index)
            assert index.state.events.tally.repairs == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
async def test_the_index_equals_the_block_pool(
    vllm_python: str, tmp_path: Path, seed: int, namespace: str, etcd_endpoint: str, nats_url: str
) -> None:
    evicted, repeated = 0, 0
    held: Counter[int] = Counter()
    where = {"namespace": namespace, "etcd": etcd_endpoint, "nats": nats_url}
    async with followed(vllm_python, tmp_path, seed, 0, **where) as each:
        for _ in range(ROUNDS):
            before, held = held, await each.after(OPERATIONS)
            assert each.known() == held
            async with asyncio.timeout(30):
                while await each.indexed() != held:
                    await asyncio.sleep(0.01)
            evicted += (before - held).total()
            repeated += max(held.values(), default=0) > 1
        assert each.relay.worker.rank(0).stats().unknown_removals == 0
    assert evicted > ROUNDS
    assert repeated > ROUNDS / 4


@pytest.mark.timeout(300)
async def test_sessions_that_report_their_hits_make_no_block_appear(
    vllm_python: str, tmp_path: Path, namespace: str, etcd_endpoint: str, nats_url: str
) -> None:
    missing, resident = 0, 0
    where = {"namespace": namespace, "etcd": etcd_endpoint, "nats": nats_url}
    async with followed(vllm_python, tmp_path, 3, 0.5, **where) as each:
        for _ in range(ROUNDS):
            held = await each.after(OPERATIONS)
            known = each.known()
            assert not known - held
            missing += len(held.keys() - known.keys())
            resident += len(held)
    assert missing < 0.01 * resident
