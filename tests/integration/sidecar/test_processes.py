"""``kvrouter sidecar`` as a process, between engine servers and a router, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.processes import Command, ManagedProcess

from .rig import events_at

pytestmark = pytest.mark.timeout(180)

PROMPT = list(range(1, 400))
BLOCK = 16


class System:
    """Two engine servers, a sidecar for both, and a router."""

    def __init__(self, logs: Path, where: tuple[str, ...], stack: AsyncExitStack) -> None:
        self.session = aiohttp.ClientSession()
        self.processes: dict[str, ManagedProcess] = {}
        self._logs = logs
        self._stack = stack
        self._port = free_port()
        self._engines = {1: free_port(), 2: free_port()}
        urls = [("--engine", f"http://127.0.0.1:{port}") for port in self._engines.values()]
        engine = ("--openai", "--model", "m", "--enable-prompt-tokens-details", "--clock-factor", "10")
        self._commands = {
            "router": ("cli.main", "serve", *where, "--port", str(self._port)),
            "sidecar": (
                *("cli.main", "sidecar", *where, *(each for url in urls for each in url), "--worker-id", "1"),
                *("--journal-path", str(logs / "journal"), "--engine-grace-seconds", "0.2", "--load-seconds", "0.1"),
            ),
            **{
                f"engine-{number}": (
                    *("mocker", *engine, "--bind", f"127.0.0.1:{port}", "--http-bind", ""),
                    *("--kv-events-config", events_at(free_port(), free_port())),
                )
                for number, port in self._engines.items()
            },
        }

    async def start(self, *names: str) -> None:
        for name in names:
            arguments = (sys.executable, "-m", *_module(self._commands[name]))
            process = await ManagedProcess.start(Command(name, arguments, dict(os.environ)), self._logs)
            self.processes[name] = process
            self._stack.push_async_callback(process.stop, 20)

    async def kill(self, name: str) -> None:
        process = self.processes[name]
        process.kill()
        await process.watch()

    def logged(self, name: str, event: str) -> list[dict[str, Any]]:
        """Returns the log lines of a process with this event."""
        entries = []
        for line in (self._logs / f"{name}.log").read_text().splitlines():
            with suppress(json.JSONDecodeError):
                entries.append(json.loads(line))
        return [entry for entry in entries if entry.get("event") == event]

    async def until_logged(self, name: str, event: str, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.logged(name, event)) < count:
                await asyncio.sleep(0.05)

    async def complete(self, prompt: list[int], max_tokens: int = 4) -> dict[str, Any]:
        """Returns the answer to a request, as soon as there is one."""
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens}
        async with asyncio.timeout(90):
            while True:
                with suppress(aiohttp.ClientConnectionError):
                    async with self.session.post(f"http://127.0.0.1:{self._port}/v1/completions", json=body) as answer:
                        if answer.status == 200:
                            found: dict[str, Any] = await answer.json()
                            return found
                await asyncio.sleep(0.1)

    async def running(self, worker: int) -> float:
        """Returns how many requests run on an engine."""
        async with self.session.get(f"http://127.0.0.1:{self._engines[worker]}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def _module(command: tuple[str, ...]) -> tuple[str, ...]:
    return f"kvrouter.{command[0]}", *command[1:]


def cached_tokens(answer: dict[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def overlap(answer: dict[str, Any]) -> int:
    blocks: int = answer["kvrouter"]["predicted_overlap_blocks"]
    return blocks


@pytest.fixture
async def system(tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[System]:
    where = ("--namespace", namespace, "--nats", nats_url, "--etcd", etcd_endpoint, "--drain-seconds", "1")
    async with AsyncExitStack() as stack:
        system = System(tmp_path, (*where, "--lease-seconds", "2", "--http-bind", ""), stack)
        stack.push_async_callback(system.session.close)
        await system.start("engine-1", "engine-2", "sidecar", "router")
        yield system


async def repeated_until_cached(system: System, prompt: list[int]) -> dict[str, Any]:
    """Sends a prompt again until the index knows its blocks, and returns that answer, of an engine that has them."""
    served = set()
    async with asyncio.timeout(60):
        while not overlap(answer := await system.complete(prompt)):
            served.add(answer["kvrouter"]["worker_id"])
    assert not served or answer["kvrouter"]["worker_id"] in served
    assert cached_tokens(answer) == overlap(answer) * BLOCK == len(prompt) // BLOCK * BLOCK
    return answer


async def test_requests_go_to_the_engine_that_has_their_prefix_and_survive_deaths(system: System) -> None:
    """One system for the whole story, because starting it takes most of the time."""
    holder = (await repeated_until_cached(system, PROMPT))["kvrouter"]["worker_id"]

    # The sidecar dies and resumes. (A worker whose engine has published nothing yet has nothing to resume from.)
    await system.kill("sidecar")
    await system.start("sidecar")
    await system.until_logged("sidecar", "worker.serving", 4)
    serving = system.logged("sidecar", "worker.serving")[2:]
    assert [entry["resumed"] for entry in serving if entry["worker_id"] == holder] == [True]
    await repeated_until_cached(system, PROMPT)

    # The engine dies while it serves: the request is served by the other one, as are the next ones.
    async with asyncio.TaskGroup() as tasks:
        request = tasks.create_task(system.complete(PROMPT, max_tokens=150))
        async with asyncio.timeout(60):
            while not (busy := [number for number in (1, 2) if await system.running(number)]):
                assert not request.done()
        (holder,) = busy
        await system.kill(f"engine-{holder}")
    assert request.result()["kvrouter"]["worker_id"] == 3 - holder
    assert len(request.result()["choices"][0]["token_ids"]) == 150

    # It comes back empty, and is used again.
    await system.kill(f"engine-{3 - holder}")
    await system.start(f"engine-{holder}")
    back = await system.complete(PROMPT)
    assert back["kvrouter"]["worker_id"] == holder
    assert cached_tokens(back) == 0
    await repeated_until_cached(system, PROMPT)
