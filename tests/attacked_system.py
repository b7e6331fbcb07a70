"""A system that asks for credentials, each of its processes and ports, its memory, and the time its clients wait."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
from kvrouter.devtools.system.ports import free_ports
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.devtools.system.stack import service_environment
from kvrouter.v1.common_pb2 import TokenIds
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest, FrontendServiceGenerateResponse
from kvrouter.v1.worker_pb2 import StopConditions

from .integration.frontend.access.keys import Keys

GENERATE = "/kvrouter.v1.FrontendService/Generate"
MODEL = "mock-model"
_PROMPT = list(range(1, 65))
_TOKENS = 4
_PAUSE_SECONDS = 0.05


@dataclass
class AttackedSystem:
    """The processes by name, and their ports."""

    key: str
    http: dict[str, str]
    """HTTP ports by name, host:port."""
    grpc: dict[str, str]
    """gRPC ports by name, host:port."""
    processes: dict[str, ManagedProcess] = field(default_factory=dict)

    def memory(self) -> dict[str, int]:
        """Returns the resident memory of each process, bytes."""
        return {name: _memory(process.pid) for name, process in self.processes.items()}

    def cpu_seconds(self) -> dict[str, float]:
        """Returns the CPU time of each process."""
        return {name: _cpu_seconds(process.pid) for name, process in self.processes.items()}

    async def check_running(self) -> None:
        """Checks that no process has ended.

        Raises:
            ProcessDied: one has; the error has its exit status or signal and its last log lines.
        """
        for process in self.processes.values():
            if not _memory(process.pid):
                await process.watch()


def _memory(pid: int) -> int:
    """Returns 0 for a process that has ended."""
    path = Path(f"/proc/{pid}/status")
    status = path.read_text().splitlines() if path.exists() else []
    return int(next((line.split()[1] for line in status if line.startswith("VmRSS")), 0)) << 10


def _cpu_seconds(pid: int) -> float:
    """Returns 0 for a process that has ended."""
    path = Path(f"/proc/{pid}/stat")
    if not path.exists():
        return 0.0
    fields = path.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def attacked_system(etcd: str, nats: str, namespace: str, directory: Path) -> AsyncIterator[AttackedSystem]:
    """Runs an Indexer, a Scheduler, a Frontend, two workers, a sidecar and a relay with a token and API keys."""
    keys = Keys(directory / "keys.json")
    keys.add("client")
    keys.write()
    token = directory / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    names = ("indexer", "scheduler", "frontend", "worker-1", "worker-2", "sidecar", "relay")
    ports = [f"127.0.0.1:{port}" for port in free_ports(2 * len(names) + 4)]
    rpc = dict(zip(names, ports, strict=False))
    http = dict(zip(names, ports[len(names) :], strict=False))
    rpc["picker"], http["api"], engine, events = ports[2 * len(names) :]
    where = ("--namespace", namespace, "--etcd", etcd, "--nats", nats, "--drain-seconds", "1")
    api_host, _, api_port = http["api"].rpartition(":")
    beside = ("--component", "beside", "--worker-id")
    simulated = ("--clock-factor", "10", "--mean-output-tokens", "0")
    special: dict[str, tuple[str, ...]] = {
        "frontend": (
            *("--host", api_host, "--port", api_port, "--api-keys", str(keys.path)),
            *("--endpoint-picker-bind", rpc["picker"]),
        ),
        "worker-1": ("--worker-id", "1", *simulated),
        "worker-2": ("--worker-id", "2", *simulated),
        "sidecar": (*beside, "3", "--engine", f"http://{engine}"),
        "relay": (
            *(*beside, "4", "--kv-events", f"tcp://{events}", "--model", "m", "--block-size", "16"),
            *("--max-model-len", "262144"),  # as the engine tells the sidecar
        ),
    }
    kv_events = f'{{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://{events}"}}'
    options = ("--openai", "--model", "m", "--bind", engine, "--http-bind", "", "--kv-events-config", kv_events)
    system = AttackedSystem(keys["client"], http, rpc)
    async with AsyncExitStack() as exits:

        async def start(name: str, *arguments: str) -> ManagedProcess:
            program = (sys.executable, "-m", *arguments)
            process = await ManagedProcess.start(Command(name, program, service_environment(os.environ)), directory)
            exits.push_async_callback(process.stop, 10)
            return process

        await start("engine", "kvrouter.mocker", *options)
        for name in names:
            module = "kvrouter.mocker" if name.startswith("worker") else f"kvrouter.{name}"
            at = ("--bind", rpc[name], "--http-bind", http[name], "--service-token-file", str(token))
            system.processes[name] = await start(name, module, *where, *at, *special.get(name, ()))
        async with asyncio.timeout(90), aiohttp.ClientSession() as session:
            for address in http.values():
                await _until_ready(session, address, "/health" if address == http["api"] else "/ready")
            async with clients(system) as calls:
                for call in calls.values():
                    await _until_served(call)
        yield system


async def _until_ready(session: aiohttp.ClientSession, address: str, path: str) -> None:
    while True:
        try:
            async with session.get(f"http://{address}{path}") as response:
                if response.status == 200:
                    return
        except OSError:
            pass
        await asyncio.sleep(0.1)


async def _until_served(call: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            return await call()
        except (grpc.aio.AioRpcError, aiohttp.ClientError, AssertionError):
            await asyncio.sleep(0.1)


@asynccontextmanager
async def clients(
    system: AttackedSystem, model: str = MODEL, *, seconds: float = 60.0
) -> AsyncIterator[dict[str, Callable[[], Awaitable[None]]]]:
    """Yields requests of clients with a key, each over connections of its own, by name. They fail after ``seconds``."""
    request = FrontendServiceGenerateRequest(
        model=model, token_ids=TokenIds(ids=_PROMPT), stop_conditions=StopConditions(max_tokens=_TOKENS)
    )
    body = {"model": model, "prompt": _PROMPT, "max_tokens": _TOKENS}
    key = {"authorization": f"Bearer {system.key}"}
    time_limit = aiohttp.ClientTimeout(seconds)
    async with (
        grpc.aio.insecure_channel(system.grpc["frontend"]) as channel,
        aiohttp.ClientSession(f"http://{system.http['api']}", headers=key, timeout=time_limit) as session,
    ):
        call: Any = channel.unary_stream(
            GENERATE,
            request_serializer=FrontendServiceGenerateRequest.SerializeToString,
            response_deserializer=FrontendServiceGenerateResponse.FromString,
        )

        async def generate() -> None:
            responses = call(request, metadata=tuple(key.items()), timeout=seconds)
            assert sum([len(response.output.token_ids) async for response in responses]) == _TOKENS

        async def complete() -> None:
            await _complete(session, body)

        async def connect_and_complete() -> None:
            async with aiohttp.ClientSession(f"http://{system.http['api']}", headers=key, timeout=time_limit) as fresh:
                await _complete(fresh, body)

        yield {"gRPC": generate, "HTTP": complete, "HTTP, new connections": connect_and_complete}


async def _complete(session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
    async with session.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        assert (await response.json())["usage"]["completion_tokens"] == _TOKENS


@dataclass
class Served:
    """What clients saw and processes used in an interval."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Time of each request, by client."""
    memory: dict[str, int] = field(default_factory=dict)
    """Largest resident memory of each process, bytes."""
    cpu_share: dict[str, float] = field(default_factory=dict)
    """CPU time of each process as a share of the interval."""

    def percentile(self, client: str, share: float) -> float:
        ordered = sorted(self.seconds[client])
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def serve(system: AttackedSystem, until: Callable[[], bool]) -> Served:
    """Runs clients with a key, one request of each at a time, until the condition holds. Every request must succeed."""
    served = Served(memory=system.memory())
    before, began = system.cpu_seconds(), asyncio.get_running_loop().time()

    async def request(name: str, call: Callable[[], Awaitable[None]]) -> None:
        times = served.seconds[name] = []
        while not until() or not times:
            start = asyncio.get_running_loop().time()
            await call()
            times.append(asyncio.get_running_loop().time() - start)
            await asyncio.sleep(_PAUSE_SECONDS)

    async def watch_memory() -> None:
        while not until():
            for name, size in system.memory().items():
                served.memory[name] = max(served.memory[name], size)
            await asyncio.sleep(0.2)

    async with clients(system) as calls, asyncio.TaskGroup() as group:
        group.create_task(watch_memory())
        for name, call in calls.items():
            group.create_task(request(name, call))
    spent = asyncio.get_running_loop().time() - began
    served.cpu_share = {name: (used - before[name]) / spent for name, used in system.cpu_seconds().items()}
    return served
