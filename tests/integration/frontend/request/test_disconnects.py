"""A client disconnects between any two events of its request's life. No booking, call or task is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from kvrouter.frontend.schedulers.scheduler_link import SchedulerLink
from kvrouter.runtime.deadline import Deadline
from kvrouter.scheduler.api.selection import Selector
from kvrouter.v1.common_pb2 import RoutingConstraints
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest, GetWorkerHealthRequest
from kvrouter.v1.worker_pb2 import FinishReason, StopConditions

from ....hostile_worker import Context, HostileWorker, piece
from ....waiting import until
from ..gateway import System, hostile_worker, request, running_system

WORKER, FAILING = 2, 3
MAX_TOKENS = 4


class Life:
    """Stops a request after its first ``last`` events, and says when it is there."""

    def __init__(self, last: int) -> None:
        self.stopped = asyncio.Event()
        self._left = last

    async def event(self) -> None:
        if not self._left:
            self.stopped.set()
            await asyncio.Event().wait()
        self._left -= 1


EVENTS = (
    "arrived",
    "selection requested",
    "booked",
    "selected",
    "dispatched",
    "output without tokens",
    "first token",
    "second token",
    "finish reason",
)
"""Events after each of which the client disconnects. The second and third happen at the Scheduler, before it answers;
those from the dispatch on happen at the worker."""


def behaviour(life: Life) -> Callable[[Context], Awaitable[None]]:
    async def behave(context: Context) -> None:
        outputs = (piece(), piece(1), piece(2), piece(3, 4, finish=FinishReason.FINISH_REASON_LENGTH))
        for output in outputs:
            await life.event()
            await context.write(output)
        await life.event()

    return behave


async def fails(context: Context) -> None:
    context.set_code(grpc.StatusCode.INTERNAL)


def stopping(method: Callable[..., Awaitable[Any]], life: Callable[[], Life]) -> Callable[..., Awaitable[Any]]:
    """Returns a method of which the call and the return are events."""

    async def stopped(*args: Any, **options: Any) -> Any:
        await life().event()
        result = await method(*args, **options)
        await life().event()
        return result

    return stopped


@pytest.fixture(params=[True, False], ids=["call stream", "ordinary calls"])
async def system(
    request: pytest.FixtureRequest, nats_url: str, etcd_endpoint: str, namespace: str
) -> AsyncIterator[System]:
    # One failure must not change where the next request goes.
    back_off: dict[str, Any] = {"worker_back_off_failures": 1000, "worker_probe_seconds": 0.1}
    async with running_system(nats_url, etcd_endpoint, namespace, **back_off) as found:
        found.call_streams = request.param
        await found.start_worker(1)
        yield found


@asynccontextmanager
async def over_grpc(system: System, *workers: int) -> AsyncIterator[None]:
    """A request over a connection of its own, which is closed at the end of the context."""
    sent = request(
        stop_conditions=StopConditions(max_tokens=MAX_TOKENS),
        constraints=RoutingConstraints(allowed_worker_ids=workers),
    )
    async with grpc.aio.insecure_channel(system.target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        generate: Any = channel.unary_stream(
            "/kvrouter.v1.FrontendService/Generate",
            request_serializer=FrontendServiceGenerateRequest.SerializeToString,
        )
        call = generate(sent)
        reading = asyncio.create_task(_read(call))
        try:
            yield
        finally:
            call.cancel()
            await asyncio.wait([reading])


async def _read(call: Any) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        while await call.read() is not grpc.aio.EOF:
            pass


def over_http(*, stream: bool) -> Callable[..., Any]:
    @asynccontextmanager
    async def connected(system: System, worker: int) -> AsyncIterator[None]:
        fields = {"model": "mock-model", "prompt": list(range(100)), "max_tokens": MAX_TOKENS, "worker_id": worker}
        body = json.dumps(fields | {"stream": stream}).encode()
        host, port = system.http.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        try:
            yield
        finally:
            writer.transport.abort()

    return connected


def running_tasks() -> Counter[str]:
    """Running tasks by the names of their coroutines: services replace their own tasks all the time."""
    return Counter(getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())


async def tasks_of_services() -> Counter[str]:
    """The most tasks of each name that run at once without a request, probes included."""
    most: Counter[str] = Counter()
    for _ in range(30):
        most |= running_tasks()
        await asyncio.sleep(0.01)
    # The first renewal of a lease opens a call that stays open.
    most["_AioCall._handle_status_once_received"] += most["LeasedKeys.run"]
    return most


async def until_nothing_is_left(system: System, workers: list[HostileWorker], tasks: Counter[str]) -> None:
    await system.until_idle()
    await until(lambda: not any(worker.under_way for worker in workers))
    gauge = system.runtime.registry.get_sample_value
    await until(lambda: gauge("kvrouter_frontend_live_bookings") == gauge("kvrouter_frontend_requests_in_flight") == 0)
    health = await system.frontend.get_worker_health(GetWorkerHealthRequest(), deadline=Deadline.after(10))
    assert not any(each.calls for each in health.workers)
    try:
        await until(lambda: not running_tasks() - tasks)
    except TimeoutError:
        raise AssertionError(f"tasks are left: {running_tasks() - tasks}") from None


CLIENTS = {"gRPC": over_grpc, "HTTP stream": over_http(stream=True), "HTTP": over_http(stream=False)}


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_client_that_disconnects_leaves_nothing(
    system: System, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(len(EVENTS))
    monkeypatch.setattr(SchedulerLink, "_call", stopping(SchedulerLink._call, lambda: life))
    monkeypatch.setattr(Selector, "select", stopping(Selector.select, lambda: life))
    async with hostile_worker(system, WORKER, fails) as worker:
        worker.behave = lambda context: behaviour(life)(context)
        tasks = await tasks_of_services()
        for last in range(len(EVENTS)):
            life = Life(last)
            async with CLIENTS[client](system, WORKER):
                async with asyncio.timeout(30):
                    await life.stopped.wait()
            await until_nothing_is_left(system, [worker], tasks)


async def test_a_client_that_disconnects_between_two_attempts_leaves_nothing(system: System) -> None:
    async with hostile_worker(system, FAILING, fails) as failing, hostile_worker(system, WORKER, fails) as worker:
        tasks = await tasks_of_services()
        for last in range(5):
            life = Life(last)
            worker.behave = behaviour(life)
            async with over_grpc(system, FAILING, WORKER), asyncio.timeout(30):
                await life.stopped.wait()
            await until_nothing_is_left(system, [worker, failing], tasks)
        assert failing.calls > 0
