"""Peers that have no credential take no memory, and no room from those that have one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvrouter.runtime.rpc import Metadata, RpcServer, open_channel
from kvrouter.v1.errors import Unauthenticated
from kvrouter.v1.worker_pb2 import AbortRequest, AbortResponse

from ....hostile_peer import OPEN_STREAM, HostilePeer, hostile_peer, message_head
from ....waiting import until
from .rpc_harness import WORKER, Worker

KEY = ("authorization", "Bearer key")
ABORT = f"/{WORKER.full_name}/Abort"
WATCH, CHECK = "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


class KeyGuard:
    def check(self, method: str, metadata: Metadata) -> None:
        assert method.startswith(f"/{WORKER.full_name}/")
        if KEY not in metadata:
            raise Unauthenticated("expected a key")

    def admit(self, method: str, metadata: Metadata, size: int) -> AbstractContextManager[None]:
        assert size >= 0
        self.check(method, metadata)
        return nullcontext()


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    server = RpcServer("127.0.0.1:0")
    server.grpc.gate.max_calls = 8
    server.add_service(WORKER, Worker(), guard=KeyGuard())
    await server.start()
    yield server
    await server.drain(0)


async def abort(server: RpcServer, *metadata: tuple[str, str]) -> AbortResponse:
    async with open_channel(server.endpoint()) as channel:
        call: Any = channel.unary_unary(ABORT, AbortRequest.SerializeToString, AbortResponse.FromString)
        return await call(AbortRequest(request_ids=["a"]), metadata=metadata, timeout=30)  # type: ignore[no-any-return]


async def refused(peer: HostilePeer, path: str, count: int, first: bytes = b"") -> None:
    """Opens streams one by one, each once the one before has ended."""
    for _ in range(count):
        stream = peer.open(path)
        if first:
            peer.data(stream, first)
        await until(lambda: stream in peer.ended)  # noqa: B023 - waited for here


@pytest.mark.parametrize("first", [b"", message_head(60 << 20) + b"x" * 10_000], ids=["nothing", "a part of 60 MiB"])
@pytest.mark.parametrize("path", [OPEN_STREAM, ABORT])
async def test_a_call_is_refused_before_its_request_is_read(server: RpcServer, path: str, first: bytes) -> None:
    async with hostile_peer(server.endpoint()) as peer:
        await refused(peer, path, 5, first)
        assert server.grpc.gate.calls == 0
        assert server.grpc.call_streams.counts.streams == 0
        assert (await abort(server, KEY)).aborted == 1


async def test_streams_that_wait_for_a_credential_fill_no_limit(server: RpcServer) -> None:
    async with hostile_peer(server.endpoint()) as peer:
        streams = [peer.open(OPEN_STREAM) for _ in range(7)]
        await until(lambda: len(peer.ended) == len(streams))
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await abort(server)
    assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_what_is_for_everybody_has_a_bound_of_its_own(server: RpcServer) -> None:
    server.grpc.gate.for_everybody.limit = 4
    async with hostile_peer(server.endpoint()) as peer:
        watching = [peer.open(WATCH) for _ in range(6)]
        for stream in watching:
            peer.data(stream, message_head(0))
        for _ in range(6):
            peer.open(REFLECTION)
        await until(lambda: len(peer.ended) == 8)
        assert len(server.grpc.gate.for_everybody) == 4
        assert server.grpc.gate.for_everybody.evicted == 8
        assert server.grpc.gate.calls == 0
        assert (await abort(server, KEY)).aborted == 1


async def test_a_watch_that_is_not_read_delays_no_readiness(server: RpcServer) -> None:
    async with hostile_peer(server.endpoint(), window=0) as blocked, open_channel(server.endpoint()) as channel:
        blocked.data(blocked.open(WATCH), message_head(0))
        await until(lambda: len(server.grpc.gate.for_everybody) == 1)
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        server.health.set_ready(WORKER.full_name)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        server.health.drain()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_garbage_for_everybody_is_answered_without_a_traceback(
    server: RpcServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_channel(server.endpoint()) as channel:
        for path in (CHECK, WATCH):
            call: Any = channel.unary_unary(path)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call(b"\xff\xff\xff")
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        talk: Any = channel.stream_stream(REFLECTION)()
        await talk.write(b"\xff\xff\xff")
        assert await talk.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not caplog.records
