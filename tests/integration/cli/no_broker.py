"""``kvrouter serve --engine`` in a process of its own, before simulated engine servers."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
from kvrouter.devtools.system.ports import free_ports
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.mocker.serving.http import ServedEngine
from kvrouter.runtime.contracts import Indexer
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import indexer_pb2
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.indexer_pb2 import GetStatsRequest, RankStats

from ...waiting import until

NOWHERE = {"KVROUTER_ETCD": "127.0.0.1:1", "KVROUTER_NATS": "nats://127.0.0.1:1"}
"""Servers that do not exist: nothing may need them."""


@dataclass(frozen=True)
class Answer:
    """What a client sees of a request."""

    status: int
    worker: str
    overlap_blocks: int
    cached_tokens: int


@dataclass(frozen=True)
class NoBroker:
    """A running process."""

    process: ManagedProcess
    http: str
    ops: str
    indexer: Indexer
    session: aiohttp.ClientSession

    async def ask(self, prompt: Sequence[int] | str, **fields: object) -> Answer:
        """Sends a completion."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 2} | fields
        async with self.session.post(f"http://{self.http}/v1/completions", json=body) as response:
            answer: Any = await response.json()
            details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
            return Answer(
                response.status,
                response.headers.get("x-kvrouter-worker", ""),
                int(response.headers.get("x-kvrouter-overlap-blocks", -1)),
                details.get("cached_tokens", -1),
            )

    async def models(self) -> list[str]:
        """Returns the models that clients can name."""
        async with self.session.get(f"http://{self.http}/v1/models") as response:
            listed: Any = await response.json()
            return [each["id"] for each in listed.get("data", [])]

    async def ready(self) -> None:
        """Waits until the process says that its services are ready."""

        async def is_ready() -> bool:
            async with self.session.get(f"http://{self.ops}/ready") as response:
                return response.status == 200

        await until(is_ready, 60)

    async def ranks(self) -> dict[int, RankStats]:
        """Returns what the Indexer knows of the first rank of each worker."""
        stats = await self.indexer.get_stats(GetStatsRequest(), deadline=Deadline.after(10))
        return {each.rank.worker_id: each for component in stats.components for each in component.ranks}

    async def serving(self, workers: int) -> None:
        """Waits until the Indexer has compared as many workers."""

        async def compared() -> bool:
            try:
                ranks = await self.ranks()
            except KvRouterError:
                return False  # gRPC is served a moment later
            return sum(each.registered and each.verified for each in ranks.values()) == workers

        await until(compared, 60)

    async def settled(self, worker: str, blocks: int) -> None:
        """Waits until no request is booked, and the index has so many blocks of a rank."""
        worker_id = int(worker.partition(":")[0])

        async def is_settled() -> bool:
            booked = await self.metric("kvrouter_scheduler_active_requests")
            return booked == 0 and (await self.ranks())[worker_id].blocks >= blocks

        await until(is_settled, 60)

    async def metric(self, name: str) -> float:
        """Returns the sum of a metric over its labels; -1 while it has no value."""
        async with self.session.get(f"http://{self.ops}/metrics") as response:
            lines = (await response.text()).splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(values) if values else -1

    def logged(self, event: str) -> bool:
        """Returns whether the process has logged an event."""
        return f'"event": "{event}"' in self.process.log_file.read_text()

    async def until_logged(self, event: str) -> None:
        """Waits until the process has logged an event."""

        async def is_logged() -> bool:
            return self.logged(event)

        await until(is_logged, 60)


@asynccontextmanager
async def serving(
    logs: Path,
    *urls: str,
    options: Sequence[str] = (),
    name: str = "serve",
    around: Sequence[str] = (),
    failpoint: str = "",
    bind: str = "",
) -> AsyncIterator[NoBroker]:
    """Runs the command while the context lasts, from when it listens. Its run file is below ``logs``.

    ``around`` is a command that runs the one that follows it. ``failpoint`` is a step of ``tests.faults.failpoints`` at
    which the process dies. ``bind`` is the address of its gRPC server.
    """
    http, drawn, ops = (f"127.0.0.1:{port}" for port in free_ports(3))
    grpc = bind or drawn
    arguments = [argument for url in urls for argument in ("--engine", url)]
    armed = ("-m", "tests.faults.failpoints", failpoint) if failpoint else ("-m",)
    command = Command(
        name,
        (
            *(*around, sys.executable, *armed, "kvrouter.cli.main", "serve", *arguments),
            *("--port", http.rpartition(":")[2], "--bind", grpc, "--http-bind", ops),
            *("--drain-seconds", "1", "--load-seconds", "0.1"),
            *("--indexer-timeout-ms", "20000", *options),  # an Indexer that is there answers, however busy the machine
        ),
        dict(os.environ) | NOWHERE | {"XDG_RUNTIME_DIR": str(logs)},
    )
    process = await ManagedProcess.start(command, logs)

    async def listens() -> bool:
        try:
            _, writer = await asyncio.open_connection(*ops.split(":"))
        except OSError:
            return False
        writer.close()
        return True

    try:
        await until(listens, 60)
        async with aiohttp.ClientSession() as session, open_channel(grpc) as channel:
            descriptor = indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"]
            yield NoBroker(process, http, ops, cast(Indexer, remote(descriptor, channel)), session)
    finally:
        await process.stop(20)


async def begun(engine: ServedEngine, asking: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
    """Sends a request in a task, and waits until an engine has begun it."""

    def prompt_tokens() -> int:
        return sum(driver.prompt_tokens_total for driver in engine.service.drivers.values())

    before = prompt_tokens()
    asked = asyncio.create_task(asking)
    async with asyncio.timeout(60):
        while prompt_tokens() == before:
            await asyncio.sleep(0.01)
    return asked


async def command(runs: Path, *arguments: str) -> str:
    """Runs ``kvrouter`` for a system whose run file is below ``runs``. Returns its output; it must succeed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli.main", *arguments),
        env=dict(os.environ) | {"XDG_RUNTIME_DIR": str(runs)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    return output
