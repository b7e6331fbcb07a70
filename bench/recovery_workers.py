"""Many workers in one process, for ``recovery.py``: the SDK's parts, without an engine.

The workers share connections to NATS and etcd and a lease, so that a thousand of them keep pace. Each holds chains of
blocks and reports them in events of 64 blocks, as prefill does. The first chain is the same on all workers and is the
one that queries ask for. Prints ``filled`` once everything is published; runs until it is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import struct
import time

import structlog
from kvrouter.mocker.adapter import MockEngine
from kvrouter.net.etcd import LeasedKeys, connect
from kvrouter.publisher.config import WorkerConfig
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.publisher.publishing.transport import NatsLink
from kvrouter.publisher.registration import join_component
from kvrouter.publisher.worker_server import WorkerServer
from kvrouter.v1.common_pb2 import Transport
from kvrouter.v1.names import ComponentName

COMPONENT = ComponentName("recovery", "pool")
BLOCK_SIZE = 16
CHAIN_BLOCKS = 512
EVENT_BLOCKS = 64
_SHARED_SEED = 7
_LEASE_SECONDS = 20
_HEARTBEAT_SECONDS = 5.0


def shared_chain() -> list[int]:
    """Returns the local hashes of the chain that every worker holds."""
    return chain(random.Random(_SHARED_SEED), CHAIN_BLOCKS)


def chain(rng: random.Random, blocks: int) -> list[int]:
    return list(struct.unpack(f"<{blocks}Q", rng.randbytes(8 * blocks)))


async def fill(rank: RankPublisher, worker_id: int, blocks: int) -> None:
    """Reports blocks, and lets reported ones be published meanwhile."""
    rng = random.Random(worker_id)
    hashes = shared_chain()
    for start in range(0, blocks, CHAIN_BLOCKS):
        names = chain(rng, CHAIN_BLOCKS)
        parent = None
        for at in range(0, min(CHAIN_BLOCKS, blocks - start), EVENT_BLOCKS):
            part = slice(at, min(at + EVENT_BLOCKS, blocks - start))
            packed = struct.pack(f"<{len(hashes[part])}Q", *hashes[part])
            rank.stored_hashes(local_hashes=packed, engine_hashes=names[part], parent=parent)
            parent = names[part][-1]
            await asyncio.sleep(0)
        hashes = chain(rng, CHAIN_BLOCKS)


async def start(
    arguments: argparse.Namespace, worker_id: int, incarnation: int, keys: LeasedKeys
) -> tuple[RankPublisher, WorkerServer]:
    """Starts a worker that serves its state, ready to be registered."""
    config = WorkerConfig(component=COMPONENT, model="m", block_size=BLOCK_SIZE, worker_id=worker_id)
    rank = RankPublisher(
        subject=COMPONENT.events_subject(worker_id, 0),
        worker_id=worker_id,
        dp_rank=0,
        incarnation=incarnation,
        block_size=BLOCK_SIZE,
        copy_counting=config.copy_counting,
        buffer_events=arguments.buffer_events,
        buffer_bytes=config.buffer_bytes,
    )
    server = WorkerServer(MockEngine({}), {0: rank}, list)
    registration = config.registration(
        endpoint=config.endpoint(await server.start(config.bind)),
        incarnation=incarnation,
        transport=Transport.TRANSPORT_DURABLE,
        registered_unix_ns=incarnation,
    )
    keys.put(COMPONENT.worker_key(worker_id), registration.SerializeToString())
    return rank, server


async def serve(arguments: argparse.Namespace) -> None:
    keys = LeasedKeys(arguments.etcd, ttl_seconds=_LEASE_SECONDS)
    link = NatsLink(arguments.nats, "recovery-workers")
    config = WorkerConfig(component=COMPONENT, model="m", block_size=BLOCK_SIZE)
    async with connect(arguments.etcd) as client:
        await join_component(client, COMPONENT, config.descriptor())
    incarnation = time.time_ns()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(link.run())
        transport = link.transport(Transport.TRANSPORT_DURABLE, COMPONENT)
        workers = []
        for worker_id in range(arguments.first, arguments.first + arguments.workers):
            rank, server = await start(arguments, worker_id, incarnation, keys)
            workers.append((rank, server))
            tasks.create_task(rank.run(transport, heartbeat_seconds=_HEARTBEAT_SECONDS))
            await fill(rank, worker_id, arguments.blocks)
        tasks.create_task(keys.run())
        await keys.wait_registered()
        for rank, _ in workers:
            await rank.flush()
        print("filled", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("etcd", "nats"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("first", "workers", "blocks", "buffer-events"):
        parser.add_argument(f"--{name}", type=int, required=True)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    asyncio.run(serve(parser.parse_args()))
