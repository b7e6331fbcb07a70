"""Routing without a Frontend: Scheduler and Indexer run in this program. It needs `kvrouter-client[router]`.

Usage: in_process.py NATS ETCD MODEL, such as in_process.py nats://127.0.0.1:4222 127.0.0.1:2379 mock-model
"""

from __future__ import annotations

import asyncio
import logging
import sys

import structlog
from kvrouter.client import Router

PROMPT = range(1, 257)


async def main(nats: str, etcd: str, model: str) -> None:
    async with Router(nats=nats, etcd=etcd, model=model, router_mode="kv") as router:
        best = await router.best_worker(PROMPT)
        generation = await router.generate(PROMPT, stop_conditions={"max_tokens": 20, "ignore_eos": True})
        tokens = await generation.tokens()
        print(f"probed worker {best.worker_id}; worker {generation.routing.worker_id}: {len(tokens)} tokens")


if __name__ == "__main__":
    # Services log by structlog.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    asyncio.run(main(*sys.argv[1:]))
