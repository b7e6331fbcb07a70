"""``kvrouter sidecar`` as a process, between two engine servers and a router."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.processes import Command, ManagedProcess

from .rig import events_at

BLOCK = 16
"""Tokens per block of the engines."""


class System:
    """Two engine servers, a sidecar for both, and a router."""

    def __init__(self, logs: Path, where: tuple[str, ...], stack: AsyncExitStack) -> None:
        self.session = aiohttp.ClientSession()
        self.processes: dict[str, ManagedProcess] = {}
        self._logs = logs
        self._stack = stack
        self._port = free_port()
        self._sidecar_port = free_port()
        self._engines = {1: free_port(), 2: free_port()}
        urls = [("--engine", f"http://127.0.0.1:{port}") for port in self._engines.values()]
        engine = ("--openai", "--model", "m", "--enable-prompt-tokens-details", "--clock-factor", "10")
        self._commands = {
            "router": ("cli.main", "serve", *where, "--http-bind", "", "--port", str(self._port)),
            "sidecar": (
                *("cli.main", "sidecar", *where, *(each for url in urls for each in url), "--worker-id", "1"),
                *("--journal-path", str(logs / "journal"), "--engine-grace-seconds", "0.2", "--load-seconds", "0.1"),
                *("--answer-seconds", "60", "--http-bind", f"127.0.0.1:{self._sidecar_port}"),
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

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.processes[name].pid, number)

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

    async def serving(self) -> list[int]:
        """Returns the engines on which requests of the sidecar run."""
        async with self.session.get(f"http://127.0.0.1:{self._sidecar_port}/metrics") as answer:
            text = await answer.text()
        running = re.findall(r'^kvrouter_sidecar_running_requests{worker_id="(\d+)"} (\S+)', text, re.MULTILINE)
        return [int(worker) for worker, count in running if float(count)]


def _module(command: tuple[str, ...]) -> tuple[str, ...]:
    return f"kvrouter.{command[0]}", *command[1:]


def cached_tokens(answer: dict[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def overlap(answer: dict[str, Any]) -> int:
    blocks: int = answer["kvrouter"]["predicted_overlap_blocks"]
    return blocks


@asynccontextmanager
async def running_system(logs: Path, nats: str, etcd: str, namespace: str) -> AsyncIterator[System]:
    """Runs the processes while the context lasts."""
    where = ("--namespace", namespace, "--nats", nats, "--etcd", etcd, "--drain-seconds", "1")
    async with AsyncExitStack() as stack:
        system = System(logs, (*where, "--lease-seconds", "2"), stack)
        stack.push_async_callback(system.session.close)
        await system.start("engine-1", "engine-2", "sidecar", "router")
        yield system
