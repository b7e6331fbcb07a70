"""A system with prefill and decode pools of one model, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvrouter.mocker import app as mocker_app
from kvrouter.mocker.settings import MockerSettings
from kvrouter.publisher.worker import Worker
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.telemetry.metrics import new_registry
from kvrouter.v1.common_pb2 import Component, RoutingRequest, TokenIds
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateResponse, GetWorkerHealthRequest, RoutingInfo
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import GetPotentialLoadsRequest, GetStatusRequest
from prometheus_client import CollectorRegistry

from ....hostile_worker import Behaviour, HostileWorker, registered_beside
from ....waiting import until
from ..gateway import System, request, running_system

PREFILL, DECODE = "prefill", "decode"
SCHEDULING = {"router_mode": "kv", "kv_events": False, "remote_prefill_min_tokens": 32, "kv_transfer_latency_ms": 0.0}


@dataclass
class Served:
    """What a client received."""

    tokens: list[int]
    routing: list[RoutingInfo]

    @property
    def prefill(self) -> int:
        """Id of the worker that computed the prompt of the last attempt; 0 for the decode worker."""
        return self.routing[-1].prefill_rank.worker_id


@dataclass
class Fleet:
    """Workers by role, behind a Frontend and a Scheduler."""

    system: System
    registries: dict[int, CollectorRegistry] = field(default_factory=dict)
    _stacks: dict[int, tuple[AsyncExitStack, str]] = field(default_factory=dict)
    """What runs a worker, and its component."""

    async def start(self, worker_id: int, role: str, *, component: str = "", **settings: Any) -> Worker:
        """Starts a worker and waits until it can be chosen."""
        defaults = {
            "clock_factor": 20.0,
            "num_blocks": 512,
            "drain_seconds": 0.2,
            "mean_output_tokens": 0,
            "role": role,
        }
        registry = self.registries[worker_id] = new_registry()
        component = component or role
        running = mocker_app.running(
            MockerSettings(**self.system.where, worker_id=worker_id, component=component, **(defaults | settings)),
            registry,
        )
        stack = await self.system.stack.enter_async_context(AsyncExitStack())
        self._stacks[worker_id] = stack, component
        worker = await stack.enter_async_context(running)
        await worker.registered()
        await self._until_candidate(worker_id, component)
        return worker

    async def _until_candidate(self, worker_id: int, component: str) -> None:
        await until(lambda: self._sees(worker_id) and self.system.frontend.ready())
        async with asyncio.timeout(30):
            while worker_id not in await self._candidates(component):
                await asyncio.sleep(0.01)

    async def stop(self, worker_id: int) -> None:
        """Stops a worker and waits until it is no longer known."""
        stack, component = self._stacks.pop(worker_id)
        await stack.aclose()
        await until(lambda: not self._sees(worker_id))
        async with asyncio.timeout(30):
            while worker_id in await self._candidates(component):
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def hostile(self, worker_id: int, role: str, behave: Behaviour) -> AsyncIterator[HostileWorker]:
        """A worker that a test writes, registered like the others of its role, of which there must be one."""
        components = self.system.runtime.directory.components
        view = components[ComponentName(self.system.where["namespace"], role)]
        async with (
            HostileWorker(behave, call_streams=True).serving() as worker,
            registered_beside(view, self.system.where["etcd"], worker_id, worker.endpoint, call_streams=True),
        ):
            await self._until_candidate(worker_id, role)
            yield worker

    async def serve_until_called(self, worker: HostileWorker) -> Served:
        """Sends requests with different prompts until one of them has reached a worker; returns what came back."""
        for number in range(100):
            served = await self.serve(first=1000 * number)
            if worker.calls:
                return served
        raise AssertionError("no request has reached the worker")

    async def serve(self, tokens: int = 100, *, first: int = 0, seconds: float = 30.0, **fields: Any) -> Served:
        """Sends a request and returns what came back."""
        responses = self.system.client.generate(
            request(range(first, first + tokens), **fields), deadline=Deadline.after(seconds)
        )
        pieces: list[FrontendServiceGenerateResponse] = [piece async for piece in responses]
        return Served(
            [token for piece in pieces for token in piece.output.token_ids],
            [piece.routing for piece in pieces if piece.HasField("routing")],
        )

    async def failures_of(self, worker_id: int) -> int:
        """Returns how many failures the Frontend counts against a worker."""
        answer = await self.system.client.get_worker_health(GetWorkerHealthRequest(), deadline=Deadline.after(10))
        return next(each.consecutive_failures for each in answer.workers if each.worker_id == worker_id)

    async def until_idle(self) -> None:
        """Returns when the Scheduler has no booking in any pool, and no prefill worker keeps blocks."""
        async with asyncio.timeout(30):
            while await self.bookings() or self.kept_blocks():
                await asyncio.sleep(0.01)

    async def bookings(self) -> int:
        status = await self.system.scheduler.get_status(GetStatusRequest(), deadline=Deadline.after(10))
        return status.bookings

    def kept_blocks(self) -> float:
        """Blocks that prefill workers keep for decode workers."""
        values = [each.get_sample_value("kvrouter_mocker_kept_blocks") for each in self.registries.values()]
        return sum(value or 0 for value in values)

    def prefills(self, outcome: str) -> float:
        """Attempts by who computed the prompt."""
        return (
            self.system.runtime.registry.get_sample_value("kvrouter_frontend_prefills_total", {"outcome": outcome}) or 0
        )

    def _sees(self, worker_id: int) -> bool:
        return any(worker_id in view.workers for view in self.system.runtime.directory.components.values())

    async def _candidates(self, component: str) -> list[int]:
        named = Component(namespace=self.system.where["namespace"], name=component)
        routing = RoutingRequest(component=named, token_ids=TokenIds(ids=[1]))
        try:
            answer = await self.system.scheduler.get_potential_loads(
                GetPotentialLoadsRequest(request=routing), deadline=Deadline.after(10)
            )
        except KvRouterError:
            return []
        return [load.rank.worker_id for load in answer.loads]


@asynccontextmanager
async def running_fleet(nats: str, etcd: str, namespace: str, **scheduling: Any) -> AsyncIterator[Fleet]:
    """A Frontend and a Scheduler without workers."""
    options: dict[str, Any] = {
        "worker_probe_seconds": 0.1,
        "worker_probe_failures": 30,
        "worker_back_off_failures": 1000,
    }
    async with running_system(nats, etcd, namespace, scheduling=SCHEDULING | scheduling, **options) as system:
        yield Fleet(system)
