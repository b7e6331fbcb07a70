"""An engine that only echoes, a worker around it, and a reader of the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.publisher.worker import WorkerConfig
from kvrouter.v1.events_pb2 import KvEventBatch, LoadReport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, WorkerServiceGenerateRequest
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import NotFoundError

BLOCK = 4


class EchoEngine:
    """Answers a prompt with its tokens, one by one; a prompt that starts with 0 never ends."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.started = asyncio.Event()
        self.closed = asyncio.Event()

    async def generate(self, request: WorkerServiceGenerateRequest) -> AsyncGenerator[GenerateOutput]:
        self.running.add(request.request_id)
        try:
            for token in request.token_ids:
                yield GenerateOutput(token_ids=[token])
            self.started.set()
            if request.token_ids[0] == 0:
                await asyncio.Event().wait()
            yield GenerateOutput(finish_reason=FinishReason.FINISH_REASON_LENGTH)
        finally:
            self.running.discard(request.request_id)
            self.closed.set()

    async def abort(self, request_ids: Sequence[str]) -> int:
        self.aborted += request_ids
        return len(self.running.intersection(request_ids))

    def load(self) -> Mapping[int, LoadReport]:
        return {0: LoadReport(running_requests=len(self.running))}


def config(namespace: str, etcd: str, nats_url: str, **settings: Any) -> WorkerConfig:
    known: dict[str, Any] = {
        "component": ComponentName(namespace, "pool"),
        "model": "m",
        "block_size": BLOCK,
        "ranks": {0: 100},
        "etcd": etcd,
        "nats": nats_url,
        "drain_seconds": 0.2,
        "lease_ttl_seconds": 5,
    }
    return WorkerConfig(**(known | settings))


def store(rank: RankPublisher, first: int, count: int = 1, parent: int | None = None) -> None:
    tokens = [token for number in range(first, first + count) for token in [number] * BLOCK]
    rank.stored(token_ids=tokens, engine_hashes=range(first, first + count), parent=parent)


async def eventually(condition: Callable[[], Awaitable[bool]] | Callable[[], bool], seconds: float = 30) -> None:
    """Waits until the condition holds; asks every few milliseconds."""
    async with asyncio.timeout(seconds):
        while True:
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(0.01)


async def stream_batches(client: Client, component: ComponentName) -> list[KvEventBatch]:
    """Every batch in the component's stream, in order, each checked against its subject."""
    js = client.jetstream()
    try:
        count = (await js.stream_info(component.stream)).state.messages
    except NotFoundError:
        return []
    reader = await js.pull_subscribe(
        component.events_wildcard,
        stream=component.stream,
        config=ConsumerConfig(ack_policy=AckPolicy.NONE, inactive_threshold=30),
    )
    batches: list[KvEventBatch] = []
    while len(batches) < count:
        for message in await reader.fetch(min(500, count - len(batches)), timeout=5):
            batch = KvEventBatch.FromString(message.data)
            assert message.subject == component.events_subject(batch.worker_id, batch.dp_rank)
            batches.append(batch)
    await reader.unsubscribe()
    return batches


def event_ids(batches: Sequence[KvEventBatch]) -> list[int]:
    return [event.event_id for batch in batches for event in batch.events]
