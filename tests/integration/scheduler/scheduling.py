"""A Scheduler over real etcd and NATS, called as an object or behind gRPC, and workers that are only registered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar, cast

from kvrouter.core import local_hashes
from kvrouter.runtime.contracts import Indexer, Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.process.context import Runtime, open_runtime
from kvrouter.runtime.process.hosting import Hosted, host
from kvrouter.runtime.rpc import RpcServer, open_channel, remote
from kvrouter.scheduler.api.service import SchedulerService
from kvrouter.scheduler.app import running
from kvrouter.scheduler.settings import SchedulerSettings
from kvrouter.v1 import indexer_pb2, scheduler_pb2
from kvrouter.v1.common_pb2 import BookingKey, PotentialLoad, Role, RoutingRequest, TokenIds
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.indexer_pb2 import FindMatchesRequest, FindMatchesResponse
from kvrouter.v1.names import ComponentName, service_key
from kvrouter.v1.registry_pb2 import (
    ComponentDescriptor,
    RankRegistration,
    ServiceRegistration,
    WorkerRegistration,
)
from kvrouter.v1.scheduler_pb2 import GetPotentialLoadsRequest, SelectWorkerRequest, SelectWorkerResponse

from ..registered import Registered

SCHEDULER = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
INDEXER = indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"]
BLOCK = 16
MODEL = "org/model-7b"
PATIENCE_SECONDS = 30.0
T = TypeVar("T")


def soon() -> Deadline:
    return Deadline.after(PATIENCE_SECONDS)


async def eventually(call: Callable[[], Awaitable[T]], accept: Callable[[T], bool]) -> T:
    """The first answer that is accepted; refusals on the way are taken for "not yet"."""
    last: object = None
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    last = answer = await call()
                    if accept(answer):
                        return answer
                except KvRouterError as error:
                    last = error
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"last answer: {last!r}") from None


def tokens(blocks: int, *, seed: int = 0) -> list[int]:
    return [seed * 1_000_000 + number for number in range(blocks * BLOCK)]


def routing(blocks: int = 4, *, seed: int = 0, **fields: Any) -> RoutingRequest:
    known: dict[str, Any] = {"model": MODEL, "token_ids": TokenIds(ids=tokens(blocks, seed=seed))}
    return RoutingRequest(**(known | fields))


def selecting(request_id: str | None, request: RoutingRequest | None = None, **fields: Any) -> SelectWorkerRequest:
    booking = None if request_id is None else BookingKey(request_id=request_id)
    return SelectWorkerRequest(request=request or routing(), booking=booking, **fields)


@dataclass
class Stack(Registered):
    """A Scheduler, and the etcd in which its workers are registered."""

    scheduler: Scheduler
    service: SchedulerService
    server: RpcServer
    runtime: Runtime

    async def register(self, *worker_ids: int, ranks: int = 1, **fields: Any) -> None:
        """Registers workers, and waits until the Scheduler knows them."""
        described = ComponentDescriptor(
            component=self.named, model=MODEL, block_size=BLOCK, hash_scheme="xxh3-1337", role=Role.ROLE_BOTH
        )
        await self.put(self.component.descriptor_key, described)
        for worker_id in worker_ids:
            registration = WorkerRegistration(
                worker_id=worker_id,
                component=self.named,
                model=MODEL,
                endpoint=f"127.0.0.1:{worker_id}",
                block_size=BLOCK,
                hash_scheme="xxh3-1337",
                ranks=[RankRegistration(dp_rank=rank, incarnation=5, total_blocks=1000) for rank in range(ranks)],
                **({"publishes_events": True} | fields),
            )
            await self.put(self.component.worker_key(worker_id), registration)
        await self.knows(lambda found: set(worker_ids) <= found)

    async def unregister(self, worker_id: int) -> None:
        await self.delete(self.component.worker_key(worker_id))
        await self.knows(lambda found: worker_id not in found)

    async def knows(self, accept: Callable[[set[int]], bool]) -> None:
        """Waits until the Scheduler's view of the workers is accepted."""

        def seen(directory: Any) -> bool:
            view = directory.components.get(self.component)
            return view is not None and accept(set(view.workers))

        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.runtime.directory.wait_for(seen)

    async def select(self, request: SelectWorkerRequest) -> SelectWorkerResponse:
        return await self.scheduler.select_worker(request, deadline=soon())

    async def loads(self, request: RoutingRequest | None = None) -> list[PotentialLoad]:
        asked = GetPotentialLoadsRequest(request=request or routing())
        return list((await self.scheduler.get_potential_loads(asked, deadline=soon())).loads)

    async def booked(self) -> int:
        """Requests booked, over all ranks."""
        return sum(load.active_requests for load in await self.loads())


