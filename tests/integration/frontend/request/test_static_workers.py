"""Workers that are listed by hand: requests are routed with neither etcd nor NATS."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import Any, cast

import aiohttp
import pytest
from kvrouter.devtools.system.ports import free_port
from kvrouter.frontend import app as frontend_app
from kvrouter.frontend.schedulers.scheduler_choice import LocalScheduler, RemoteSchedulers
from kvrouter.frontend.service import FrontendService
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.mocker.settings import MockerSettings
from kvrouter.mocker.standalone import serving_alone
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.process.context import open_runtime
from kvrouter.runtime.process.hosting import Hosted, host
from kvrouter.runtime.telemetry.metrics import new_registry
from kvrouter.scheduler import app as scheduler_app
from kvrouter.scheduler.settings import SchedulerSettings
from kvrouter.v1.common_pb2 import RoutingConstraints, RoutingOverrides, RoutingRequest, TokenIds
from kvrouter.v1.errors import AllBusy, KvRouterError
from kvrouter.v1.frontend_pb2 import (
    FrontendServiceGenerateRequest,
    FrontendServiceGetPotentialLoadsRequest,
    FrontendServiceSelectWorkerRequest,
    RoutingInfo,
)
from kvrouter.v1.worker_pb2 import StopConditions
from pydantic import ValidationError

from ....hostile_worker import HostileWorker, hangs
from ....waiting import until
from ..gateway import MODEL, request

NOWHERE = {"etcd": "127.0.0.1:1", "nats": "nats://127.0.0.1:1"}
"""Where nobody listens: nothing may depend on them."""


@asynccontextmanager
async def worker(worker_id: int, port: int = 0, **settings: Any) -> AsyncIterator[str]:
    known: dict[str, Any] = {"clock_factor": 20.0, "num_blocks": 512, "drain_seconds": 0.1, "mean_output_tokens": 0}
    mocker = MockerSettings(**(NOWHERE | known | settings), worker_id=worker_id, bind=f"127.0.0.1:{port}")
    async with serving_alone(mocker, new_registry()) as endpoint:
        yield endpoint


class Gateway:
    """A Frontend and its Scheduler."""

    def __init__(self, frontend: FrontendService, http: str) -> None:
        self.frontend = frontend
        self.http = http

    async def run(self, sent: FrontendServiceGenerateRequest | None = None) -> RoutingInfo:
        """Runs a request to its end; who ran it."""
        routing = RoutingInfo()
        async with aclosing(self.frontend.generate(sent or request(), deadline=Deadline.after(20))) as pieces:
            async for piece in pieces:
                if piece.HasField("routing"):
                    routing.CopyFrom(piece.routing)
        return routing

    async def is_busy(self, overrides: RoutingOverrides) -> bool:
        """Whether a request, which is not sent, would be refused since all ranks are busy."""
        routing = RoutingRequest(model=MODEL, token_ids=TokenIds(ids=[1]), overrides=overrides)
        try:
            await self.frontend.select_worker(
                FrontendServiceSelectWorkerRequest(request=routing), deadline=Deadline.after(5)
            )
        except AllBusy:
            return True
        return False

    async def until_ranks(self, count: int, *, idle: bool = False) -> None:
        """Returns when the Frontend has a session and so many ranks are candidates; ``idle`` ones have no booking."""
        asked = FrontendServiceGetPotentialLoadsRequest(
            request=RoutingRequest(model=MODEL, token_ids=TokenIds(ids=[1]))
        )
        async with asyncio.timeout(30):
            while True:
                with suppress(KvRouterError):
                    answer = await self.frontend.get_potential_loads(asked, deadline=Deadline.after(5))
                    is_busy = any(each.active_requests for each in answer.loads)
                    if self.frontend.ready() and len(answer.loads) == count and not (idle and is_busy):
                        return
                await asyncio.sleep(0.01)


@asynccontextmanager
async def gateway(
    workers: Sequence[str], *, apart: bool = False, worker_probe_seconds: float = 1.0, **options: Any
) -> AsyncIterator[Gateway]:
    """``apart`` puts a gRPC server between Frontend and Scheduler, and tells the Frontend its address."""
    listed: dict[str, Any] = {"static_workers": workers, "static_model": MODEL, "static_probe_seconds": 0.05}
    common = NOWHERE | listed | {"drain_seconds": 0.1, "http_bind": ""}
    port = free_port()
    async with AsyncExitStack() as stack:
        settings = SchedulerSettings(**common, **({"router_mode": "round-robin"} | options), bind=f"127.0.0.1:{port}")
        runtime = await stack.enter_async_context(open_runtime(settings))
        scheduler = await stack.enter_async_context(scheduler_app.running(settings, runtime))
        front = FrontendSettings(
            **common,
            port=0,
            static_schedulers=[f"127.0.0.1:{port}"] if apart else [],
            worker_probe_seconds=worker_probe_seconds,
        )
        schedulers: Any = LocalScheduler(cast(Scheduler, scheduler))
        if apart:
            await stack.enter_async_context(_hosting(runtime, scheduler, lambda: scheduler.ready))
            runtime = await stack.enter_async_context(open_runtime(front))
            schedulers = await stack.enter_async_context(aclosing(RemoteSchedulers(runtime.directory)))
        frontend = await stack.enter_async_context(frontend_app.running(front, runtime, schedulers))
        http = await stack.enter_async_context(frontend_app.serving_http(frontend, front, runtime))
        await until(frontend.ready)
        yield Gateway(frontend, http)


@asynccontextmanager
async def _hosting(runtime: Any, scheduler: object, ready: Callable[[], bool]) -> AsyncIterator[None]:
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(host(runtime, [Hosted("scheduler", scheduler, ready)], stopping))
        try:
            yield
        finally:
            stopping.set()


@pytest.mark.parametrize("apart", [False, True])
async def test_requests_go_round_the_listed_workers(apart: bool) -> None:
    async with worker(1) as one, worker(2) as two, gateway([one, two], apart=apart) as system:
        await system.until_ranks(2)
        chosen = Counter([(await system.run()).rank.worker_id for _ in range(6)])
        assert chosen == {1: 3, 2: 3}


@pytest.mark.parametrize("mode", ["random", "power-of-two", "direct"])
async def test_other_modes_need_no_etcd_either(mode: str) -> None:
    async with worker(1) as one, worker(2, dp_size=2) as two, gateway([one, two], router_mode=mode) as system:
        await system.until_ranks(3)
        routing = await system.run(request(constraints=RoutingConstraints(worker_id=2, dp_rank=1)))
        assert (routing.rank.worker_id, routing.rank.dp_rank) == (2, 1)


@pytest.mark.parametrize("options", [{"kv_events": False}, {"overlap_score_weight": 0}])
async def test_mode_kv_without_an_indexer(options: dict[str, Any]) -> None:
    async with worker(1) as one, worker(2) as two, gateway([one, two], router_mode="kv", **options) as system:
        await system.until_ranks(2)
        first = await system.run()
        await system.until_ranks(2, idle=True)
        second = await system.run()
        if not options.get("kv_events", True):
            # The second finds what the first left: 100 tokens are 6 full blocks.
            assert first.rank == second.rank
            assert second.predicted_overlap_blocks == 6


async def test_a_worker_that_is_away_is_left_out_until_it_answers() -> None:
    port = free_port()
    async with AsyncExitStack() as coming, worker(1) as one, gateway([one, f"127.0.0.1:{port}"]) as system:
        await system.until_ranks(1)
        assert {(await system.run()).rank.worker_id for _ in range(3)} == {1}
        await coming.enter_async_context(worker(2, port))
        await system.until_ranks(2)
        assert {(await system.run()).rank.worker_id for _ in range(4)} == {1, 2}
        await coming.aclose()
        await system.until_ranks(1)
        assert {(await system.run()).rank.worker_id for _ in range(3)} == {1}


async def test_thresholds_are_those_of_the_process() -> None:
    async with worker(1) as one, gateway([one]) as system, aiohttp.ClientSession(f"http://{system.http}") as http:
        await system.until_ranks(1)
        body = {"model": MODEL, "active_prefill_tokens_threshold": 0, "active_decode_blocks_threshold": 0.5}
        async with http.post("/busy_threshold", json=body) as answer:
            assert (answer.status, await answer.json()) == (200, body)
        async with http.get("/busy_threshold") as answer:
            assert await answer.json() == {"thresholds": [body]}
        async with http.post("/busy_threshold", json={"model": MODEL, "active_prefill_tokens_threshold": 9}) as answer:
            assert await answer.json() == body | {"active_prefill_tokens_threshold": 9}


async def test_what_workers_report_makes_them_busy() -> None:
    slow = {"clock_factor": 0.01}
    async with worker(1, **slow) as one, gateway([one]) as system, gateway([one]) as other:
        await system.until_ranks(1)
        await other.until_ranks(1)
        limits = RoutingOverrides(active_decode_blocks_threshold=0.0)
        async with asyncio.TaskGroup() as group:
            # The other gateway's request is no booking of this one: the worker alone tells of it.
            running = group.create_task(
                other.run(request(range(4000), stop_conditions=StopConditions(max_tokens=1000)))
            )
            async with asyncio.timeout(30):
                while not await system.is_busy(limits):
                    await asyncio.sleep(0.01)
            running.cancel()


async def test_a_listed_worker_that_stops_answering_is_left_by_requests_without_output() -> None:
    async with (
        worker(1) as one,
        HostileWorker(hangs).serving() as silent,
        # The list's own probes take longer to notice.
        gateway([one, silent.endpoint], worker_probe_seconds=0.5) as system,
    ):
        await system.until_ranks(2)
        silent.freeze()
        served = [(await system.run()).rank.worker_id for _ in range(4)]
        assert served == [1] * 4
        assert silent.calls > 0


def test_a_mode_that_asks_an_indexer_is_refused_at_start() -> None:
    listed: dict[str, Any] = {"static_workers": ["h:1"], "static_model": "m"}
    for wrong, words in (
        ({"router_mode": "kv"}, "mode kv queries an Indexer"),
        ({}, "mode forecast queries an Indexer"),
        ({"router_mode": "random", "replica_sync": True}, "leave --replica-sync out"),
    ):
        with pytest.raises(ValidationError, match=words):
            SchedulerSettings(**(listed | wrong))
