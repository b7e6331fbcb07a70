"""Deaths of engines that run forwarded requests: a prompt that kills them costs two, other failures cost none."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.processes import Command, ManagedProcess

from ..gateway import MODEL, System
from .test_forwarding import register_engine, start_engine

ENGINES = 4
POISON = 31_999
PROMPT = [*range(40), POISON]


async def start_engines(system: System, stack: AsyncExitStack, logs: Path, effect: str) -> list[ManagedProcess]:
    """Starts engines as processes that die of the poison; their workers, in this process, live on."""
    binds = [f"127.0.0.1:{free_port()}" for _ in range(ENGINES)]
    engines = []
    for number, bind in enumerate(binds, start=1):
        options = ("--openai", "--model", MODEL, "--bind", bind, "--http-bind", "")
        poisoned = ("--poison-token", str(POISON), "--poison-effect", effect)
        arguments = (sys.executable, "-m", "kvrouter.mocker", *options, *poisoned)
        process = await ManagedProcess.start(Command(f"engine-{number}", arguments, dict(os.environ)), logs)
        stack.push_async_callback(process.stop, 20)
        engines.append(process)
    for number, bind in enumerate(binds, start=1):
        await until_answering(f"http://{bind}/health")
        await register_engine(system, stack, number, f"http://{bind}")
    return engines


async def until_answering(url: str) -> None:
    async with asyncio.timeout(60), aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(url):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)


async def send(system: System, prompt: list[int] = PROMPT, **fields: Any) -> tuple[int, str]:
    """Returns the status, and the text of the response."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8} | fields
    async with aiohttp.ClientSession() as http, http.post(f"http://{system.http}/v1/completions", json=body) as got:
        return got.status, await got.text()


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"


async def until_dead(engines: Sequence[ManagedProcess], number: int) -> None:
    """Returns when so many engines have ended; the system sees their connections close before."""
    async with asyncio.timeout(60):
        while sum(not alive(engine.pid) for engine in engines) < number:
            await asyncio.sleep(0.05)
    assert sum(not alive(engine.pid) for engine in engines) == number


def is_poison(response: tuple[int, str]) -> bool:
    return "workers died while they ran" in response[1]


@pytest.mark.parametrize(
    ("effect", "fields"),
    [
        ("die", {}),
        ("die-after-output", {"stream": True}),
        pytest.param("die-after-output", {"stream": True, "logprobs": 1}, marks=pytest.mark.full),
    ],
)
async def test_a_forwarded_prompt_that_kills_engines_costs_two(
    system: System, stack: AsyncExitStack, tmp_path: Path, effect: str, fields: dict[str, Any]
) -> None:
    engines = await start_engines(system, stack, tmp_path, effect)
    responses = [await send(system, **fields) for _ in range(6)]
    assert is_poison(responses[-1]), responses
    assert sum(not is_poison(each) for each in responses) <= 1, responses
    await until_dead(engines, 2)
    assert (await send(system, [*range(50)], **fields))[0] == 200, "other prompts are served"
    await system.until_idle()


@pytest.mark.full
async def test_an_engine_that_cannot_be_connected_to_is_no_death(
    system: System, stack: AsyncExitStack, tmp_path: Path
) -> None:
    system.wait_for_no_restart()
    for engine in await start_engines(system, stack, tmp_path, "die"):
        engine.kill()
        await engine.watch()
    for _ in range(3):
        response = await send(system)
        assert response[0] == 503
        assert not is_poison(response)
    assert not len(system.frontend.runner.poison_prompts)


@pytest.mark.parametrize("begins", [False, True])
async def test_an_engine_that_breaks_connections_and_lives_is_no_death(
    system: System, stack: AsyncExitStack, begins: bool
) -> None:
    async def break_off(request: web.Request, body: Any) -> web.StreamResponse:
        response = web.StreamResponse()
        if begins:
            await response.prepare(request)
            await response.write(b"{")
        assert request.transport is not None
        request.transport.abort()
        return response

    engines = [await start_engine(system, stack, number) for number in (1, 2, 3)]
    for engine in engines:
        engine.respond = break_off
    for _ in range(3):
        response = await send(system)
        assert response[0] == 503
        assert not is_poison(response)
    assert not len(system.frontend.runner.poison_prompts)
