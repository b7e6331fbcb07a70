"""``/busy_threshold`` as the guide has it, and what clients see where every rank is busy."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from ....waiting import until
from ..gateway import MODEL, System

BOTH = {"active_decode_blocks_threshold": 0.85, "active_prefill_tokens_threshold": 1000}


async def posted(system: System, **fields: Any) -> dict[str, Any]:
    async with aiohttp.ClientSession() as http, http.post(f"http://{system.http}/busy_threshold", json=fields) as found:
        answer: dict[str, Any] = await found.json()
        return {"status": found.status} | answer


async def test_thresholds_are_set_one_by_one_read_and_listed(system: System) -> None:
    await system.start_worker(1)
    off = dict.fromkeys(BOTH)
    assert await posted(system, model=MODEL) == {"status": 200, "model": MODEL} | off
    decode = await posted(system, model=MODEL, active_decode_blocks_threshold=0.5)
    assert decode == {"status": 200, "model": MODEL} | off | {"active_decode_blocks_threshold": 0.5}
    assert await posted(system, model=MODEL, **BOTH) == {"status": 200, "model": MODEL} | BOTH
    again = await posted(system, model=MODEL, active_decode_blocks_threshold=1)
    assert again == {"status": 200, "model": MODEL} | BOTH | {"active_decode_blocks_threshold": 1.0}
    assert await posted(system, model=MODEL) == again
    async with aiohttp.ClientSession() as http, http.get(f"http://{system.http}/busy_threshold") as listed:
        found = BOTH | {"active_decode_blocks_threshold": 1.0}
        assert await listed.json() == {"thresholds": [{"model": MODEL} | found]}


async def test_null_removes_a_threshold_that_was_set(system: System) -> None:
    await system.start_worker(1)
    await posted(system, model=MODEL, **BOTH)
    cleared = await posted(system, model=MODEL, active_decode_blocks_threshold=None)
    assert cleared == {"status": 200, "model": MODEL} | BOTH | {"active_decode_blocks_threshold": None}
    both = await posted(system, model=MODEL, **dict.fromkeys(BOTH))
    assert both == {"status": 200, "model": MODEL} | dict.fromkeys(BOTH)
    async with aiohttp.ClientSession() as http, http.get(f"http://{system.http}/busy_threshold") as listed:
        assert await listed.json() == {"thresholds": []}


async def test_no_thresholds_are_listed_if_none_is_set(system: System) -> None:
    await system.start_worker(1)
    async with aiohttp.ClientSession() as http, http.get(f"http://{system.http}/busy_threshold") as listed:
        assert await listed.json() == {"thresholds": []}


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({}, 400, "model"),
        ({"model": MODEL, "active_decode_blocks_threshold": 1.5}, 400, "active_decode_blocks_threshold"),
        ({"model": MODEL, "active_decode_blocks_threshold": -0.1}, 400, "active_decode_blocks_threshold"),
        ({"model": MODEL, "active_prefill_tokens_threshold": -1}, 400, "active_prefill_tokens_threshold"),
        ({"model": MODEL, "active_prefill_tokens_threshold": 0.5}, 400, "active_prefill_tokens_threshold"),
        ({"model": MODEL, "active_prefill_tokens_threshold": 1 << 64}, 400, "active_prefill_tokens_threshold"),
        ({"model": MODEL, "threshold": 0.5}, 400, "threshold"),
    ],
)
async def test_a_wrong_body_is_refused_and_changes_nothing(
    system: System, fields: dict[str, Any], status: int, param: str
) -> None:
    await system.start_worker(1)
    answer = await posted(system, **fields)
    assert (answer["status"], answer["error"]["param"]) == (status, param)
    assert await posted(system, model=MODEL) == {"status": 200, "model": MODEL} | dict.fromkeys(BOTH)


async def test_all_busy_is_429_with_retry_after_until_one_is_free(system: System) -> None:
    worker = await system.start_worker(1, clock_factor=0.01)
    await posted(system, model=MODEL, active_decode_blocks_threshold=0.0)
    body = {"model": MODEL, "prompt": list(range(40)), "max_tokens": 5}
    async with aiohttp.ClientSession(f"http://{system.http}") as http:
        running = asyncio.create_task(http.post("/v1/completions", json=body | {"max_tokens": 1000}).__aenter__())
        await until(lambda: worker.stats().requests == 1)
        async with http.post("/v1/completions", json=body) as refused:
            assert refused.status == 429
            assert int(refused.headers["Retry-After"]) >= 1
            assert (await refused.json())["error"]["code"] == "rate_limit_exceeded"
        running.cancel()
        await asyncio.wait([running])
        await system.until_idle()

        async def accepted() -> bool:
            async with http.post("/v1/completions", json=body) as answer:
                return answer.status == 200

        async with asyncio.timeout(30):
            while not await accepted():
                await asyncio.sleep(0.1)
