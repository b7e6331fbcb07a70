"""The guide to OpenAI servers that publish no events, executed with simulated ones."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvrouter.devtools.system.ports import free_ports

from .commands import Guide


@pytest.mark.full
@pytest.mark.timeout(240)
async def test_a_chat_stays_at_the_server_that_has_its_beginning(tmp_path: Path) -> None:
    named = (9100, 9101, 9102, 9201, 9202)
    ports = {f":{port}": f":{free}" for port, free in zip(named, free_ports(len(named)), strict=True)}
    ports["--port 9102"] = f"--port {ports[':9102'][1:]}"
    with Guide("docs/guides/openai-servers.md", directory=tmp_path, replaced=ports) as guide:
        async with (
            guide.running("--bind 127.0.0.1:9201"),
            guide.running("--bind 127.0.0.1:9202"),
            guide.running("kvrouter serve") as services,
        ):
            await services.prints(f"127.0.0.1{ports[':9102']}")
            # The Frontend learns of the servers when they answer for the first time.
            first = answer(await guide.until("never finished?\"}]}'", lambda output: "choices" in answer(output)[1]))
            await until_idle(f"http://127.0.0.1{ports[':9101']}/metrics")
            second = answer(await guide.run("analytical engine"))
    assert second[0]["x-kvrouter-worker"] == first[0]["x-kvrouter-worker"]
    assert int(second[0]["x-kvrouter-overlap-blocks"]) > 0
    assert second[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert second[0]["x-kvrouter-routed-on"] == "text"


async def until_idle(metrics: str) -> None:
    """Waits until no request is booked: the server of one that is booked looks busy."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        while True:
            async with session.get(metrics) as response:
                lines = (await response.text()).splitlines()
            booked = [line for line in lines if line.startswith("kvrouter_scheduler_active_requests{")]
            if booked and all(line.endswith(" 0.0") for line in booked):
                return
            await asyncio.sleep(0.05)


def answer(output: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the headers, by lower-case name, and the body of a response as curl -i prints it; empty without one."""
    head, _, body = output.replace("\r\n", "\n").partition("\n\n")
    if not body:
        return {}, {}
    return dict(line.lower().split(": ", 1) for line in head.splitlines()[1:]), json.loads(body)
