"""Engines that are short of slots, in separate processes: what waits, where, and who goes first."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import aiohttp
import pytest
from kvrouter.devtools.system.stack import StackOptions, running_stack
from kvrouter.frontend.access.key_file import TenantEntry
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import scheduler_pb2
from kvrouter.v1.scheduler_pb2 import ComponentStatus, GetStatusRequest

from .keys import Keys

SLOTS, FLOOD, QUIET = 8, 64, 6


@pytest.mark.full
async def test_a_quiet_tenant_overtakes_a_flood_that_waits_for_slots(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    tenants = {name: keys.add(name, tenant=name) for name in ("flood", "quiet")}
    keys.tenants = [TenantEntry(name=name) for name in tenants]
    keys.write()
    options = StackOptions(
        tmp_path,
        tmp_path,
        workers=1,
        sequences=SLOTS,
        frontend_options=("--api-keys", str(keys.path)),
        api_key=tenants["quiet"],
    )
    started = {"flood": 0, "quiet": 0}
    async with (
        running_stack(options) as stack,
        open_channel(stack.scheduler, role="scheduler") as channel,
        aiohttp.ClientSession(f"http://{stack.http}", connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        scheduler = cast("Scheduler", remote(scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"], channel))

        async def status() -> ComponentStatus:
            answer = await scheduler.get_status(GetStatusRequest(), deadline=Deadline.after(30))
            return answer.components[0]

        async def send(tenant: str, number: int) -> None:
            body = {
                "model": options.model,
                "prompt": [number % 1000] * 40,
                "max_tokens": 20 + number % 17,
                "stream": True,
            }
            headers = {"authorization": f"Bearer {tenants[tenant]}"}
            async with http.post("/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200
                await response.content.readany()
                started[tenant] += 1
                await response.read()

        async def repeat(client: int) -> None:
            number = client
            while True:
                await send("flood", number)
                number += FLOOD

        flood = [asyncio.create_task(repeat(client)) for client in range(FLOOD)]
        async with asyncio.timeout(60):
            while started["flood"] < 2 * SLOTS or not (await status()).queued.requests:
                await asyncio.sleep(0.01)
        overtaken = []
        async with asyncio.timeout(60):
            for number in range(QUIET):
                waiting, before = (await status()).queued.requests, started["flood"]
                await send("quiet", 10_000 + number)
                assert waiting > FLOOD // 2, "the flood waits at the Scheduler, not in the engine"
                overtaken.append(waiting - (started["flood"] - before))
                found = await status()
                assert found.ranks[0].active_requests <= 2 * SLOTS
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
    assert started["quiet"] == QUIET
    # Each of them began before most requests that had waited for longer.
    assert sum(each > 0 for each in overtaken) == QUIET, overtaken
