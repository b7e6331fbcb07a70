"""A system to break: NATS, etcd and Indexers as processes, and workers around the engine model.

The workers are in the test's process, so that a scenario ends by comparing the index with the engines' own block
tables: engine hash, tokens and copies, none of which has gone through the SDK's bookkeeping.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from kvrouter.core import local_hashes
from kvrouter.devtools.system.servers import EtcdServer, NatsServer
from kvrouter.mocker.adapter import MockEngine, publish_to
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.engine.implementation import make_engines
from kvrouter.mocker.engine.types import CachedBlock, CacheEvent, EngineRequest, pack_tokens
from kvrouter.net.etcd import connect, watch_prefix
from kvrouter.net.nats.client import TolerantClient
from kvrouter.net.nats.connection import connect_nats
from kvrouter.publisher.worker import Worker, WorkerConfig, running
from kvrouter.runtime.contracts import Indexer
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import indexer_pb2
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.indexer_pb2 import ComponentStats, DumpRequest, GetStatsRequest
from kvrouter.v1.names import ComponentName, service_key
from kvrouter.v1.registry_pb2 import ServiceRegistration
from xxhash import xxh3_64

TREE = Path(__file__).parents[2]
BLOCK_SIZE = 8
PATIENCE_SECONDS = 60.0
FULL = os.environ.get("KVROUTER_FAULTS") == "full"
"""Whether scenarios run in their long form."""
COMPONENT = ComponentName("faults", "pool")
NAMED = Component(namespace=COMPONENT.namespace, name=COMPONENT.name)
TAKEN = '"event": "snapshot.taken"'
"""What a log has where a snapshot was taken."""
OBSERVED = (
    *("snapshot.restored", "snapshot.taken", "snapshot.unusable", "snapshot.skipped", "snapshot.states_reset"),
    *("rank.alarm_unconfirmed", "rank.incarnations_refuted"),
    *("resync.events_fetched", "rank.resynced", "rank.dropped", "rank.incarnation_started", "rank.removed"),
)
"""Events of a log that a report counts."""
Held = set[tuple[int, int, int, int]]
"""(engine hash, local hash, sequence hash, copies) of every block."""


class EngineNode(ABC):
    """An engine model that runs requests, and tells somebody what happens to its cache."""

    def __init__(self, seed: int, publish: Callable[[Sequence[CacheEvent]], None]) -> None:
        config = EngineConfig(num_blocks=48, block_size=BLOCK_SIZE, max_batched_tokens=512, hash_seed=seed)
        [self.engine] = make_engines([config])
        self._rng = random.Random(seed)
        self._publish = publish
        self._now = 0.0
        self._number = 0
        self._places: dict[int, int] = {}

    @property
    @abstractmethod
    def cursor(self) -> tuple[int, int]:
        """(incarnation, next event id)"""

    def serve(self, requests: int = 1) -> None:
        """Runs requests that share prefixes; blocks are stored, and evicted since the cache is small."""
        for _ in range(requests):
            shared = random.Random(self._rng.randrange(6))
            tokens = [shared.randrange(1 << 20) for _ in range(self._rng.randrange(4, 100))]
            tokens += [self._rng.randrange(1 << 20) for _ in range(self._rng.randrange(1, 60))]
            self._run(pack_tokens(tokens), 4)

    def keep_half(self, former: EngineNode) -> None:
        """Fills the cache with prompts that a former engine had cached, until it holds about half as many blocks."""
        table = former.engine.cached_blocks()
        leaves = sorted(table.keys() - {block.parent_hash for block in table.values()})
        self._rng.shuffle(leaves)
        for leaf in leaves:
            prompt = _prompt_of(leaf, table)
            if prompt and len(self.engine.cached_blocks()) + len(prompt) // (4 * BLOCK_SIZE) <= len(table) // 2:
                self._run(prompt, 1)

    def longest_prompt(self) -> bytes:
        """Packed tokens of the longest prompt that is cached."""
        table = self.engine.cached_blocks()
        return max((_prompt_of(name, table) for name in table), key=len)

    def _run(self, prompt: bytes, max_tokens: int) -> None:
        self._number += 1
        self.engine.submit(EngineRequest(f"r{self._number}", prompt, max_tokens), self._now)
        while (step := self.engine.begin_step(self._now)) is not None:
            self._learn_places()
            self._publish(step.events)
            self._now = step.ends_at
            self.engine.end_step(self._now)

    def holds(self) -> Held:
        """The engine's own block table."""
        table = self.engine.cached_blocks()
        return {(name, _local(block), self._places[name], block.copies) for name, block in table.items()}

    def _learn_places(self) -> None:
        """Sequence hashes by the formula; a block's parent may be evicted before it, so they are noted in time."""
        table = self.engine.cached_blocks()
        for name in table:
            chain = [name]
            while (parent := table[chain[-1]].parent_hash) is not None and parent not in self._places:
                chain.append(parent)
            for each in reversed(chain):
                parent, local = table[each].parent_hash, _local(table[each])
                link = b"" if parent is None else struct.pack("<2Q", self._places[parent], local)
                self._places[each] = xxh3_64(link, seed=1337).intdigest() if link else local


