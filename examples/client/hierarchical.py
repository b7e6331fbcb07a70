"""Hierarchical probing: asks the routers of several groups of workers, and sends the request to the best one.

Usage: hierarchical.py MODEL TARGET..., such as hierarchical.py mock-model 127.0.0.1:8001 127.0.0.1:9001
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack

from kvrouter.client import Client

PROMPT = range(1, 257)


async def main(model: str, *targets: str) -> None:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(target, model=model)) for target in targets]
        # Without a request id nothing is booked.
        best = await asyncio.gather(*(client.best_worker(PROMPT) for client in clients))
        overlaps = [each.overlap_blocks for each in best]
        print(f"overlaps: {overlaps}")
        number = overlaps.index(max(overlaps))
        generation = await clients[number].generate(PROMPT, worker_id=best[number].worker_id)
        print(f"group {number}: worker {generation.routing.worker_id}, {len(await generation.tokens())} tokens")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
