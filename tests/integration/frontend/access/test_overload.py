"""Overload: what is refused, and who is still served."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvrouter.frontend.access.key_file import TenantEntry

from ..gateway import MODEL, running_system
from .keys import Keys

ROOM = 8


def body(number: int, tokens: int = 4) -> dict[str, object]:
    return {"model": MODEL, "prompt": [number] * 20, "max_tokens": tokens}


async def test_beyond_the_bound_requests_are_refused_and_the_others_complete(
    nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    async with (
        running_system(nats_url, etcd_endpoint, namespace, max_requests_in_flight=ROOM) as system,
        aiohttp.ClientSession(f"http://{system.http}") as http,
    ):
        await system.start_worker(1, clock_factor=1.0)

        async def complete(number: int) -> int:
            async with http.post("/v1/completions", json=body(number, tokens=40)) as response:
                if response.status == 429:
                    assert response.headers["Retry-After"] == "1"
                    assert (await response.json())["error"]["type"] == "rate_limit_error"
                return response.status

        statuses = Counter(await asyncio.gather(*(complete(number) for number in range(4 * ROOM))))
        assert statuses[200] >= ROOM
        assert statuses[200] + statuses[429] == 4 * ROOM
        refused = system.runtime.registry.get_sample_value(
            "kvrouter_frontend_overload_refusals_total", {"bound": "requests"}
        )
        assert refused == statuses[429] > 0
        # Nothing of the refused requests is left behind.
        await system.until_idle()
        assert [await complete(number) for number in range(3)] == [200] * 3


@pytest.mark.full
async def test_a_flooding_tenant_does_not_starve_another(
    nats_url: str, etcd_endpoint: str, namespace: str, tmp_path: Path
) -> None:
    keys = Keys(tmp_path / "keys.json")
    flooding, other = keys.add("flood", tenant="flood"), keys.add("other", tenant="other")
    keys.tenants = [TenantEntry(name="flood"), TenantEntry(name="other")]
    keys.write()
    options: dict[str, Any] = {**keys.options(), "max_requests_in_flight": ROOM}
    async with (
        running_system(nats_url, etcd_endpoint, namespace, **options) as system,
        aiohttp.ClientSession(f"http://{system.http}", connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        await system.start_worker(1)
        done = asyncio.Event()
        served: Counter[str] = Counter()

        async def send(key: str, number: int) -> int:
            headers = {"authorization": f"Bearer {key}"}
            async with http.post("/v1/completions", json=body(number, tokens=20), headers=headers) as response:
                await response.read()
                return response.status

        async def flood(number: int) -> None:
            while not done.is_set():
                served["flood"] += await send(flooding, number) == 200

        async def work(number: int) -> None:
            while served["other"] < 20:
                served["other"] += await send(other, number) == 200

        floods = [asyncio.create_task(flood(number)) for number in range(4 * ROOM)]
        async with asyncio.timeout(60):
            await asyncio.gather(*(work(1000 + number) for number in range(ROOM // 2)))
        done.set()
        await asyncio.gather(*floods)
        assert served["flood"] > 0
