"""TensorRT-LLM behind kvrouter: one process runs the model, serves requests and publishes the cache.

Run it where TensorRT-LLM is installed, with the NATS and etcd of a running system:

    python examples/tensorrt_llm_engine.py my-model 127.0.0.1:2379 nats://127.0.0.1:4222
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from kvrouter.engines.events.tensorrt_llm import TensorRtLlmEvents
from kvrouter.publisher.errors import RequestRefused
from kvrouter.publisher.worker import WorkerConfig, running
from kvrouter.v1.common_pb2 import CopyCounting
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, WorkerServiceGenerateRequest
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.llmapi import KvCacheConfig

BLOCK = 32  # tokens_per_block of the engine
FINISH = {"stop": FinishReason.FINISH_REASON_STOP, "length": FinishReason.FINISH_REASON_LENGTH}


class TensorRtLlmEngine:
    """Runs requests through the LLM API."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.running: dict[str, Any] = {}

    async def generate(self, request: WorkerServiceGenerateRequest) -> AsyncGenerator[GenerateOutput]:
        """Runs a request. The engine returns all tokens so far each time; the new ones are passed on."""
        if request.scope.ByteSize():
            raise RequestRefused("this engine has no LoRA adapters, and keeps no caches apart", field="scope")
        try:
            result = self.llm.generate_async(list(request.token_ids), parameters(request), streaming=True)
        except ValueError as error:
            raise RequestRefused(str(error)) from None
        self.running[request.request_id] = result
        sent = 0
        try:
            async for output in result:
                completion = output.outputs[0]
                yield GenerateOutput(
                    token_ids=completion.token_ids[sent:],
                    cached_tokens=None if sent else getattr(output, "cached_tokens", None),
                    finish_reason=FINISH.get(completion.finish_reason),
                )
                sent = len(completion.token_ids)
        finally:
            self.running.pop(request.request_id, None)

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Stops requests and returns how many were running."""
        results = [result for each in request_ids if (result := self.running.pop(each, None)) is not None]
        for result in results:
            result.abort()
        return len(results)

    def load(self) -> Mapping[int, LoadReport]:
        """Returns the load of rank 0."""
        return {0: LoadReport(running_requests=len(self.running))}


def parameters(request: WorkerServiceGenerateRequest) -> SamplingParams:
    """Translates the options of a request; those that are unset keep the engine's defaults."""
    sampling, stop = request.sampling_options, request.stop_conditions
    chosen = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p", "seed")}
    return SamplingParams(
        max_tokens=stop.max_tokens,
        ignore_eos=stop.ignore_eos,
        stop_token_ids=list(stop.stop_token_ids) or None,
        **{name: value for name, value in chosen.items() if sampling.HasField(name)},
    )


async def publish(llm: LLM, adapter: TensorRtLlmEvents) -> None:
    """Publishes the cache's events until it is cancelled. The engine returns those of up to five seconds at once."""
    while True:
        async for event in llm.get_kv_cache_events_async(timeout=5):
            adapter.apply(event)


async def main(model: str, etcd: str, nats: str) -> None:
    """Serves until it is cancelled."""
    # Without event_buffer_max_size the engine keeps no events.
    cache = KvCacheConfig(enable_block_reuse=True, tokens_per_block=BLOCK, event_buffer_max_size=16_384)
    llm = LLM(model=model, kv_cache_config=cache)
    config = WorkerConfig(
        component=ComponentName("kvrouter", "tensorrt-llm"),
        model=model,
        block_size=BLOCK,
        copy_counting=CopyCounting.COPY_COUNTING_SET,
        etcd=etcd,
        nats=nats,
    )
    async with running(config, TensorRtLlmEngine(llm)) as worker, asyncio.TaskGroup() as tasks:
        tasks.create_task(publish(llm, TensorRtLlmEvents({0: worker.rank(0)}, block_size=BLOCK)))
        await worker.registered()
        print(f"worker {config.worker_id} serves {model!r} at {worker.endpoint}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
