"""A Frontend process with few file descriptors, and far more HTTP clients that send half a request."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Any

import aiohttp
import grpc.aio
import pytest
from kvrouter.devtools.system.ports import free_port
from kvrouter.v1.frontend_pb2 import ListModelsRequest

pytestmark = pytest.mark.timeout(120)

DESCRIPTORS, CLIENTS = 600, 1_500


@contextmanager
def frontend(descriptors: int) -> Iterator[tuple[str, int]]:
    """The gRPC address and the HTTP port of a Frontend, which finds neither Schedulers nor workers."""
    address, http = f"127.0.0.1:{free_port()}", free_port()
    listed = ["--static-workers", "127.0.0.1:1", "--static-model", "m", "--static-schedulers", "127.0.0.1:1"]
    where = ["--bind", address, "--port", str(http), "--http-bind", "", "--http-header-seconds", "60"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvrouter.frontend", *where, *listed],
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors)),
    )
    try:
        yield address, http
    finally:
        process.kill()
        process.wait()


async def half_open(stack: AsyncExitStack, port: int) -> None:
    with suppress(ConnectionError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        stack.callback(writer.close)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")


async def test_half_requests_leave_room_for_others() -> None:
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < 2 * CLIENTS:
        pytest.skip(f"the system allows {most} open files, and the clients need {2 * CLIENTS}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * CLIENTS), most))
    with frontend(DESCRIPTORS) as (address, port):
        async with AsyncExitStack() as stack, asyncio.timeout(90):
            await served_beside_half_requests(stack, address, port)


async def served_beside_half_requests(stack: AsyncExitStack, address: str, port: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
    for _ in range(CLIENTS // 100):
        await asyncio.gather(*(half_open(stack, port) for _ in range(100)))
    async with grpc.aio.insecure_channel(address) as channel:
        models: Any = channel.unary_unary("/kvrouter.v1.FrontendService/ListModels")
        await models(ListModelsRequest().SerializeToString(), timeout=30)
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as response:
        assert response.status == 200
        text = await response.text()
    assert 'kvrouter_frontend_http_connections_closed_total{reason="replaced"}' in text
