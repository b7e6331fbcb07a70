"""Tools read a server's services by either version of gRPC reflection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse
from kvrouter.net.rpc.call_gate import CallGate
from kvrouter.net.rpc.loop_server import LoopServer
from kvrouter.net.rpc.server import add_reflection
from kvrouter.v1 import worker_pb2

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
VERSIONS = ["v1", "v1alpha"]


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    server = LoopServer(CallGate())
    add_reflection(server, [SERVICE])
    port = await server.start("127.0.0.1:0")
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0.0)


async def answer(version: str, request: ServerReflectionRequest) -> ServerReflectionResponse:
    async with serving() as address, grpc.aio.insecure_channel(address) as channel:
        # The messages of both versions are the same on the wire.
        info: Any = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=ServerReflectionRequest.SerializeToString,
            response_deserializer=ServerReflectionResponse.FromString,
        )
        (response,) = [response async for response in info(iter([request]), timeout=30)]
        return response


@pytest.mark.parametrize("version", VERSIONS)
async def test_services_are_listed(version: str) -> None:
    response = await answer(version, ServerReflectionRequest(list_services=""))
    names = [service.name for service in response.list_services_response.service]
    assert names == ["grpc.reflection.v1alpha.ServerReflection", SERVICE]


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_service_is_described_with_every_file_that_it_needs(version: str) -> None:
    response = await answer(version, ServerReflectionRequest(file_containing_symbol=SERVICE))
    files = {
        file.name: file
        for file in map(FileDescriptorProto.FromString, response.file_descriptor_response.file_descriptor_proto)
    }
    assert {"kvrouter/v1/worker.proto", "kvrouter/v1/common.proto", "kvrouter/v1/events.proto"} <= set(files)
    assert "WorkerService" in {service.name for service in files["kvrouter/v1/worker.proto"].service}


@pytest.mark.parametrize("version", VERSIONS)
async def test_an_unknown_symbol_is_not_found(version: str) -> None:
    response = await answer(version, ServerReflectionRequest(file_containing_symbol="kvrouter.v1.Nothing"))
    assert response.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
