"""Limits of callers hold before a body is read, and what was sent to a worker is charged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import grpc.aio
import pytest
from kvrouter.v1 import frontend_pb2_grpc
from kvrouter.v1.error_encoding import from_rpc_error
from kvrouter.v1.errors_pb2 import ErrorReason

from ..gateway import MODEL, System, request, running_system
from .keys import Keys

PROMPT = list(range(400))


@pytest.fixture
def keys(tmp_path: Any) -> Keys:
    made = Keys(tmp_path / "keys.json")
    made.add("one", requests_per_second=0.001)
    made.add("tokens", tokens_per_minute=600)
    made.add("single", concurrency=1)
    made.write()
    return made


@pytest.fixture
async def guarded(nats_url: str, etcd_endpoint: str, namespace: str, keys: Keys) -> AsyncIterator[System]:
    """A system with one worker that computes its first token only after minutes."""
    async with running_system(nats_url, etcd_endpoint, namespace, api_keys=str(keys.path)) as system:
        await system.start_worker(1, clock_factor=0.001)
        yield system


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def status_before_the_body(system: System, key: str, path: str, size: int) -> int:
    """Sends the headers of a request whose body never comes; returns the status of the response."""
    host, port = system.http.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {size}\r\n\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(30):
        status = int((await reader.readline()).split()[1])
    writer.close()
    return status


async def until_booked(system: System, requests: int) -> None:
    async with asyncio.timeout(30):
        while await system.booked() != [requests]:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_request_beyond_a_limit_is_refused_before_its_body(guarded: System, keys: Keys, path: str) -> None:
    url = f"http://{guarded.http}{path}"
    async with (
        aiohttp.ClientSession(headers=bearer(keys["one"])) as http,
        http.post(url, data=b"{}") as response,
    ):
        assert response.status == 400
    assert await status_before_the_body(guarded, keys["one"], path, 1000) == 429


async def test_a_body_counts_as_tokens_before_it_is_read(guarded: System, keys: Keys) -> None:
    waiting = {
        asyncio.create_task(status_before_the_body(guarded, keys["tokens"], "/v1/completions", 1200)) for _ in range(3)
    }
    # Each counts as 300 tokens of 600.
    done, waiting = await asyncio.wait(waiting, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result() for task in done] == [429]
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


async def test_a_prompt_whose_client_leaves_before_the_first_token_is_charged(guarded: System, keys: Keys) -> None:
    async with aiohttp.ClientSession(f"http://{guarded.http}", headers=bearer(keys["tokens"])) as http:

        async def complete(prompt: list[int]) -> int:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
            async with http.post("/v1/completions", json=body) as response:
                return response.status

        left = asyncio.create_task(complete(PROMPT))
        await until_booked(guarded, 1)
        left.cancel()
        await asyncio.wait([left])
        await guarded.until_idle()
        assert await complete(PROMPT) == 429


async def test_a_prompt_that_no_worker_got_is_not_charged(guarded: System, keys: Keys) -> None:
    guarded.wait_for_no_restart()
    await guarded.stop_worker(1)
    async with grpc.aio.insecure_channel(guarded.target) as channel:
        stub: Any = frontend_pb2_grpc.FrontendServiceStub(channel)  # type: ignore[no-untyped-call]
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                async for _response in stub.Generate(request(PROMPT), metadata=list(bearer(keys["tokens"]).items())):
                    pass
            assert from_rpc_error(failed.value).info.reason != ErrorReason.ERROR_REASON_RATE_LIMITED


async def test_a_grpc_call_beyond_a_limit_is_refused_before_it_is_parsed(guarded: System, keys: Keys) -> None:
    async with grpc.aio.insecure_channel(guarded.target) as channel:
        generate = channel.unary_stream("/kvrouter.v1.FrontendService/Generate")
        codes = []
        for _ in range(2):
            call = generate(b"\xff\xff\xff", metadata=tuple(bearer(keys["one"]).items()))
            codes.append((await call.code()).name)
        assert codes == ["INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"]
