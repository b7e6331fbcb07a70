"""The systems that are compared, each with its mock workers: kvrouter in one process, kvrouter split, and Dynamo."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import aiohttp
from bars import ONE_PROCESS, PEER, SPLIT, SPLIT_IN_TWO
from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.devtools.system.servers import EtcdServer, NatsServer
from kvrouter.devtools.system.small_tokenizer import write_small_tokenizer
from kvrouter.devtools.system.stack import service_environment
from kvrouter.net.model_files import TOKENIZER
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import frontend_pb2
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.frontend_pb2 import FrontendServiceGetPotentialLoadsRequest
from load import MODEL
from tokenizers import Tokenizer

HERE = Path(__file__).parent

BLOCK_SIZE = 16
BLOCKS = 16_384
_READY_SECONDS = 120.0
_STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Engines:
    """The mock workers of each system."""

    workers: int = 4
    speed: int = 1000
    """Times as fast as the engines that the mock workers imitate."""
    has_text: bool = False
    """Whether kvrouter's publish a tokenizer: Dynamo's, or without it a small one."""


def mocker_options(engines: Engines) -> tuple[str, ...]:
    """Returns the options of kvrouter's mock workers."""
    blocks = ("--num-blocks", str(BLOCKS), "--block-size", str(BLOCK_SIZE), "--max-sequences", "1024")
    workers = ("--workers-per-process", str(engines.workers), "--worker-id", "1")
    return *workers, "--speed", str(engines.speed), "--model", MODEL, *blocks


@dataclass
class System:
    """A running system. Processes are named by their part."""

    name: str
    url: str
    router: dict[str, ManagedProcess] = field(default_factory=dict)
    engines: dict[str, ManagedProcess] = field(default_factory=dict)
    counts_url: str = ""
    """Where its engines say how many requests and hits each had; empty if they do not."""


@dataclass
class Processes:
    """What all systems share: a folder for logs, and processes that end with a stack."""

    directory: Path
    stack: AsyncExitStack
    _: KW_ONLY
    recorded: bool = False
    """Whether the callbacks of kvrouter's event loops are recorded (``callbacks.py``)."""

    @staticmethod
    def recorded_file(directory: Path, name: str) -> Path:
        """Returns where a process writes the callbacks that it recorded."""
        return directory / f"{name}.callbacks.json"

    async def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> ManagedProcess:
        if self.recorded and arguments[1] == "-m":
            recorder = (str(HERE / "callbacks.py"), str(self.recorded_file(self.directory, name)))
            arguments = (arguments[0], *recorder, *arguments[2:])
        process = await ManagedProcess.start(Command(name, arguments, environment), self.directory)
        self.stack.push_async_callback(process.stop, _STOP_SECONDS)
        return process


@dataclass
class Servers(Processes):
    """Processes beside NATS and etcd."""

    nats: NatsServer
    etcd: EtcdServer

    async def start_service(self, name: str, module: str, *arguments: str) -> tuple[ManagedProcess, str]:
        """Starts a service of kvrouter. Returns its process, and its address for health and metrics, host:port."""
        address = f"127.0.0.1:{free_port()}"
        where = ("--etcd", self.etcd.endpoint, "--nats", self.nats.url, "--http-bind", address)
        command = (sys.executable, "-m", module, *where, *arguments)
        return await self.start(name, command, service_environment(os.environ)), address


def peer_home() -> Path | None:
    """Returns where Dynamo is installed; None if PEERS_WORK does not say, or it is not there."""
    home = Path(os.environ.get("PEERS_WORK", "")).absolute()
    return home if "PEERS_WORK" in os.environ and (home / "venv/bin/python").exists() else None


@asynccontextmanager
async def running_servers(directory: Path, *, recorded: bool = False) -> AsyncIterator[Servers]:
    """Runs NATS and etcd, and stops whatever was started beside them first; ``recorded``: see ``Processes``."""
    nats, etcd = NatsServer(directory / "nats"), EtcdServer(directory / "etcd")
    try:
        await asyncio.gather(nats.start(), etcd.start())
        async with AsyncExitStack() as stack:
            yield Servers(directory, stack, nats, etcd, recorded=recorded)
    finally:
        await asyncio.gather(nats.stop(), etcd.stop())


@asynccontextmanager
async def running_systems(
    names: Sequence[str],
    engines: Engines,
    directory: Path,
    options: Sequence[str] = (),
    *,
    recorded: bool = False,
) -> AsyncIterator[list[System]]:
    """Runs systems beside each other. Only the one that is under load uses more than a few percent of a core.

    Args:
        names: ONE_PROCESS, SPLIT, SPLIT_IN_TWO or PEER, each at most once.
        engines: The mock workers of each.
        directory: Receives logs and data; must exist.
        options: Options of the Scheduler of kvrouter.
        recorded: Whether the callbacks of kvrouter's event loops are recorded.
    """
    async with running_servers(directory, recorded=recorded) as servers:
        starters = {ONE_PROCESS: _one_process, SPLIT: _split, SPLIT_IN_TWO: partial(_split, processes=2)}
        yield [
            await (_dynamo(servers, engines) if name == PEER else starters[name](servers, engines, options))
            for name in names
        ]


async def _one_process(servers: Servers, engines: Engines, options: Sequence[str]) -> System:
    http, grpc = free_port(), free_port()
    arguments = ("kvrouter.cli.main", "serve", "--roles", "indexer,scheduler,frontend", *_frontend(http, grpc))
    return await _kvrouter(servers, engines, ONE_PROCESS, http, grpc, {"all": (*arguments, *options)})


