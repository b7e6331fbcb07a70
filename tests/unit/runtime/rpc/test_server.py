"""What the gRPC server refuses and bounds, how it drains, and what it says of itself."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from kvrouter.net.rpc.loop_server import BindFailed
from kvrouter.runtime.rpc import RpcServer, open_channel, remote
from kvrouter.v1 import errors, worker_pb2
from kvrouter.v1.error_encoding import from_rpc_error
from kvrouter.v1.indexer_pb2 import FindMatchesRequest
from kvrouter.v1.worker_pb2 import AbortRequest

from .rpc_harness import INDEXER, WORKER, Worker, serving, soon, until_idle


async def test_methods_that_the_object_lacks_are_unimplemented() -> None:
    async with serving(WORKER, Worker()) as (_, channel):
        stub = remote(WORKER, channel)
        with pytest.raises(errors.Unimplemented):
            await stub.get_load(worker_pb2.GetLoadRequest(), deadline=soon())
        with pytest.raises(errors.Unimplemented):
            await remote(INDEXER, channel).find_matches(FindMatchesRequest(), deadline=soon())
        with pytest.raises(AttributeError):
            _ = stub.no_such_method


async def test_a_malformed_request_is_refused_and_harms_nothing() -> None:
    async with serving(WORKER, Worker()) as (_, channel):
        unary: Any = channel.unary_unary("/kvrouter.v1.WorkerService/Abort")
        stream: Any = channel.unary_stream("/kvrouter.v1.WorkerService/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await unary(b"\xff\xff\xff")
        assert isinstance(from_rpc_error(refused.value), errors.BadRequest)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stream(b"\xff\xff\xff"):
                pass
        assert isinstance(from_rpc_error(refused.value), errors.BadRequest)
        answer = await remote(WORKER, channel).abort(AbortRequest(request_ids=["a"]), deadline=soon())
        assert answer.aborted == 1


async def test_a_hundred_megabytes_are_refused_and_harm_nothing() -> None:
    async with serving(WORKER, Worker()) as (server, channel):
        with pytest.raises(errors.TooLarge) as caught:
            await remote(WORKER, channel).abort(AbortRequest(request_ids=["x" * 100_000_000]), deadline=soon())
        assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        answer = await remote(WORKER, channel).abort(AbortRequest(request_ids=["a"]), deadline=soon())
        assert answer.aborted == 1
        await until_idle(server)


async def test_calls_beyond_the_bound_are_refused_at_once() -> None:
    worker = Worker()
    async with serving(WORKER, worker) as (server, channel):
        server.grpc.gate.max_calls = 1
        stub = remote(WORKER, channel)
        held = asyncio.ensure_future(stub.abort(AbortRequest(), deadline=soon()))
        await worker.entered.wait()
        with pytest.raises(errors.TooLarge):
            await stub.abort(AbortRequest(request_ids=["a"]), deadline=soon())
        worker.go_on.set()
        await held


async def test_draining_finishes_calls_under_way_and_refuses_new_ones() -> None:
    worker = Worker()
    async with serving(WORKER, worker) as (server, channel):
        server.health.set_ready(WORKER.full_name)
        stub = remote(WORKER, channel)
        unary = asyncio.ensure_future(stub.abort(AbortRequest(), deadline=soon()))
        await worker.entered.wait()
        drained = asyncio.ensure_future(server.drain(10))
        while server.health.ready:
            await asyncio.sleep(0)
        with pytest.raises(errors.Draining) as refused:
            await stub.abort(AbortRequest(request_ids=["a"]), deadline=soon())
        assert refused.value.info.retry_elsewhere
        assert not drained.done()
        worker.go_on.set()
        assert (await unary).aborted == 0
        await drained
        with pytest.raises(errors.DependencyAway):
            await stub.abort(AbortRequest(request_ids=["a"]), deadline=soon())


async def test_draining_cuts_off_calls_that_take_too_long() -> None:
    worker = Worker()
    async with serving(WORKER, worker) as (server, channel):
        call = asyncio.ensure_future(remote(WORKER, channel).abort(AbortRequest(), deadline=soon()))
        await worker.entered.wait()
        await server.drain(0)
        with pytest.raises(errors.KvRouterError):
            await call
        await worker.closed.wait()


async def test_two_servers_do_not_share_a_port() -> None:
    async with serving(WORKER, Worker()) as (server, _):
        second = RpcServer(server.endpoint())
        with pytest.raises(BindFailed, match="cannot listen on"):
            await second.start()


async def test_health_follows_each_service_and_all_of_them() -> None:
    server = RpcServer("127.0.0.1:0")
    server.add_service(WORKER, Worker())
    server.add_service(INDEXER, object())
    await server.start()
    serving_status = health_pb2.HealthCheckResponse.ServingStatus
    async with open_channel(server.endpoint()) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def status(name: str) -> str:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            return str(serving_status.Name(answer.status))

        assert await status(WORKER.full_name) == "NOT_SERVING"
        server.health.set_ready(WORKER.full_name)
        assert await status(WORKER.full_name) == "SERVING"
        assert await status("") == "NOT_SERVING"
        server.health.set_ready(INDEXER.full_name)
        assert await status("") == "SERVING"
        server.health.set_ready(INDEXER.full_name, False)
        assert await status("") == "NOT_SERVING"
        assert not server.health.ready
    await server.drain(0)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_services_by_their_full_names(version: str) -> None:
    async with serving(WORKER, Worker()) as (_, channel):
        info: Any = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in info(iter([request])):
            names = {service.name for service in answer.list_services_response.service}
            assert {"kvrouter.v1.WorkerService", "grpc.health.v1.Health"} <= names
            return
    raise AssertionError("reflection did not answer")


async def test_an_endpoint_can_be_advertised_under_another_name() -> None:
    async with serving(WORKER, Worker()) as (server, _):
        assert server.endpoint() == f"127.0.0.1:{server.port}"
        assert server.endpoint("node-7") == f"node-7:{server.port}"
        assert server.endpoint("node-7:9000") == "node-7:9000"
        assert server.endpoint("[::1]") == f"[::1]:{server.port}"
        assert server.endpoint("[::1]:9000") == "[::1]:9000"


async def test_a_slow_name_server_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[threading.Thread] = []

    def name() -> str:
        asked.append(threading.current_thread())
        return "node-7"

    monkeypatch.setattr(socket, "getfqdn", name)
    server = RpcServer("0.0.0.0:0")
    await server.start()
    assert server.endpoint() == f"node-7:{server.port}"
    assert asked
    assert threading.current_thread() not in asked
    await server.drain(0)
