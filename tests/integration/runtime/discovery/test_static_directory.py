"""What becomes of workers and Schedulers that are listed by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import pytest
import structlog
from aiohttp import web
from kvrouter.devtools.system.ports import free_port
from kvrouter.mocker.settings import MockerSettings
from kvrouter.mocker.standalone import serving_alone
from kvrouter.runtime.config.static_workers import StaticComponent, StaticEndpoints
from kvrouter.runtime.contracts import Scheduler, Worker
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery import static_directory
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.runtime.discovery.static_directory import StaticDiscovery
from kvrouter.runtime.rpc import RpcServer
from kvrouter.runtime.telemetry.metrics import new_registry
from kvrouter.v1 import scheduler_pb2, worker_pb2
from kvrouter.v1.errors import Unimplemented
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import WorkerRegistration
from kvrouter.v1.worker_pb2 import GetLoadRequest, GetLoadResponse

from ....hostile_worker import HostileWorker, hangs

POOL = ComponentName("ns", "workers")
SILENT = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def slow_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What answers in these tests does so in time, however busy the machine is."""
    monkeypatch.setattr(static_directory, "_PROBE_SECONDS", 30.0)


@asynccontextmanager
async def mocker(worker_id: int, **settings: Any) -> AsyncIterator[str]:
    known = MockerSettings(**({"worker_id": worker_id, "drain_seconds": 5, "model": "m"} | settings))
    async with serving_alone(known, new_registry()) as endpoint:
        yield endpoint


@asynccontextmanager
async def openai_server(status: int = 200, body: str = '{"data": [{"id": "m"}]}', port: int = 0) -> AsyncIterator[str]:
    async def models(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def discovery(
    *workers: dict[str, Any], schedulers: tuple[str, ...] = (), **fields: Any
) -> AsyncIterator[Directory]:
    component = StaticComponent.model_validate({"model": "m", "workers": workers, **fields})
    registry = new_registry()
    source = StaticDiscovery(StaticEndpoints([component], schedulers, probe_seconds=0.02), "ns", registry)
    directory = Directory("nowhere:1", "ns", registry, source=source.changes)
    async with asyncio.TaskGroup() as group:
        following = group.create_task(directory.run())
        try:
            async with asyncio.timeout(30):
                await directory.synced()
            assert registry.get_sample_value("kvrouter_directory_listed_workers") == len(workers)
            yield directory
        finally:
            following.cancel()


def registered(directory: Directory) -> dict[int, WorkerRegistration]:
    return dict(directory.components[POOL].workers)


async def until(directory: Directory, accept: Callable[[Directory], bool]) -> None:
    async with asyncio.timeout(30):
        await directory.wait_for(accept)


async def test_a_worker_tells_its_id_its_ranks_and_its_blocks() -> None:
    async with mocker(7, dp_size=2, num_blocks=300) as one, discovery({"endpoint": one}) as directory:
        found = registered(directory)[7]
        assert [(rank.dp_rank, rank.total_blocks) for rank in found.ranks] == [(0, 300), (1, 300)]
        assert all(rank.incarnation for rank in found.ranks)
        assert (found.endpoint, found.model, found.draining) == (one, "m", False)


async def test_a_worker_tells_whether_it_serves_call_streams() -> None:
    async with (
        mocker(7) as one,
        HostileWorker(hangs).serving() as plain,
        discovery({"endpoint": one}, {"endpoint": plain.endpoint, "worker_id": 8}) as directory,
    ):
        await until(directory, lambda seen: len(registered(seen)) == 2)
        assert {key: found.serves_call_stream for key, found in registered(directory).items()} == {7: True, 8: False}


async def test_the_list_overrides_the_report_of_a_worker() -> None:
    listed = {"worker_id": 9, "ranks": 1, "total_blocks": 50, "labels": {"zone": "b"}, "lora_names": ["l"]}
    async with (
        mocker(7, dp_size=2, block_size=64) as one,
        discovery({"endpoint": one, **listed}, block_size=64) as directory,
    ):
        found = registered(directory)[9]
        assert [(rank.dp_rank, rank.total_blocks) for rank in found.ranks] == [(0, 50)]
        assert (dict(found.labels), list(found.lora_names), found.block_size) == ({"zone": "b"}, ["l"], 64)


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"block_size": 32}, "expected block_size 16, the worker has 32"),
        ({"model": "other"}, "expected model 'm', the worker has 'other'"),
    ],
)
async def test_a_worker_that_differs_from_the_list_is_left_out(settings: dict[str, Any], cause: str) -> None:
    with structlog.testing.capture_logs() as logs:
        async with (
            mocker(7, **settings) as one,
            mocker(8) as two,
            discovery({"endpoint": one}, {"endpoint": two}) as directory,
        ):
            assert list(registered(directory)) == [8]
    assert [line["cause"] for line in logs if line["event"] == "static_worker.mismatched"] == [cause]


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, '{"data": [{"id": "m"}, {"id": "n"}]}'), (401, "no key"), (404, ""), (200, "no JSON")],
)
async def test_a_server_that_has_only_an_openai_api_is_taken(status: int, body: str) -> None:
    listed = {"ranks": 1, "total_blocks": 50}
    async with openai_server(status, body) as url, discovery({"endpoint": f"{url}/v1/", **listed}) as directory:
        found = registered(directory)[1]
        assert (found.endpoint, found.openai_endpoint, found.model) == (url, url, "m")
        assert [(rank.dp_rank, rank.total_blocks) for rank in found.ranks] == [(0, 50)]


