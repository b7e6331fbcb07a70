"""A whole system as separate processes on loopback ports: nats-server, etcd, workers, Indexer, Scheduler, Frontend."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvrouter.devtools.system.processes import Command, ManagedProcess, ProcessDied
from kvrouter.devtools.system.servers import EtcdServer, NatsServer, ServerProcess, StartFailed, free_port
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import KvRouterError
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import frontend_pb2
from kvrouter.v1.frontend_pb2 import PotentialLoadsRequest

DEFAULT_HTTP_PORT = 8000
DEFAULT_GRPC_PORT = 8001
_READY_SECONDS = 60.0
_POLL_SECONDS = 0.1
_STOP_SECONDS = 10.0
_RESTART_SECONDS = 1.0  # long enough that `kvrouter top` shows what a part's absence does
_KEPT_SETTINGS = frozenset({"KVROUTER_CORE"})


class StackFailed(Exception):
    """The system did not come up; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What system to start. Raises ValueError for one that cannot be."""

    directory: Path
    """Where the data and the logs of nats-server and etcd go; must exist."""
    logs: Path
    """Where each service's log goes, to NAME.log; must exist."""
    workers: int = 8
    """Simulated engines, a process each; 1 or more."""
    blocks: int = 16_384
    """KV blocks of each engine; 1 or more."""
    block_size: int = 16
    """Tokens per block; 1 or more."""
    clock: float = 1.0
    """Engine seconds that pass in one second of the wall; above 0."""
    stream_interval: int = 1
    """Tokens in a piece of an answer after the first token; stamps stay those of each token."""
    mode: str = "kv"
    """How the Scheduler routes."""
    model: str = "mock-model"
    """Name under which the engines serve."""
    component: str = "workers"
    """Component that the engines form."""
    namespace: str = "kvrouter"
    """Namespace of everything."""
    http_port: int = 0
    """Port of the HTTP API; 0 takes a free one."""
    grpc_port: int = 0
    """Port of the Frontend's gRPC; 0 takes a free one."""
    restarts: bool = False
    """Whether a part that ends by itself, once all were ready, is started again; else its end is the system's."""

    def __post_init__(self) -> None:
        for name in ("workers", "blocks", "block_size", "stream_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', ' ')} is {getattr(self, name)}, must be 1 or more")
        if not 0 < self.clock < float("inf"):
            raise ValueError(f"clock factor is {self.clock}, must be above 0 and finite")