def _prompt_of(leaf: int, table: Mapping[int, CachedBlock]) -> bytes:
    """Packed tokens from the start of a sequence to a block; none where a block before it is not cached."""
    tokens: list[bytes] = []
    name: int | None = leaf
    while name is not None:
        if name not in table:
            return b""
        tokens.append(table[name].tokens)
        name = table[name].parent_hash
    return b"".join(reversed(tokens))


def _local(block: CachedBlock) -> int:
    return int.from_bytes(local_hashes(memoryview(block.tokens).cast("I"), BLOCK_SIZE), "little")


class Node(EngineNode):
    """A worker and the engine model behind it, in one process."""

    def __init__(self, worker: Worker, seed: int) -> None:
        super().__init__(seed, publish_to(lambda: worker.rank(0)))
        self.worker = worker

    @property
    def cursor(self) -> tuple[int, int]:
        return self.worker.incarnation, self.worker.rank(0).stats().next_event_id


class IndexerProcess:
    """An Indexer as a process."""

    def __init__(
        self, rig: Rig, name: str, options: Mapping[str, object], failpoint: str, clock: Path | None = None
    ) -> None:
        self.name = name
        self._rig = rig
        self._failpoint = failpoint
        self._clock = clock
        self._options = options
        self._log = rig.directory / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> IndexerProcess:
        flags = {
            "namespace": COMPONENT.namespace,
            "etcd": self._rig.etcd.endpoint,
            "nats": self._rig.nats.url,
            "instance-id": self.name,
            "lease-seconds": 2,
            "snapshot-lock-seconds": 2,
            "snapshot-check-seconds": 0.1,
            "worker-grace-seconds": 1,
            "compare-seconds": 5,
            **self._options,
        }
        launcher = ["-m"]
        if self._clock:
            launcher += ["tests.faults.shifted_clock", str(self._clock)]
        elif self._failpoint:
            launcher += ["tests.faults.failpoints", self._failpoint]
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, *launcher, "kvrouter.indexer"),
                *(
                    text
                    for key, value in flags.items()
                    for text in ([f"--{key}"] if value is True else [f"--{key}", str(value)])
                ),
                stderr=log,
                cwd=TREE,
            )
        return self

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def stopped(self) -> bool:
        """Whether SIGSTOP has taken effect."""
        return self._process is not None and process_state(self._process.pid) == "T"

    def signal(self, which: signal.Signals) -> None:
        if self._process is not None and self.running:
            self._process.send_signal(which)

    async def kill(self) -> None:
        if self._process is not None:
            if self.running:
                self._process.kill()
            await self._process.wait()

    async def ended(self) -> None:
        """Waits until the process has ended by itself."""
        assert self._process is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self._process.wait()

    def observed(self) -> str:
        """What its log tells of faults and their healing, over all its lives."""
        lines = self.log().splitlines()
        counts = {event: sum(f'"event": "{event}"' in line for line in lines) for event in OBSERVED}
        return ", ".join(f"{event} {count}" for event, count in counts.items() if count)

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    @asynccontextmanager
    async def called(self) -> AsyncIterator[Indexer]:
        """A stub, once the process is registered."""
        async with open_channel(await self._rig.endpoint_of(self)) as channel:
            descriptor = indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"]
            yield cast(Indexer, remote(descriptor, channel))

    async def stats(self) -> ComponentStats:
        async with self.called() as service:
            answer = await service.get_stats(GetStatsRequest(component=NAMED), deadline=Deadline.after(5))
            return answer.components[0]

    async def held(self, worker_id: int) -> Held:
        """A worker's blocks in this Indexer."""
        found: Held = set()
        async with (
            self.called() as service,
            aclosing(service.dump(DumpRequest(component=NAMED), deadline=Deadline.after(20))) as parts,
        ):
            async for part in parts:
                if part.state.rank.worker_id == worker_id:
                    found |= {
                        (block.engine_hash, block.local_hash, block.sequence_hash, block.copies[0].copies)
                        for block in part.state.blocks
                    }
        return found