async def test_a_server_without_models_is_doubted_and_a_silent_worker_may_lack_its_scheme() -> None:
    with structlog.testing.capture_logs() as logs:
        async with openai_server(404, "") as url, discovery({"endpoint": url}) as directory:
            assert 1 in registered(directory)
        async with openai_server() as url, discovery({"endpoint": url.removeprefix("http://")}) as directory:
            assert registered(directory) == {}
        async with discovery({"endpoint": f"http://127.0.0.1:{free_port()}"}) as directory:
            assert registered(directory) == {}
    doubts = [line["cause"] for line in logs if line["event"] == "static_worker.doubtful"]
    assert doubts == ["it answers 404 to GET /v1/models"]
    grpc, http = [line for line in logs if line["event"] == "static_worker.silent"]
    assert grpc["cause"].endswith("it is asked over gRPC: add http:// if it is a server with an OpenAI API")
    assert http["cause"] == f"it cannot be reached: connection refused at {http['endpoint'].removeprefix('http://')}"


async def test_an_openai_server_of_another_model_is_left_out() -> None:
    with structlog.testing.capture_logs() as logs:
        async with openai_server(body='{"data": [{"id": "n"}]}') as url, discovery({"endpoint": url}) as directory:
            assert registered(directory) == {}
    causes = [line["cause"] for line in logs if line["event"] == "static_worker.mismatched"]
    assert causes == ["expected model 'm', the server has 'n'"]


async def test_an_openai_server_is_left_out_while_it_does_not_answer() -> None:
    async with AsyncExitStack() as first:
        url = await first.enter_async_context(openai_server())
        async with discovery({"endpoint": url}) as directory:
            assert list(registered(directory)) == [1]
            await first.aclose()
            await until(directory, lambda seen: not registered(seen))
            port = int(url.rpartition(":")[2])
            async with openai_server(status=503, port=port), openai_server():
                assert registered(directory) == {}
            async with openai_server(port=port):
                await until(directory, lambda seen: 1 in registered(seen))


async def test_a_worker_that_was_replaced_by_a_fitting_one_is_taken() -> None:
    async with AsyncExitStack() as worker:
        endpoint = await worker.enter_async_context(mocker(7, block_size=32))
        async with discovery({"endpoint": endpoint}) as directory:
            assert registered(directory) == {}
            await worker.aclose()
            async with mocker(7, bind=endpoint):
                await until(directory, lambda seen: 7 in registered(seen))


async def test_a_worker_whose_id_another_has_is_left_out() -> None:
    async with mocker(7) as one, mocker(7) as two, discovery({"endpoint": one}, {"endpoint": two}) as directory:
        assert {key: worker.endpoint for key, worker in registered(directory).items()} == {7: one}


async def test_a_component_is_there_before_its_workers() -> None:
    async with discovery({"endpoint": SILENT}) as directory:
        assert registered(directory) == {}
        assert directory.components[POOL].descriptor.model == "m"


async def test_a_worker_that_stops_is_draining_and_then_gone() -> None:
    async with AsyncExitStack() as worker:
        endpoint = await worker.enter_async_context(mocker(7))
        async with discovery({"endpoint": endpoint}) as directory:
            assert 7 in registered(directory)
            await worker.aclose()
            await until(directory, lambda seen: not registered(seen))


class Mute:
    """A worker that does not tell its load."""

    async def get_load(self, request: GetLoadRequest, *, deadline: Deadline) -> GetLoadResponse:
        raise Unimplemented("GetLoad")


@asynccontextmanager
async def serving(descriptor: Any, service: object) -> AsyncIterator[RpcServer]:
    server = RpcServer("127.0.0.1:0")
    server.add_service(descriptor, service)
    await server.start()
    try:
        yield server
    finally:
        await server.drain(0)


async def test_an_engine_that_tells_nothing_has_one_rank_and_its_place_for_an_id() -> None:
    descriptor = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
    async with serving(descriptor, cast(Worker, Mute())) as server:
        server.health.set_ready(descriptor.full_name, True)
        async with discovery({"endpoint": SILENT}, {"endpoint": server.endpoint()}) as directory:
            found = registered(directory)
            assert list(found) == [2]
            assert [(rank.dp_rank, rank.total_blocks) for rank in found[2].ranks] == [(0, 0)]
            server.health.set_ready(descriptor.full_name, False)
            await until(directory, lambda seen: registered(seen)[2].draining)
            server.health.set_ready(descriptor.full_name, True)
            await until(directory, lambda seen: not registered(seen)[2].draining)


@pytest.mark.parametrize("ready", [True, False])
async def test_a_listed_scheduler_is_ready_when_it_says_so(ready: bool) -> None:
    descriptor = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
    async with serving(descriptor, cast(Scheduler, object())) as server:
        server.health.set_ready(descriptor.full_name, ready)
        async with discovery({"endpoint": SILENT}, schedulers=(server.endpoint(), SILENT)) as directory:
            found = directory.services("scheduler")
            assert {key: each.ready for key, each in found.items()} == {server.endpoint(): ready, SILENT: False}
