"""Manual state management: the router chooses and books, the program sends the request to the worker itself.

Usage: manual_state.py TARGET MODEL, such as manual_state.py 127.0.0.1:8001 mock-model
"""

from __future__ import annotations

import asyncio
import sys
import uuid

import grpc.aio
from kvrouter.client import BestWorker, Client
from kvrouter.v1.worker_pb2 import StopConditions, WorkerServiceGenerateRequest
from kvrouter.v1.worker_pb2_grpc import WorkerServiceStub

PROMPT = range(1, 257)


async def run(client: Client, request_id: str, chosen: BestWorker) -> int:
    """Runs the request at the worker. Returns the number of its tokens."""
    request = WorkerServiceGenerateRequest(
        request_id=request_id,
        token_ids=PROMPT,
        dp_rank=chosen.dp_rank,
        stop_conditions=StopConditions(max_tokens=20, ignore_eos=True),
    )
    tokens = 0
    async with grpc.aio.insecure_channel(chosen.endpoint) as channel:
        async for piece in WorkerServiceStub(channel).Generate(request):
            if not tokens and piece.output.token_ids:
                print(f"first token: known {await client.mark_prefill_complete(request_id)}")
            tokens += len(piece.output.token_ids)
    return tokens


async def main(target: str, model: str) -> None:
    async with Client(target, model=model) as client:
        request_id = uuid.uuid4().hex
        chosen = await client.best_worker(PROMPT, request_id=request_id)
        try:
            tokens = await run(client, request_id, chosen)
        finally:
            # However it ended. If this program dies first, its bookings end with its session.
            freed = await client.free(request_id)
        print(f"worker {chosen.worker_id}: {tokens} tokens, freed {freed}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
