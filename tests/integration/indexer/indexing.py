"""One component's index on a real NATS, without the service around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrouter.core import Rank, local_hashes
from kvrouter.indexer.ingest.jetstream import DurableConsumer
from kvrouter.indexer.replica.component import ComponentIndex, Limits
from kvrouter.indexer.snapshots.coordinator import SnapshotHome
from kvrouter.net.nats.client import TolerantClient
from kvrouter.v1.indexer_pb2 import FindMatchesResponse
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor

from .event_batches import BLOCK_SIZE, RankSource

PATIENCE_SECONDS = 30.0


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[TolerantClient]:
    """A connection that comes back by itself."""

    async def ignore(_error: Exception) -> None:
        return None

    # The client of the services: nats-py's own forgets a cancellation that comes together with a response.
    connection = TolerantClient()
    await connection.connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.05, error_cb=ignore)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def indexing(
    connection: TolerantClient,
    component: ComponentName,
    replica_id: str = "replica",
    limits: Limits | None = None,
    home: SnapshotHome | None = None,
    block_size: int = BLOCK_SIZE,
) -> AsyncIterator[ComponentIndex]:
    """A component's index that follows the stream while the context lasts."""
    descriptor = ComponentDescriptor(block_size=block_size)
    consumer = DurableConsumer(connection, component, replica_id)
    index = ComponentIndex(component, descriptor, consumer.connection, consumer, limits or Limits(), home=home)
    running = asyncio.create_task(index.run())
    try:
        yield index
    finally:
        running.cancel()
        await asyncio.wait({running})
        if not running.cancelled():
            running.result()


async def matches(index: ComponentIndex, token_ids: list[int]) -> bytes:
    """The encoded answer to FindMatches."""
    hashes = local_hashes(token_ids, BLOCK_SIZE)
    return await index.state.shared.find_matches(hashes)


async def overlaps(index: ComponentIndex, token_ids: list[int]) -> dict[Rank, int]:
    """Leading device blocks by rank."""
    answer = FindMatchesResponse.FromString(await matches(index, token_ids))
    return dict(zip(zip(answer.worker_ids, answer.dp_ranks, strict=True), answer.device_blocks, strict=True))


async def cursor(index: ComponentIndex, source: RankSource) -> tuple[int, int] | None:
    """(incarnation, next event id) of a rank in the index."""
    return await index.state.shared.read(lambda core: core.cursor((source.worker_id, source.dp_rank)))


async def follows(index: ComponentIndex, source: RankSource) -> None:
    """Waits until the index has all that the source numbered."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await cursor(index, source) != (source.incarnation, source.next_event_id):
            await asyncio.sleep(0.01)
