"""A simulated worker that also shows its engine's own block table, which has not gone through the SDK's bookkeeping.

It takes the options of ``kvrouter-mocker``. Whoever connects to the Unix socket ``KVROUTER_BLOCK_TABLE`` gets one JSON
object: the cursor, the requests in the engine, and every block as (engine hash, local hash, sequence hash, copies).
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from kvrouter.core import local_hashes
from kvrouter.mocker.adapter import MockEngine, emit_to, publish_to
from kvrouter.mocker.app import make_drivers, worker_config, worker_id_of
from kvrouter.mocker.driver import EngineDriver
from kvrouter.mocker.engine.types import CacheEvent, Stored
from kvrouter.mocker.settings import MockerSettings
from kvrouter.publisher.worker import Worker, running
from kvrouter.runtime.config.settings import load
from kvrouter.runtime.process.lifecycle import run
from kvrouter.runtime.telemetry.metrics import new_registry
from xxhash import xxh3_64

SOCKET = "KVROUTER_BLOCK_TABLE"


class BlockHashes:
    """Local and sequence hashes of an engine's blocks, by the formula, from the engine's own events."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: dict[int, tuple[int, int]] = {}

    def __getitem__(self, engine_hash: int) -> tuple[int, int]:
        return self._known[engine_hash]

    def learn(self, events: Iterable[CacheEvent]) -> None:
        """Notes the hashes of blocks that were stored; a block's parent may be evicted before it, so in time."""
        for event in events:
            if isinstance(event, Stored):
                parent = None if event.parent_hash is None else self._known[event.parent_hash][1]
                block_hashes = memoryview(local_hashes(event.tokens, self._block_size)).cast("Q")
                for engine_hash, local in zip(event.engine_hashes, block_hashes, strict=True):
                    parent = local if parent is None else _chained(parent, local)
                    self._known[engine_hash] = local, parent


def _chained(parent: int, local: int) -> int:
    return xxh3_64(struct.pack("<2Q", parent, local), seed=1337).intdigest()


def block_table(worker: Worker, driver: EngineDriver, hashes: BlockHashes) -> dict[str, object]:
    load, blocks = driver.engine.load(), driver.engine.cached_blocks()
    return {
        "cursor": [worker.incarnation, worker.rank(0).stats().next_event_id],
        "requests": load.running + load.waiting,
        "blocks": [[name, *hashes[name], block.copies] for name, block in blocks.items()],
    }


@asynccontextmanager
async def showing(path: str, table: Callable[[], dict[str, object]]) -> AsyncIterator[None]:
    """Serves the table on a Unix socket while the context lasts."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(table()).encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, path)
    try:
        yield
    finally:
        server.close()
        await server.wait_closed()


def main() -> None:
    settings = load(MockerSettings, prog="worker_process")
    hashes = BlockHashes(settings.block_size)

    async def serve(stopping: asyncio.Event) -> None:
        worker: Worker
        publish = publish_to(lambda: worker.rank(0))

        def observed(events: Iterable[CacheEvent]) -> None:
            events = list(events)
            hashes.learn(events)
            publish(events)

        worker_id = worker_id_of(settings)
        drivers = make_drivers(
            settings, worker_id, new_registry(), lambda _: observed, emit_to(lambda outputs: worker.emit(outputs))
        )
        async with asyncio.TaskGroup() as group:
            # The SDK stops first, and lets requests finish: the engine steps until it has.
            async with running(worker_config(settings, worker_id), MockEngine(drivers)) as worker:
                stepping = group.create_task(drivers[0].run())
                async with showing(os.environ[SOCKET], lambda: block_table(worker, drivers[0], hashes)):
                    await stopping.wait()
            stepping.cancel()

    run(serve, settings, "mocker")


if __name__ == "__main__":
    main()
