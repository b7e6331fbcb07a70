"""An engine behind kvrouter in forty lines: it echoes prompts, and keeps their blocks forever.

Run it with the NATS and etcd of a running system (``kvrouter up`` prints their addresses):

    python examples/small_engine.py kvrouter/small 127.0.0.1:2379 nats://127.0.0.1:4222
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence

from kvrouter.publisher.errors import RequestRefused
from kvrouter.publisher.worker import RankPublisher, WorkerConfig, running
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, WorkerServiceGenerateRequest

BLOCK = 16  # tokens per KV block


class SmallEngine:
    """An engine is three methods, and reports of what its cache holds."""

    def __init__(self) -> None:
        self.rank: RankPublisher | None = None
        self.cache: set[tuple[int, ...]] = set()  # a block is identified by the whole prefix that it ends

    async def generate(self, request: WorkerServiceGenerateRequest) -> AsyncGenerator[GenerateOutput]:
        """Runs a request."""
        if request.scope.ByteSize():
            raise RequestRefused("this engine has no LoRA adapters, and keeps no caches apart", field="scope")
        # Only full blocks can be reused, and only from the start of the prompt on.
        prompt = tuple(request.token_ids)
        prefixes = [prompt[:end] for end in range(BLOCK, len(prompt) + 1, BLOCK)]
        hits = sum(prefix in self.cache for prefix in prefixes)
        fresh = prefixes[hits:]
        # "Compute" the others, and report them: a chain of blocks below the last one that was there.
        self.cache.update(fresh)
        if fresh and self.rank:
            self.rank.stored(
                token_ids=prompt[hits * BLOCK : len(prefixes) * BLOCK],
                engine_hashes=[hash(prefix) for prefix in fresh],  # any 64-bit ids
                parent=hash(prefixes[hits - 1]) if hits else None,
            )
        # Yield output as it is generated. The first piece says how much of the prompt was cached.
        for number, token in enumerate(prompt[: request.stop_conditions.max_tokens]):
            yield GenerateOutput(token_ids=[token], cached_tokens=None if number else hits * BLOCK)
        yield GenerateOutput(finish_reason=FinishReason.FINISH_REASON_LENGTH)

    async def abort(self, request_ids: Sequence[str]) -> int:  # noqa: ARG002 - nothing runs beside generate
        """Returns how many of the requests were running."""
        return 0

    def load(self) -> Mapping[int, LoadReport]:
        """Returns the load of each rank."""
        return {0: LoadReport(cached_blocks=len(self.cache))}


async def main(component: str, etcd: str, nats: str) -> None:
    """Serves until it is cancelled."""
    name, engine = ComponentName.parse(component), SmallEngine()
    config = WorkerConfig(component=name, model="small", block_size=BLOCK, ranks={0: 1 << 16}, etcd=etcd, nats=nats)
    async with running(config, engine) as worker:
        engine.rank = worker.rank(0)
        await worker.registered()
        print(f"worker {config.worker_id} serves {config.model!r} at {worker.endpoint}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