def process_state(pid: int) -> str:
    """Returns the letter of ``/proc/PID/stat``: T is stopped, Z or X has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"  # Its exit status was just read.


def worker_config(worker_id: int, **settings: Any) -> WorkerConfig:
    """A worker of the component that tells things soon, and whose lease outlasts a stall of the test."""
    known: dict[str, Any] = {
        "component": COMPONENT,
        "model": "m",
        "block_size": BLOCK_SIZE,
        "worker_id": worker_id,
        "lease_ttl_seconds": 10,
        "heartbeat_seconds": 0.3,
        "load_report_seconds": 0,
        "drain_seconds": 0.1,
        "flush_seconds": 0.3,
    }
    return WorkerConfig(**(known | settings))


@dataclass
class Rig:
    """The servers, and what was started on them."""

    directory: Path
    nats: NatsServer
    etcd: EtcdServer
    rng: random.Random
    exits: AsyncExitStack
    nodes: dict[int, EngineNode] = field(default_factory=dict)
    indexers: list[IndexerProcess] = field(default_factory=list)
    judged: dict[str, IndexerProcess] = field(default_factory=dict)
    """Indexers that were compared with the engines."""

    async def indexer(
        self, name: str, failpoint: str = "", clock: Path | None = None, **options: object
    ) -> IndexerProcess:
        """Starts an Indexer; options by their flags' names, with underscores.

        ``failpoint`` names the step of a snapshot at which it dies; ``clock`` shifts its clock.
        """
        named = {key.replace("_", "-"): value for key, value in options.items()}
        process = IndexerProcess(self, name, named, failpoint, clock)
        self.indexers.append(process)
        return await process.start()

    @asynccontextmanager
    async def node(self, worker_id: int, **settings: Any) -> AsyncIterator[Node]:
        """A worker that is registered while the context lasts."""
        config = worker_config(worker_id, **({"etcd": self.etcd.endpoint, "nats": self.nats.url} | settings))
        async with running(config, MockEngine({})) as worker:
            await worker.registered()
            node = self.nodes[worker_id] = Node(worker, self.rng.randrange(1 << 32))
            try:
                yield node
            finally:
                if self.nodes.get(worker_id) is node:
                    del self.nodes[worker_id]

    async def start_nodes(self, *worker_ids: int, **settings: Any) -> list[Node]:
        """Workers that stay until the end of the test."""
        return [await self.exits.enter_async_context(self.node(one, **settings)) for one in worker_ids]

    async def serve(self, rounds: int, pause: float = 0.0) -> None:
        """Every engine runs requests, and its events are on their way."""
        for _ in range(rounds):
            for node in self.nodes.values():
                node.serve()
            await asyncio.sleep(pause)

    async def client(self) -> TolerantClient:
        """A connection to NATS of the test's own."""
        return await self.exits.enter_async_context(connect_nats(self.nats.url, "test"))

    async def endpoint_of(self, process: IndexerProcess) -> str:
        key = service_key(COMPONENT.namespace, "indexer", process.name)
        async with asyncio.timeout(PATIENCE_SECONDS), aclosing(watch_prefix(self.etcd.endpoint, key)) as changes:
            async for change in changes:
                value = getattr(change, "value", None) or getattr(change, "entries", {}).get(key)
                if value:
                    return ServiceRegistration.FromString(value).endpoint
        raise AssertionError("unreachable: the watch does not end")

    async def has_key(self, key: str) -> bool:
        async with connect(self.etcd.endpoint) as client:
            return await client.get(key.encode()) is not None

    async def agree(self, *processes: IndexerProcess) -> None:
        """Waits until Indexers are where the workers are, then compares them with the engines block by block."""
        for process in processes or self.indexers:
            self.judged[process.name] = process
            await self.until(lambda process=process: self._agrees(process))  # type: ignore[misc]

    async def _agrees(self, process: IndexerProcess) -> bool:
        if not await self.is_there(process):
            return False
        held = {worker_id: await process.held(worker_id) for worker_id in self.nodes}
        if not await self.is_there(process):
            return False  # It has dropped a rank meanwhile.
        for worker_id, node in self.nodes.items():
            assert held[worker_id] == node.holds(), f"{process.name}, worker {worker_id}"
        return True

    async def is_there(self, process: IndexerProcess) -> bool:
        """Whether an Indexer is where the workers are."""
        stats = await process.stats()
        found = {
            rank.rank.worker_id: (rank.cursor.incarnation, rank.cursor.next_event_id)
            for rank in stats.ranks
            if not rank.partial
        }
        return stats.ready and found == {worker_id: node.cursor for worker_id, node in self.nodes.items()}

    async def until(self, condition: Callable[[], Any]) -> None:
        """Waits for a condition; a service that is away means not yet."""
        last: object = None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    try:
                        last = condition()
                        if asyncio.iscoroutine(last):
                            last = await last
                        if last:
                            return
                    except KvRouterError as error:
                        last = error
                    await asyncio.sleep(0.05)
        except TimeoutError:
            logs = "\n".join(f"--- {one.name}\n{one.log()[-3000:]}" for one in self.indexers)
            raise AssertionError(f"it did not come about (last: {last!r})\n{logs}") from None
