"""Registers a worker in etcd, publishes a block, and reads both back: ``publisher.py NATS_URL ETCD_ENDPOINT``."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence

import grpc
import nats
from kvrouter.publisher.worker import WorkerConfig, running
from kvrouter.v1.events_pb2 import KvEvent, KvEventBatch, LoadReport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, StopConditions, WorkerServiceGenerateRequest
from kvrouter.v1.worker_pb2_grpc import WorkerServiceStub


class Echo:
    """Answers a prompt with its first token."""

    async def generate(self, request: WorkerServiceGenerateRequest) -> AsyncGenerator[GenerateOutput]:
        """Yields one output."""
        yield GenerateOutput(token_ids=request.token_ids[:1], finish_reason=FinishReason.FINISH_REASON_LENGTH)

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Has nothing to stop."""
        return 0

    def load(self) -> Mapping[int, LoadReport]:
        """Reports no load."""
        return {0: LoadReport()}


async def main(nats_url: str, etcd: str) -> None:
    """Runs a worker, publishes and serves one request."""
    component = ComponentName(f"packages-{uuid.uuid4().hex[:8]}", "pool")
    config = WorkerConfig(component=component, model="m", block_size=4, ranks={0: 100}, etcd=etcd, nats=nats_url)
    async with running(config, Echo()) as worker:
        await worker.registered()
        worker.rank(0).stored(token_ids=[1, 2, 3, 4], engine_hashes=[11], parent=None)
        await worker.flush()
        client = await nats.connect(nats_url)
        stream = client.jetstream()
        subscription = await stream.subscribe(component.events_wildcard, ordered_consumer=True)
        events: list[KvEvent] = []
        while not events:  # The worker's first batch announces it and has no events.
            message = await subscription.next_msg(timeout=10)
            events += KvEventBatch.FromString(message.data).events
        assert [list(event.stored.engine_hashes) for event in events] == [[11]]
        await client.close()
        async with grpc.aio.insecure_channel(worker.endpoint) as channel:
            request = WorkerServiceGenerateRequest(
                request_id="r", token_ids=[5, 6], stop_conditions=StopConditions(max_tokens=1)
            )
            outputs = [output async for output in WorkerServiceStub(channel).Generate(request)]
        assert [token for output in outputs for token in output.output.token_ids] == [5]


asyncio.run(main(*sys.argv[1:]))
