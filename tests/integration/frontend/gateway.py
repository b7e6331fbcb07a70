"""A whole system for tests of the gateway: services in this process, workers behind real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

from kvrouter.frontend import app as frontend_app
from kvrouter.frontend.schedulers.scheduler_choice import RemoteSchedulers
from kvrouter.frontend.service import FrontendService
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.mocker import app as mocker_app
from kvrouter.mocker.settings import MockerSettings
from kvrouter.publisher.worker import Worker
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.process.context import Runtime, open_runtime
from kvrouter.runtime.process.hosting import Hosted, host
from kvrouter.runtime.rpc import Guard, RpcServer, open_channel, remote
from kvrouter.runtime.telemetry.metrics import new_registry
from kvrouter.scheduler import app as scheduler_app
from kvrouter.scheduler.api.service import SchedulerService
from kvrouter.scheduler.settings import SchedulerSettings
from kvrouter.v1 import frontend_pb2
from kvrouter.v1.common_pb2 import PotentialLoad, RoutingRequest, TokenIds
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest, FrontendServiceGenerateResponse
from kvrouter.v1.scheduler_pb2 import GetPotentialLoadsRequest
from kvrouter.v1.worker_pb2 import StopConditions

from ...hostile_worker import Behaviour, HostileWorker, registered_beside
from ...waiting import until

_FRONTEND = frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"]

MODEL = "mock-model"


def request(tokens: Sequence[int] = range(100), **fields: Any) -> FrontendServiceGenerateRequest:
    defaults: dict[str, Any] = {
        "model": MODEL,
        "token_ids": TokenIds(ids=tokens),
        "stop_conditions": StopConditions(max_tokens=4),
    }
    return FrontendServiceGenerateRequest(**(defaults | fields))


@dataclass
class System:
    """What runs. ``client`` is a stub of the Frontend over gRPC."""

    where: dict[str, Any]
    stack: AsyncExitStack
    runtime: Runtime
    schedulers: list[SchedulerService]
    frontend: FrontendService
    client: Frontend
    http: str
    target: str
    call_streams: bool = True
    """Whether hostile workers serve call streams."""
    workers: dict[int, Worker] = field(default_factory=dict)
    _worker_stacks: dict[int, AsyncExitStack] = field(default_factory=dict)

    @property
    def scheduler(self) -> SchedulerService:
        """The only one, or the first."""
        return self.schedulers[0]

    async def start_worker(self, worker_id: int, **settings: Any) -> Worker:
        settings = {"clock_factor": 20.0, "num_blocks": 512, "drain_seconds": 0.2, "mean_output_tokens": 0} | settings
        stack = await self.stack.enter_async_context(AsyncExitStack())
        running = mocker_app.running(MockerSettings(**self.where, worker_id=worker_id, **settings), new_registry())
        worker = self.workers[worker_id] = await stack.enter_async_context(running)
        self._worker_stacks[worker_id] = stack
        await worker.registered()
        await until(lambda: self._sees(worker_id) and self.frontend.ready())
        await self.until_candidate(worker_id)
        return worker

    async def until_candidate(self, worker_id: int) -> None:
        """Returns when the Scheduler and the Frontend know the worker."""
        await until(lambda: self._sees(worker_id))
        async with asyncio.timeout(30):
            while not all(await self._candidate_at_each(worker_id)):
                await asyncio.sleep(0.01)

    async def until_gone(self, worker_id: int) -> None:
        """Returns when the Scheduler and the Frontend know the worker no more."""
        await until(lambda: not self._sees(worker_id))
        async with asyncio.timeout(30):
            while any(await self._candidate_at_each(worker_id)):
                await asyncio.sleep(0.01)

    def has_streams(self) -> bool:
        """Whether the Frontend has a call stream to each worker that serves them.

        A worker counts its stream earlier: until the Frontend has the answer to its opening, it makes ordinary calls.
        """
        views = self.runtime.directory.components.values()
        serving = sum(each.serves_call_stream for view in views for each in view.workers.values())
        return self.runtime.call_streams.client("worker").streams == serving

    def _sees(self, worker_id: int) -> bool:
        return any(worker_id in view.workers for view in self.runtime.directory.components.values())

    async def _candidate_at_each(self, worker_id: int) -> list[bool]:
        """Whether each Scheduler has the worker among its candidates; [False] where one does not answer yet."""
        try:
            return [worker_id in await self.loads(scheduler) for scheduler in self.schedulers]
        except KvRouterError:
            return [False]

    def wait_for_no_restart(self) -> None:
        """Has requests fail at once while no worker is there, and not after the time that a pool may restart in."""
        runner = self.frontend.runner
        runner.settings = runner.settings.model_copy(update={"pool_restart_seconds": 0.0})

    async def stop_worker(self, worker_id: int) -> None:
        """Stops a worker and waits until it is no longer known."""
        await self._worker_stacks.pop(worker_id).aclose()
        await self.until_gone(worker_id)

    async def answer(self, sent: FrontendServiceGenerateRequest | None = None) -> list[FrontendServiceGenerateResponse]:
        """Runs a request to its end. Returns the pieces of its answer."""
        return [piece async for piece in self.client.generate(sent or request(), deadline=Deadline.after(60))]

    async def generated(self, sent: FrontendServiceGenerateRequest | None = None) -> int:
        """Runs a request to its end. Returns the number of tokens it got."""
        return sum(len(piece.output.token_ids) for piece in await self.answer(sent))

    async def loads(self, scheduler: SchedulerService | None = None) -> dict[int, PotentialLoad]:
        """Load of every worker, by that Scheduler's book or the first one's."""
        routing = RoutingRequest(model=MODEL, token_ids=TokenIds(ids=[1]))
        answer = await (scheduler or self.scheduler).get_potential_loads(
            GetPotentialLoadsRequest(request=routing), deadline=Deadline.after(10)
        )
        return {load.rank.worker_id: load for load in answer.loads}

    async def booked(self) -> list[int]:
        """Requests that each Scheduler has booked."""
        loads = [await self.loads(scheduler) for scheduler in self.schedulers]
        return [sum(load.active_requests for load in each.values()) for each in loads]

    async def until_idle(self) -> None:
        """Returns when no Scheduler has a booking: every request was freed."""
        async with asyncio.timeout(30):
            while any(await self.booked()):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running_system(
    nats_url: str,
    etcd_endpoint: str,
    namespace: str,
    *,
    schedulers: int = 1,
    scheduling: Mapping[str, Any] = MappingProxyType({}),
    **frontend_options: Any,
) -> AsyncIterator[System]:
    """Services that run, so many Schedulers among them, with options of these (``scheduling``) and of the Frontend."""
    where: dict[str, Any] = {"nats": nats_url, "etcd": etcd_endpoint, "namespace": namespace}
    common = where | {"drain_seconds": 0.2}
    async with AsyncExitStack() as stack:
        # A busy machine would have requests sharded among several Schedulers.
        quiet: dict[str, Any] = {"router_mode": "round-robin", "session_grace_seconds": 3.0, "overload_lag_ms": 0.0}
        options = quiet | dict(scheduling)
        running = [
            await _scheduler(stack, SchedulerSettings(**common, **options, instance_id=f"scheduler-{number}"))
            for number in range(schedulers)
        ]
        front = FrontendSettings(**common, port=0, **frontend_options)
        runtime = await stack.enter_async_context(open_runtime(front))
        async with asyncio.timeout(30):
            await runtime.directory.wait_for(
                lambda seen: sum(each.ready for each in seen.services("scheduler").values()) == schedulers
            )
        remote_schedulers = await stack.enter_async_context(aclosing(RemoteSchedulers(runtime.directory)))
        frontend = await stack.enter_async_context(frontend_app.running(front, runtime, remote_schedulers))
        http = await stack.enter_async_context(frontend_app.serving_http(frontend, front, runtime))
        hosting = _hosting(runtime, "frontend", frontend, frontend.ready, guard=frontend.access)
        server = await stack.enter_async_context(hosting)
        channel = await stack.enter_async_context(open_channel(server.endpoint()))
        client = cast(Frontend, remote(_FRONTEND, channel))
        yield System(where, stack, runtime, running, frontend, client, http, server.endpoint())


@asynccontextmanager
async def hostile_worker(system: System, worker_id: int, behave: Behaviour) -> AsyncIterator[HostileWorker]:
    """A worker of the test's own beside those that run, while the context lasts; called as ``call_streams`` says."""
    view = next(iter(system.runtime.directory.components.values()))
    async with (
        HostileWorker(behave, call_streams=system.call_streams).serving() as worker,
        registered_beside(view, system.where["etcd"], worker_id, worker.endpoint, call_streams=system.call_streams),
    ):
        await system.until_candidate(worker_id)
        await until(system.has_streams)
        yield worker


async def _scheduler(stack: AsyncExitStack, settings: SchedulerSettings) -> SchedulerService:
    runtime = await stack.enter_async_context(open_runtime(settings))
    scheduler = await stack.enter_async_context(scheduler_app.running(settings, runtime))
    await stack.enter_async_context(_hosting(runtime, "scheduler", scheduler, lambda: scheduler.ready))
    return scheduler


@asynccontextmanager
async def _hosting(
    runtime: Runtime,
    kind: str,
    service: object,
    ready: Callable[[], bool],
    *,
    guard: Guard | None = None,
) -> AsyncIterator[RpcServer]:
    stopping = asyncio.Event()
    listening: asyncio.Future[RpcServer] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        hosted = [Hosted(kind, service, ready, guard=guard)]
        group.create_task(host(runtime, hosted, stopping, started=listening.set_result))
        try:
            yield await listening
        finally:
            stopping.set()
