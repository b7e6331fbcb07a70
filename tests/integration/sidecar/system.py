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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import frontend_pb2
from kvrouter.v1.common_pb2 import TokenIds
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest, FrontendServiceGenerateResponse
from kvrouter.v1.worker_pb2 import FinishReason, StopConditions

from .rig import events_at

_FRONTEND = frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"]
BLOCK = 16
_BYTES_OF_HASHES = 16
"""Bytes of a block in a snapshot: its hash and its local hash."""
"""Tokens per block of the engines."""


@dataclass
class Completion:
    """What is said of a request."""

    worker_id: int = 0
    """The worker of the last attempt."""
    overlap_blocks: int = 0
    """Blocks that the router expected there."""
    cached_tokens: int | None = None
    """Tokens that the engine found in its cache."""
    tokens: int = 0
    """Tokens that it generated."""
    finish_reason: FinishReason = FinishReason.FINISH_REASON_UNSPECIFIED

    def take(self, piece: FrontendServiceGenerateResponse) -> None:
        if piece.HasField("routing"):
            self.worker_id = piece.routing.rank.worker_id
            self.overlap_blocks = piece.routing.predicted_overlap_blocks
        if piece.output.HasField("cached_tokens"):
            self.cached_tokens = piece.output.cached_tokens
        self.tokens += len(piece.output.token_ids)
        self.finish_reason = piece.output.finish_reason or self.finish_reason


class System:
    """Two engine servers, a sidecar for both, and a router."""

    def __init__(
        self,
        logs: Path,
        where: tuple[str, ...],
        stack: AsyncExitStack,
        sidecar: tuple[str, ...],
        engine: tuple[str, ...],
    ) -> None:
        self.session = aiohttp.ClientSession()
        self.processes: dict[str, ManagedProcess] = {}
        self._logs = logs
        self._stack = stack
        self._port = free_port()
        self._http_port = free_port()
        self._sidecar_port = free_port()
        self._engines = {1: free_port(), 2: free_port()}
        urls = [("--engine", f"http://127.0.0.1:{port}") for port in self._engines.values()]
        engine = (*engine, "--openai", "--model", "m", "--enable-prompt-tokens-details", "--clock-factor", "10")
        self._commands = {
            "router": (
                "cli.main",
                "serve",
                *where,
                "--http-bind",
                "",
                "--port",
                str(self._http_port),
                "--bind",
                f"127.0.0.1:{self._port}",
                *("--indexer-timeout-ms", "20000"),  # an Indexer that is there answers, however busy the machine
            ),
            "sidecar": (
                *("cli.main", "sidecar", *where, *(each for url in urls for each in url), "--worker-id", "1"),
                *("--state", str(logs / "state"), "--state-seconds", "0.1"),
                *("--engine-grace-seconds", "0.2", "--load-seconds", "0.1"),
                *("--answer-seconds", "60", "--http-bind", f"127.0.0.1:{self._sidecar_port}", *sidecar),
            ),
            **{
                f"engine-{number}": (
                    *("mocker", *engine, "--bind", f"127.0.0.1:{port}", "--http-bind", ""),
                    *("--kv-events-config", events_at(free_port(), free_port())),
                )
                for number, port in self._engines.items()
            },
        }

    @property
    def http(self) -> str:
        """URL of the router's HTTP API."""
        return f"http://127.0.0.1:{self._http_port}"

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

    async def until_saved(self, worker_id: int, blocks: int) -> None:
        """Waits until the worker's snapshot has so many blocks."""
        async with asyncio.timeout(30):
            while not any(
                path.stat().st_size > _BYTES_OF_HASHES * blocks
                for path in (self._logs / "state").glob(f"*-{worker_id:016x}-0.snapshot")
            ):
                await asyncio.sleep(0.01)

    async def until_logged(self, name: str, event: str, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.logged(name, event)) < count:
                await asyncio.sleep(0.05)

    async def complete(self, prompt: list[int], max_tokens: int = 4) -> Completion:
        """Runs a request by the worker contract, so that it reaches the engine through the sidecar."""
        request = FrontendServiceGenerateRequest(
            model="m", token_ids=TokenIds(ids=prompt), stop_conditions=StopConditions(max_tokens=max_tokens)
        )
        async with asyncio.timeout(90), open_channel(f"127.0.0.1:{self._port}") as channel:
            frontend = cast(Frontend, remote(_FRONTEND, channel))
            while True:
                completion = Completion()
                with suppress(KvRouterError):
                    async for piece in frontend.generate(request, deadline=Deadline.after(60)):
                        completion.take(piece)
                    return completion
                await asyncio.sleep(0.1)

    async def serving(self) -> list[int]:
        """Returns the engines on which requests of the sidecar run."""
        async with self.session.get(f"http://127.0.0.1:{self._sidecar_port}/metrics") as answer:
            text = await answer.text()
        running = re.findall(r'^kvrouter_sidecar_running_requests{worker_id="(\d+)"} (\S+)', text, re.MULTILINE)
        return [int(worker) for worker, count in running if float(count)]


def _module(command: tuple[str, ...]) -> tuple[str, ...]:
    return f"kvrouter.{command[0]}", *command[1:]


@asynccontextmanager
async def running_system(
    logs: Path, nats: str, etcd: str, namespace: str, sidecar: tuple[str, ...] = (), engine: tuple[str, ...] = ()
) -> AsyncIterator[System]:
    """Runs the processes while the context lasts, with further options of the sidecar and the engines."""
    where = ("--namespace", namespace, "--nats", nats, "--etcd", etcd, "--drain-seconds", "1")
    async with AsyncExitStack() as stack:
        system = System(logs, (*where, "--lease-seconds", "2"), stack, sidecar, engine)
        stack.push_async_callback(system.session.close)
        await system.start("engine-1", "engine-2", "sidecar", "router")
        yield system
