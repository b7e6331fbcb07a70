"""Automatic routing: the router chooses the worker, books the load and runs the request.

Usage: automatic.py TARGET MODEL, such as automatic.py 127.0.0.1:8001 mock-model
"""

from __future__ import annotations

import asyncio
import sys

from kvrouter.client import Client


async def main(target: str, model: str) -> None:
    async with Client(target, model=model) as client:
        generation = await client.generate(
            range(1, 257),
            stop_conditions={"max_tokens": 20, "ignore_eos": True},
            sampling_options={"temperature": 0.7, "top_p": 0.9},
            router_config_override={"overlap_score_weight": 2.0, "router_temperature": 0.5},
        )
        tokens = []
        async for output in generation:
            tokens += output.token_ids
        print(f"worker {generation.routing.worker_id}: {len(tokens)} tokens")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
