"""What tests ask of a simulated server beside what an engine serves."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from .engine_server import Client
from .test_vllm_server import serving

BODY = {"prompt": [1, 2, 3], "max_tokens": 1}


async def test_a_server_lists_what_it_received() -> None:
    async with serving() as client:
        await client.post("/v1/completions", BODY, X_data_parallel_rank="1")
        _, (received,) = await client.get("/mock/requests")
        assert (received["path"], received["body"]) == ("/v1/completions", BODY)
        assert received["headers"]["x-data-parallel-rank"] == "1"


async def test_requested_faults_happen_once() -> None:
    async with serving() as client:
        await client.post("/mock/faults", {"error_body": 1, "server_error": 1})
        status, body = await client.post("/v1/completions", BODY)
        assert (status, "error" in body) == (200, True)
        assert (await client.post("/v1/completions", BODY))[0] == 500
        status, body = await client.post("/v1/completions", BODY)
        assert (status, "error" in body) == (200, False)
        assert (await client.post("/mock/faults", {"fire": 1}))[0] == 400


async def test_a_silent_server_serves_others() -> None:
    async with serving() as client:
        await client.post("/mock/faults", {"silence": 1})
        silent = asyncio.create_task(client.post("/v1/completions", BODY))
        await _received(client, 1)
        assert (await client.post("/v1/completions", BODY))[0] == 200
        silent.cancel()
        with pytest.raises((asyncio.CancelledError, aiohttp.ClientError)):
            await silent


async def _received(client: Client, count: int) -> None:
    async with asyncio.timeout(10):
        while len((await client.get("/mock/requests"))[1]) < count:
            await asyncio.sleep(0.01)