class Stack:
    """A system that runs. Addresses are host:port."""

    def __init__(self, options: StackOptions) -> None:
        self.options = options
        self.nats = NatsServer(options.directory / "nats")
        self.etcd = EtcdServer(options.directory / "etcd")
        self.frontend = f"127.0.0.1:{options.grpc_port or free_port()}"
        """gRPC of the Frontend."""
        self.scheduler = f"127.0.0.1:{free_port()}"
        """gRPC of the Scheduler."""
        self.indexer = f"127.0.0.1:{free_port()}"
        """gRPC of the Indexer."""
        self.http = f"127.0.0.1:{options.http_port or free_port()}"
        """HTTP of the Frontend."""
        self.worker_metrics = [f"127.0.0.1:{free_port()}" for _ in range(options.workers)]
        """HTTP of each worker, with its metrics."""
        self.processes: dict[str, ManagedProcess] = {}
        """Services and workers by name."""
        self._ready = False
        self._stopping = False

    async def start(self, watchers: asyncio.TaskGroup, say: Callable[[str], None]) -> None:
        """Starts everything and returns when a request would be served by any of the workers.

        Raises:
            StackFailed: it is not so after a minute.
            StartFailed, BinaryMissing: nats-server or etcd cannot run.
        """
        say("starting nats-server and etcd")
        await asyncio.gather(self.nats.start(), self.etcd.start())
        for server in (self.nats, self.etcd):
            watchers.create_task(self._keep_server(server, say))
        say(f"starting {self.options.workers} workers, indexer, scheduler and frontend")
        for command in self._commands():
            await self._start_process(command)
            watchers.create_task(self._keep_process(command, say))
        say("waiting until every part is ready")
        await self._until_ready()
        self._ready = True

    async def stop(self) -> None:
        """Stops everything: the services first and together, what they lean on afterwards."""
        self._stopping = True
        await asyncio.gather(*(process.stop(_STOP_SECONDS) for process in self.processes.values()))
        await asyncio.gather(self.nats.stop(), self.etcd.stop())

    def kill(self) -> None:
        """Kills the services at once."""
        self._stopping = True
        for process in self.processes.values():
            process.kill()

    def _commands(self) -> Sequence[Command]:
        options = self.options
        where = (
            "--drain-seconds",
            "1",
            "--namespace",
            options.namespace,
            "--etcd",
            self.etcd.endpoint,
            "--nats",
            self.nats.url,
        )
        host, _, port = self.http.rpartition(":")
        commands = [
            self._command("indexer", "indexer", *where, "--bind", self.indexer),
            self._command("scheduler", "scheduler", *where, "--bind", self.scheduler, "--router-mode", options.mode),
            self._command("frontend", "frontend", *where, "--bind", self.frontend, "--host", host, "--port", port),
        ]
        for number, metrics in enumerate(self.worker_metrics, start=1):
            commands.append(
                self._command(
                    f"worker-{number}",
                    "mocker",
                    *(*where, "--bind", "127.0.0.1:0", "--http-bind", metrics),
                    *("--component", options.component, "--model", options.model, "--worker-id", str(number)),
                    *("--num-blocks", str(options.blocks), "--block-size", str(options.block_size)),
                    *("--clock-factor", str(options.clock), "--stream-interval", str(options.stream_interval)),
                )
            )
        return commands

    def _command(self, name: str, service: str, *arguments: str) -> Command:
        return Command(name, (sys.executable, "-m", f"kvrouter.{service}", *arguments), service_environment(os.environ))

    async def _start_process(self, command: Command) -> None:
        process = await ManagedProcess.start(command, self.options.logs)
        self.processes[command.name] = process
        if self._stopping:
            process.kill()

    async def _keep_process(self, command: Command, say: Callable[[str], None]) -> None:
        while not self._stopping:
            try:
                await self.processes[command.name].watch()
            except ProcessDied as death:
                await self._pause_before_restart(death, say)
                if not self._stopping:
                    await self._start_process(command)

    async def _keep_server(self, server: ServerProcess, say: Callable[[str], None]) -> None:
        while not self._stopping:
            await asyncio.sleep(_POLL_SECONDS)
            if server.running or self._stopping:
                continue
            death = ProcessDied(f"{server.name} ended", server.log_path, server.log_tail(15))
            await self._pause_before_restart(death, say)
            if not self._stopping:
                try:
                    await server.start()
                except StartFailed:  # also where it was stopped meanwhile
                    if not self._stopping:
                        raise

    async def _pause_before_restart(self, death: ProcessDied, say: Callable[[str], None]) -> None:
        if not (self.options.restarts and self._ready):
            raise death
        say(f"{death.what}: starting it again")
        await asyncio.sleep(_RESTART_SECONDS)

    async def _until_ready(self) -> None:
        services = {
            "Indexer": (self.indexer, "kvrouter.v1.IndexerService"),
            "Scheduler": (self.scheduler, "kvrouter.v1.SchedulerService"),
            "Frontend": (self.frontend, "kvrouter.v1.FrontendService"),
        }
        missing = ""
        try:
            async with asyncio.timeout(_READY_SECONDS):
                for name, (target, service) in services.items():
                    missing = f"the {name} is not ready"
                    await until_serving(target, service)
                async with open_channel(self.frontend) as channel:
                    while missing := await self._missing_workers(channel):  # noqa: ASYNC110 - asks another process
                        await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise StackFailed(
                f"not ready after {_READY_SECONDS:.0f} s: {missing}; logs are in {self.options.logs}"
            ) from None

    async def _missing_workers(self, channel: grpc.aio.Channel) -> str:
        """Why a request might not be served by each of the workers; empty if it would."""
        frontend = cast("Frontend", remote(frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"], channel))
        request = PotentialLoadsRequest()
        request.request.model = self.options.model
        request.request.token_ids.ids.extend(range(self.options.block_size))
        try:
            answer = await frontend.potential_loads(request, deadline=Deadline.after(2))
        except KvRouterError as error:
            return f"the Frontend answers {error.code.name}, {error}"
        found = len(answer.loads)
        return "" if found == self.options.workers else f"{found} of {self.options.workers} workers are known"


async def until_serving(target: str, service: str) -> None:
    """Returns when a service says by grpc.health that it is ready."""
    async with open_channel(target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while True:
            with suppress(grpc.aio.AioRpcError):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=2)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(_POLL_SECONDS)


@asynccontextmanager
async def running_stack(options: StackOptions, say: Callable[[str], None] = lambda _: None) -> AsyncIterator[Stack]:
    """A system, while the context lasts. The context is cancelled when one of its processes dies for good.

    Raises:
        ProcessDied: a process ended by itself, and is not to be started again.
        StackFailed, StartFailed, BinaryMissing: the system did not come up.
    """
    stack = Stack(options)
    try:
        async with asyncio.TaskGroup() as watchers:
            try:
                await stack.start(watchers, say)
                yield stack
            finally:
                try:
                    await stack.stop()
                except asyncio.CancelledError:
                    stack.kill()
                    raise
    except BaseExceptionGroup as group:
        raise _first(group) from None


def service_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for services: settings meant for other systems, such as a NATS_SERVER, are left out."""
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT_SETTINGS or not (name.startswith("KVROUTER_") or name in {"NATS_SERVER", "ETCD_ENDPOINTS"})
    }


def why_not_free(port: int) -> str:
    """Why a loopback port cannot be listened on; empty if it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return "it is taken" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
    return ""


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The death of a process where there is one: other failures are its consequences."""
    died = group.subgroup(ProcessDied) or group
    error: BaseException = died
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