async def _split(servers: Servers, engines: Engines, options: Sequence[str], processes: int = 1) -> System:
    http, grpc = free_port(), free_port()
    parts = {
        "indexer": ("kvrouter.indexer",),
        "scheduler": ("kvrouter.scheduler", *options),
        "frontend": ("kvrouter.frontend", "--processes", str(processes), *_frontend(http, grpc)),
    }
    name = SPLIT if processes == 1 else SPLIT_IN_TWO
    return await _kvrouter(servers, engines, name, http, grpc, parts)


def _frontend(http: int, grpc: int) -> tuple[str, ...]:
    return "--host", "127.0.0.1", "--port", str(http), "--bind", f"127.0.0.1:{grpc}"


async def _kvrouter(
    servers: Servers, engines: Engines, name: str, http: int, grpc: int, parts: Mapping[str, Sequence[str]]
) -> System:
    namespace = name.replace(" ", "-")
    common = ("--namespace", namespace, "--etcd", servers.etcd.endpoint, "--nats", servers.nats.url)
    environment = service_environment(os.environ)

    async def start(part: str, arguments: Sequence[str]) -> ManagedProcess:
        module, *rest = arguments
        command = (sys.executable, *(("-m", module) if module.startswith("kvrouter") else (module,)), *rest, *common)
        return await servers.start(f"{namespace}-{part}", command, environment)

    system = System(name, f"http://127.0.0.1:{http}")
    text = _tokenizer(servers.directory) if engines.has_text else ()
    system.engines["workers"] = await start("workers", ("kvrouter.mocker", *mocker_options(engines), *text))
    for part, arguments in parts.items():
        system.router[part] = await start(part, arguments)
    await until(system, lambda: _kvrouter_missing(f"127.0.0.1:{grpc}", engines.workers))
    if engines.has_text:
        await until(system, lambda: completion_missing(system.url, "a text"))
    return system


def _tokenizer(directory: Path) -> tuple[str, ...]:
    """Returns the options of mock workers that publish a tokenizer. Their output must be known to it."""
    home = peer_home()
    source = directory / "tokenizer" if home is None else home / "model"
    if not source.exists():
        source.mkdir()
        write_small_tokenizer(source)
    vocabulary = Tokenizer.from_file(str(source / TOKENIZER)).get_vocab_size()
    return "--tokenizer", str(source), "--vocabulary-size", str(vocabulary)


async def _kvrouter_missing(address: str, workers: int) -> str:
    request = FrontendServiceGetPotentialLoadsRequest()
    request.request.model = MODEL
    request.request.token_ids.ids.extend(range(BLOCK_SIZE))
    async with open_channel(address) as channel:
        frontend = cast(Frontend, remote(frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"], channel))
        try:
            answer = await frontend.get_potential_loads(request, deadline=Deadline.after(2))
        except KvRouterError as error:
            return error.message
    return "" if len(answer.loads) == workers else f"{len(answer.loads)} of {workers} workers are known"


async def _dynamo(servers: Servers, engines: Engines) -> System:
    home = peer_home()
    if home is None:
        raise RuntimeError("PEERS_WORK does not name a folder with Dynamo: see bench/request.md")
    http = free_port()
    environment = {
        **os.environ,
        "ETCD_ENDPOINTS": f"http://{servers.etcd.endpoint}",
        "NATS_SERVER": servers.nats.url,
        "DYN_LOG": "warn",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HOME": str(servers.directory / "hf"),
    }
    python, planes = str(home / "venv/bin/python"), ("--event-plane", "zmq", "--request-plane", "tcp")
    mocker = (
        *("--model-path", str(home / "model"), "--model-name", MODEL, "--num-workers", str(engines.workers)),
        *("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(BLOCKS)),
        *("--speedup-ratio", str(engines.speed), "--max-num-seqs", "1024"),
    )
    frontend = (
        *("--http-host", "127.0.0.1", "--http-port", str(http), "--router-mode", "kv"),
        *("--kv-cache-block-size", str(BLOCK_SIZE)),
    )
    system = System(PEER, f"http://127.0.0.1:{http}")
    for parts, part, rest in ((system.engines, "mocker", mocker), (system.router, "frontend", frontend)):
        command = (python, "-m", f"dynamo.{part}", *rest, *planes)
        parts["workers" if part == "mocker" else part] = await servers.start(f"dynamo-{part}", command, environment)
    await until(system, lambda: completion_missing(system.url, list(range(300, 364))))
    return system


async def completion_missing(url: str, prompt: str | list[int]) -> str:
    """Returns why a completion is not answered. Not every system says how many workers it knows."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    try:
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
            return "" if response.status == 200 else f"it answers {response.status}"
    except aiohttp.ClientError as error:
        return str(error)


async def completion_counts(system: System) -> dict[str, list[int]]:
    """Returns the requests and the hits of each engine; empty if engines do not say."""
    if not system.counts_url:
        return {}
    async with aiohttp.ClientSession() as session, session.get(system.counts_url) as response:
        counts: dict[str, list[int]] = await response.json()
        return counts


async def until(system: System, missing: Callable[[], Awaitable[str]]) -> None:
    """Waits until nothing is missing.

    Raises:
        ProcessDied: a process of the system ended.
        TimeoutError: it takes too long.
    """
    processes = [*system.router.values(), *system.engines.values()]
    watching = [asyncio.create_task(process.watch()) for process in processes]
    try:
        async with asyncio.timeout(_READY_SECONDS):
            while reason := await missing():
                for task in watching:
                    if task.done():
                        await task
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise TimeoutError(f"{system.name} is not ready: {reason}; logs: {processes[0].log_file.parent}") from None
    finally:
        for task in watching:
            task.cancel()
