"""An Indexer with all that is around it, for tests of its service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from kvrouter.indexer.app import running
from kvrouter.indexer.settings import IndexerSettings
from kvrouter.runtime.contracts import Indexer
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.runtime.process.context import open_runtime
from kvrouter.runtime.process.hosting import Hosted, host
from kvrouter.runtime.rpc import RpcServer, open_channel, remote
from kvrouter.v1 import indexer_pb2
from kvrouter.v1.common_pb2 import TokenIds
from kvrouter.v1.errors import NotFound, NotReady
from kvrouter.v1.indexer_pb2 import FindMatchesRequest, FindMatchesResponse
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, RankRegistration, WorkerRegistration
from nats.aio.client import Client
from prometheus_client import CollectorRegistry

from ..registered import Registered
from .event_batches import BLOCK_SIZE, RankSource
from .indexing import PATIENCE_SECONDS

DESCRIPTOR = indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"]
T = TypeVar("T")


@dataclass
class Stack(Registered):
    """An Indexer and what it stands on."""

    indexer: Indexer
    server: RpcServer
    nats: Client
    directory: Directory

    async def create_component(self) -> None:
        await self.put(
            self.component.descriptor_key,
            ComponentDescriptor(component=self.named, model="m", block_size=BLOCK_SIZE, hash_scheme="xxh3-1337"),
        )
        await self.find([])

    async def register(self, source: RankSource, model: str = "m") -> None:
        """Registers a worker, and waits until the Indexer's process has seen it."""
        registration = WorkerRegistration(
            worker_id=source.worker_id,
            component=self.named,
            model=model,
            block_size=BLOCK_SIZE,
            hash_scheme="xxh3-1337",
            publishes_events=True,
            ranks=[RankRegistration(dp_rank=source.dp_rank, incarnation=source.incarnation)],
        )
        key = self.component.worker_key(source.worker_id)
        await self.put(key, registration)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.directory.wait_for(
                lambda seen: key in seen.ignored or source.worker_id in seen.components[self.component].workers
            )

    async def find(self, token_ids: list[int]) -> FindMatchesResponse:
        request = FindMatchesRequest(component=self.named, token_ids=TokenIds(ids=token_ids))
        return await answered(lambda: self.indexer.find_matches(request, deadline=soon()))

    async def follows(self, source: RankSource) -> None:
        expected = (source.worker_id, source.dp_rank, source.incarnation, source.next_event_id)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                answer = await self.find([])
                columns = (answer.worker_ids, answer.dp_ranks, answer.incarnations, answer.next_event_ids)
                if expected in zip(*columns, strict=True):
                    return
                await asyncio.sleep(0.01)


def soon() -> Deadline:
    return Deadline.after(PATIENCE_SECONDS)


async def answered(call: Callable[[], Awaitable[T]]) -> T:
    """The answer, once the component is known and restored."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                return await call()
            except (NotReady, NotFound):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(settings: IndexerSettings, how: str) -> AsyncIterator[tuple[Indexer, RpcServer, Directory]]:
    """An Indexer with all that is around it in its process; how it is called: ``object`` or ``stub``."""
    stopping = asyncio.Event()
    server: asyncio.Future[RpcServer] = asyncio.get_running_loop().create_future()
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(open_runtime(settings))
        service = await stack.enter_async_context(running(settings, runtime))
        hosted = Hosted("indexer", service, lambda: service.ready)
        hosting = asyncio.create_task(host(runtime, [hosted], stopping, started=server.set_result))
        try:
            rpc = await server
            async with open_channel(f"127.0.0.1:{rpc.port}") as channel:
                stub = cast(Indexer, remote(DESCRIPTOR, channel))
                yield (cast(Indexer, service) if how == "object" else stub), rpc, runtime.directory
        finally:
            stopping.set()
            await hosting


@asynccontextmanager
async def watching(etcd: str, namespace: str) -> AsyncIterator[Directory]:
    """What etcd says, as others see it."""
    directory = Directory(etcd, namespace, CollectorRegistry())
    following = asyncio.create_task(directory.run())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield directory
    finally:
        following.cancel()
        await asyncio.wait({following})


def settings_for(etcd: str, nats: str, component: ComponentName, **options: Any) -> IndexerSettings:
    return IndexerSettings(
        namespace=component.namespace,
        etcd=etcd,
        nats=nats,
        bind="127.0.0.1:0",
        http_bind="127.0.0.1:0",
        instance_id="indexer-1",
        max_prompt_tokens=1000,
        drain_seconds=1.0,
        **options,
    )
