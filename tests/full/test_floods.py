"""A worker that floods its own subjects with lies: the effect is bounded and visible, and ends with the flood."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from kvrouter.v1.common_pb2 import Transport
from kvrouter.v1.events_pb2 import BlocksStored, KvEvent, KvEventBatch

from ..faults.conftest import nats_server, rig, seed
from ..faults.rig import BLOCK_SIZE, COMPONENT, IndexerProcess, Rig

__all__ = ["nats_server", "rig", "seed"]

MOST_BLOCKS = 4_000
EVENTS_OF_A_BATCH, BLOCKS_OF_AN_EVENT = 20, 16
ROUNDS = 12
MESSAGES_OF_A_ROUND = 200


def lies(rig: Rig, number: int, rng: random.Random) -> bytes:
    """A batch that follows the worker's cursor or the batch before, with blocks that it lacks and a wrong digest."""
    incarnation, next_event_id = rig.nodes[1].cursor
    next_event_id += number * EVENTS_OF_A_BATCH
    events = []
    for event_id in range(next_event_id, next_event_id + EVENTS_OF_A_BATCH):
        hashes = [rng.getrandbits(64) for _ in range(2 * BLOCKS_OF_AN_EVENT)]
        stored = BlocksStored(engine_hashes=hashes[::2], local_hashes=hashes[1::2])
        events.append(KvEvent(event_id=event_id, stored=stored))
    return KvEventBatch(
        worker_id=1,
        incarnation=incarnation,
        block_size=BLOCK_SIZE,
        events=events,
        next_event_id=next_event_id + EVENTS_OF_A_BATCH,
        digest=rng.getrandbits(64),
    ).SerializeToString()


async def shows_trouble(process: IndexerProcess) -> bool:
    events = (await process.stats()).events
    return events.unconfirmed + events.repairs + events.evictions > 0 and "rank.resynced" in process.log()


async def knows_only(process: IndexerProcess, worker_id: int) -> bool:
    return {rank.rank.worker_id for rank in (await process.stats()).ranks} == {worker_id}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", [Transport.TRANSPORT_DURABLE, Transport.TRANSPORT_CORE_NATS])
async def test_a_flood_of_lies_costs_other_workers_nothing_and_heals(rig: Rig, transport: Transport) -> None:
    await rig.start_nodes(1, 2, transport=transport)
    one = await rig.indexer("one", max_index_blocks=MOST_BLOCKS, worker_grace_seconds=60)
    await rig.serve(10)
    await rig.agree(one)
    honest = await one.held(2)
    client = await rig.client()
    durable = transport == Transport.TRANSPORT_DURABLE
    subject = COMPONENT.events_subject(1, 0) if durable else COMPONENT.live_subject(1, 0)
    rng = random.Random(rig.rng.randrange(1 << 32))
    for _ in range(ROUNDS):
        for number in range(MESSAGES_OF_A_ROUND):
            await client.publish(subject, lies(rig, number, rng))
        await client.flush()
        rig.nodes[1].serve()
        stats = await one.stats()  # it answers during the flood
        assert stats.blocks <= MOST_BLOCKS + EVENTS_OF_A_BATCH * BLOCKS_OF_AN_EVENT
        assert honest <= await one.held(2)
        await asyncio.sleep(0)
    await rig.until(lambda: shows_trouble(one))
    await rig.agree(one)
    # Another replica that reads the flood from the stream comes to the same state.
    await rig.agree(await rig.indexer("two", max_index_blocks=MOST_BLOCKS, worker_grace_seconds=60))


@pytest.mark.timeout(300)
async def test_a_flood_for_workers_that_do_not_exist_leaves_nothing(rig: Rig) -> None:
    await rig.start_nodes(1)
    one = await rig.indexer("one", worker_grace_seconds=1)
    await rig.serve(10)
    await rig.agree(one)
    client = await rig.client()
    batch = KvEventBatch(incarnation=1, block_size=BLOCK_SIZE, next_event_id=1)
    batch.events.add(event_id=0, stored=BlocksStored(engine_hashes=[1], local_hashes=[2]))
    for worker_id, dp_rank in itertools.product(range(100, 1100), range(3)):
        batch.worker_id, batch.dp_rank = worker_id, dp_rank
        await client.publish(COMPONENT.events_subject(worker_id, dp_rank), batch.SerializeToString())
    await client.flush()
    await rig.serve(3)
    await rig.agree(one)
    await rig.until(lambda: knows_only(one, 1))
    assert "rank.removed" in one.log()
