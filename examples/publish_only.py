"""Publishes the cache of an engine whose requests travel elsewhere.

python examples/publish_only.py kvrouter/published 127.0.0.1:2379 nats://127.0.0.1:4222
"""

from __future__ import annotations

import asyncio
import sys

from kvrouter.publisher.worker import WorkerConfig, running
from kvrouter.v1.names import ComponentName


async def main(component: str, etcd: str, nats: str) -> None:
    """Registers, publishes two blocks and the removal of one, and stays until it is cancelled."""
    config = WorkerConfig(component=ComponentName.parse(component), model="m", block_size=16, etcd=etcd, nats=nats)
    async with running(config) as worker:
        rank = worker.rank(0)
        rank.stored(token_ids=range(32), engine_hashes=[11, 12])
        rank.removed([12])
        await worker.flush()
        print(f"worker {config.worker_id} publishes {rank.stats().blocks} block", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