@asynccontextmanager
async def scheduling(
    component: ComponentName,
    etcd: str,
    nats: str,
    *,
    how: str = "stub",
    instance_id: str = "scheduler-1",
    **options: Any,
) -> AsyncIterator[Stack]:
    """A Scheduler with all that is around it in its process; how it is called: ``object`` or ``stub``."""
    settings = SchedulerSettings(
        namespace=component.namespace,
        etcd=etcd,
        nats=nats,
        bind="127.0.0.1:0",
        http_bind="",
        instance_id=instance_id,
        drain_seconds=1.0,
        **({"router_mode": "kv"} | options),
    )
    stopping = asyncio.Event()
    listening: asyncio.Future[RpcServer] = asyncio.get_running_loop().create_future()
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(open_runtime(settings))
        service = await stack.enter_async_context(running(settings, runtime, rng=Random(1)))
        as_contract: Scheduler = service
        hosted = Hosted("scheduler", service, lambda: service.ready)
        hosting = asyncio.create_task(host(runtime, [hosted], stopping, started=listening.set_result))
        try:
            server = await listening
            async with open_channel(f"127.0.0.1:{server.port}") as channel:
                stub = cast(Scheduler, remote(SCHEDULER, channel))
                caller = as_contract if how == "object" else stub
                yield Stack(caller, service, server, runtime, component=component, etcd=etcd)
        finally:
            stopping.set()
            await hosting


class PrefixResident:
    """An Indexer that knows one prompt, on one rank; behind real gRPC."""

    def __init__(self, worker_id: int, blocks: int) -> None:
        self._worker_id = worker_id
        self._hashes = memoryview(local_hashes(tokens(blocks), BLOCK)).cast("Q").tolist()
        self.asked = 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def find_matches(self, request: FindMatchesRequest, *, deadline: Deadline) -> FindMatchesResponse:
        self.asked += 1
        await self.answers.wait()
        wanted = list(request.local_hashes.hashes)
        equal = [ours == theirs for ours, theirs in zip(wanted, self._hashes, strict=False)]
        overlap = [*equal, False].index(False)
        return FindMatchesResponse(
            worker_ids=[self._worker_id],
            dp_ranks=[0],
            device_blocks=[overlap],
            incarnations=[5],
            next_event_ids=[3],
            prompt_blocks=len(wanted),
        )


@asynccontextmanager
async def indexing(stack: Stack, indexer: PrefixResident, instance_id: str) -> AsyncIterator[RpcServer]:
    """Serves an Indexer and registers it; its registration stays when the server ends, as after a crash."""
    server = RpcServer("127.0.0.1:0")
    server.add_service(INDEXER, cast(Indexer, indexer))
    await server.start()
    registration = ServiceRegistration(endpoint=server.endpoint(), ready=True)
    await stack.put(service_key(stack.component.namespace, "indexer", instance_id), registration)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await stack.runtime.directory.wait_for(lambda seen: instance_id in seen.services("indexer"))
    try:
        yield server
    finally:
        await server.drain(0)
