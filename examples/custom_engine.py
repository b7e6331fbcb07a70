"""A small engine behind kvrouter that echoes prompts and caches their blocks.

Run it with the NATS and etcd of a running system (``kvrouter up`` prints their addresses):

    python examples/custom_engine.py --etcd 127.0.0.1:2379 --nats nats://127.0.0.1:4222
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrouter.publisher.errors import RequestRefused
from kvrouter.publisher.worker import RankPublisher, RequestOutput, Worker, WorkerConfig, running
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.worker_pb2 import FinishReason, WorkerServiceGenerateRequest

BLOCK = 16


@dataclass
class EchoedPrompt:
    """A running request."""

    tokens: list[int]
    """Tokens that it will still output."""
    cached: int | None
    """Cached tokens of its prompt, until they are reported."""


class EchoEngine:
    """Keeps every prompt's full blocks forever. Engine hashes count from 1."""

    def __init__(self) -> None:
        self.rank: RankPublisher | None = None
        self.blocks: dict[tuple[int, ...], int] = {}
        self.worker: Worker | None = None
        self.running: dict[str, EchoedPrompt] = {}
        self.work = asyncio.Event()

    def submit(self, request: WorkerServiceGenerateRequest) -> None:
        """Queues a request for the next step."""
        if request.scope.ByteSize():
            raise RequestRefused("this engine has no LoRA adapters, and keeps no caches apart", field="scope")
        cached = self._cache(tuple(request.token_ids))
        output = list(request.token_ids)[: request.stop_conditions.max_tokens]
        self.running[request.request_id] = EchoedPrompt(output, cached)
        self.work.set()

    async def run(self) -> None:
        """Steps until cancelled. A step generates one token for every request."""
        while True:
            await self.work.wait()
            outputs = [self._next(request_id, each) for request_id, each in list(self.running.items())]
            assert self.worker is not None  # noqa: S101 - set before the first request arrives
            self.worker.emit(outputs)
            if not self.running:
                self.work.clear()
            await asyncio.sleep(0.001)

    def _next(self, request_id: str, prompt: EchoedPrompt) -> RequestOutput:
        output = RequestOutput(request_id, [prompt.tokens.pop(0)], cached_tokens=prompt.cached)
        prompt.cached = None
        if not prompt.tokens:
            output.finish_reason = FinishReason.FINISH_REASON_LENGTH
            del self.running[request_id]
        return output

    def _cache(self, tokens: tuple[int, ...]) -> int:
        prefixes = [tokens[:end] for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        resident = sum(prefix in self.blocks for prefix in prefixes)
        fresh = prefixes[resident:]
        for prefix in fresh:
            self.blocks[prefix] = len(self.blocks) + 1
        if fresh and self.rank is not None:
            self.rank.stored(
                token_ids=tokens[resident * BLOCK : len(prefixes) * BLOCK],
                engine_hashes=[self.blocks[prefix] for prefix in fresh],
                parent=self.blocks[prefixes[resident - 1]] if resident else None,
            )
        return resident * BLOCK

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Stops requests and returns how many were running."""
        return sum(self.running.pop(each, None) is not None for each in request_ids)

    def load(self) -> Mapping[int, LoadReport]:
        """Returns the load of rank 0."""
        return {0: LoadReport(running_requests=len(self.running), cached_blocks=len(self.blocks))}


async def main() -> None:
    """Serves until SIGINT or SIGTERM."""
    options = argparse.ArgumentParser(description="An engine behind kvrouter that echoes prompts.")
    options.add_argument("--etcd", default="127.0.0.1:2379")
    options.add_argument("--nats", default="nats://127.0.0.1:4222")
    options.add_argument("--component", default="kvrouter/echo", help="namespace/component")
    args = options.parse_args()
    engine = EchoEngine()
    config = WorkerConfig(
        component=ComponentName.parse(args.component),
        model="echo",
        block_size=BLOCK,
        ranks={0: 1 << 16},
        etcd=args.etcd,
        nats=args.nats,
    )
    stop = asyncio.Event()
    for which in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(which, stop.set)
    async with running(config, engine) as worker:
        engine.worker, engine.rank = worker, worker.rank()
        stepping = asyncio.create_task(engine.run())
        await worker.registered()
        print(f"worker {config.worker_id} serves {config.model!r} at {worker.endpoint}", flush=True)
        await stop.wait()
    stepping.cancel()


if __name__ == "__main__":
    asyncio.run(main())
