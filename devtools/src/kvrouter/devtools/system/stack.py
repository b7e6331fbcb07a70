"""A whole system as separate processes on loopback ports: nats-server, etcd, workers, Indexer, Scheduler, Frontend."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvrouter.devtools.system.accounts import Account, Namespace
from kvrouter.devtools.system.credentials import Credentials
from kvrouter.devtools.system.ports import free_port, reserve
from kvrouter.devtools.system.processes import Command, ManagedProcess, ProcessDied
from kvrouter.devtools.system.servers import EtcdServer, NatsServer, ServerProcess, StartFailed
from kvrouter.devtools.system.small_tokenizer import VOCABULARY_SIZE, write_small_tokenizer
from kvrouter.net.tls import Tls
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import frontend_pb2
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest, FrontendServiceGetPotentialLoadsRequest

_READY_SECONDS = 60.0
_POLL_SECONDS = 0.1
_STOP_SECONDS = 10.0
_RESTART_SECONDS = 1.0  # long enough for `kvrouter top` to show the effect of the absence
_KEPT_SETTINGS = frozenset({"KVROUTER_CORE"})


class StackFailed(Exception):
    """The system did not become ready; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class StackOptions:
    """Options of a system. Raises ValueError for values out of range."""

    directory: Path
    """Folder for data and logs of nats-server and etcd; must exist."""
    logs: Path
    """Folder for the logs of services, NAME.log each; must exist."""
    workers: int = 8
    """Number of simulated engines, each a process; at least 1."""
    blocks: int = 16_384
    """KV blocks of each engine, at least 1."""
    host_blocks: int = 0
    """KV blocks of each engine in host memory; 0 for none."""
    block_size: int = 16
    """Tokens per block, at least 1."""
    sequences: int = 256
    """Requests that each engine runs at once, at least 1."""
    clock: float = 1.0
    """Engine seconds in one wall second, above 0."""
    prefill: int = 0
    """Number of prefill workers, besides the others, which are decode workers then. 0: every worker does both."""
    stream_interval: int = 1
    """Tokens in each piece of a response after the first token. Every token has its own time stamp all the same."""
    mean_output_tokens: float = 0.0
    """Mean length of outputs that end by themselves, 0 or more; 0 ends them at their maximum only."""
    mode: str = "forecast"
    """Routing mode of the Scheduler."""
    scheduler_config: Path | None = None
    """File with options of the Scheduler, which replaces ``mode``; None for none."""
    has_text: bool = False
    """Whether the engines publish a small tokenizer, so that the Frontend takes and returns text."""
    model: str = "mock-model"
    """Name of the model that the engines serve."""
    component: str = "workers"
    """Component of the engines."""
    namespace: str = "kvrouter"
    """Namespace of all processes."""
    http_port: int = 0
    """Port of the HTTP API; 0 chooses a free one."""
    grpc_port: int = 0
    """Port of the Frontend's gRPC server; 0 chooses a free one."""
    restarts: bool = False
    """Whether a process that ends by itself after the system was ready is restarted. Otherwise the system ends."""

    secure: bool = False
    """Whether every connection is encrypted and authenticated, with certificates of a development CA."""

    frontend_options: tuple[str, ...] = ()
    """Further flags of the Frontend."""
    api_key: str = ""
    """Key with which to ask the Frontend whether it is ready, if ``frontend_options`` name a file of API keys."""

    log_level: str = "info"
    """Least level of the services' log lines."""

    def __post_init__(self) -> None:
        for name in ("workers", "blocks", "block_size", "sequences", "stream_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', ' ')} is {getattr(self, name)}: expected 1 or more")
        if self.prefill < 0:
            raise ValueError(f"prefill is {self.prefill}: expected 0 or more")
        if not 0 < self.clock < float("inf"):
            raise ValueError(f"clock factor is {self.clock}: expected a finite number above 0")


class Stack:
    """A running system. Addresses are host:port."""

    def __init__(self, options: StackOptions) -> None:
        reserve(options.http_port, options.grpc_port)
        self.options = options
        self.credentials = self._make_credentials() if options.secure else None
        """Certificates, keys and passwords of all processes; None if connections are plain text."""
        self.nats = NatsServer(options.directory / "nats", credentials=self.credentials)
        self.etcd = EtcdServer(options.directory / "etcd", credentials=self.credentials)
        self.frontend = f"127.0.0.1:{options.grpc_port or free_port()}"
        """gRPC address of the Frontend."""
        self.scheduler = f"127.0.0.1:{free_port()}"
        """gRPC address of the Scheduler."""
        self.indexer = f"127.0.0.1:{free_port()}"
        """gRPC address of the Indexer."""
        self.http = f"127.0.0.1:{options.http_port or free_port()}"
        """HTTP address of the Frontend."""
        self.worker_metrics = [f"127.0.0.1:{free_port()}" for _ in range(options.workers + options.prefill)]
        """HTTP address of each worker's metrics."""
        self.processes: dict[str, ManagedProcess] = {}
        """Services and workers by name."""
        self.tls = None if self.credentials is None else self.credentials.admin_tls()
        """TLS with which to reach the services as an administrator; None if connections are plain text."""
        self._tokenizer = options.directory / "tokenizer"
        self._ready = False
        self._stopping = False

    async def start(self, watchers: asyncio.TaskGroup, say: Callable[[str], None]) -> None:
        """Starts all processes and returns when every worker could serve a request.

        Raises:
            StackFailed: the system is not ready after a minute.
            StartFailed, BinaryMissing: nats-server or etcd cannot run.
        """
        if self.options.has_text:
            self._tokenizer.mkdir(exist_ok=True)
            await asyncio.to_thread(write_small_tokenizer, self._tokenizer)
        say("starting nats-server and etcd")
        await asyncio.gather(self.nats.start(), self.etcd.start())
        for server in (self.nats, self.etcd):
            watchers.create_task(self._keep_server(server, say))
        say(f"starting {len(self.worker_metrics)} workers, indexer, scheduler and frontend")
        for command in self._commands():
            await self._start_process(command)
            watchers.create_task(self._keep_process(command, say))
        say("waiting until every part is ready")
        await self._until_ready()
        self._ready = True

    async def stop(self) -> None:
        """Stops all services together, then nats-server and etcd, which they depend on."""
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
            "--log-level",
            options.log_level,
        )
        host, _, port = self.http.rpartition(":")
        at = ("--bind", self.frontend, "--host", host, "--port", port)
        commands = [
            self._command("indexer", "indexer", *where, "--bind", self.indexer),
            self._command("scheduler", "scheduler", *where, "--bind", self.scheduler, *self._routing()),
            self._command("frontend", "frontend", *where, *at, *options.frontend_options),
        ]
        text: tuple[str, ...] = ()
        if options.has_text:
            text = ("--tokenizer", str(self._tokenizer), "--vocabulary-size", str(VOCABULARY_SIZE))
        for number, metrics in enumerate(self.worker_metrics, start=1):
            commands.append(
                self._command(
                    f"worker-{number}",
                    "mocker",
                    *(*where, "--bind", "127.0.0.1:0", "--http-bind", metrics),
                    *(
                        "--component",
                        self._component(number),
                        "--role",
                        self._role(number),
                        "--model",
                        options.model,
                        "--worker-id",
                        str(number),
                    ),
                    *("--num-blocks", str(options.blocks), "--block-size", str(options.block_size)),
                    *("--host-blocks", str(options.host_blocks)),
                    *("--max-sequences", str(options.sequences)),
                    *text,
                    *("--clock-factor", str(options.clock), "--stream-interval", str(options.stream_interval)),
                    *("--mean-output-tokens", str(options.mean_output_tokens)),
                    account=Account("worker", number, self._component(number)),
                )
            )
        return commands

    def _role(self, number: int) -> str:
        """Returns the role of a worker. In a disaggregated system the first ones decode, the others compute prompts."""
        if not self.options.prefill:
            return "both"
        return "decode" if number <= self.options.workers else "prefill"

    def _make_credentials(self) -> Credentials:
        workers = [(self._component(number), number) for number in range(1, self.options.workers + 1)]
        components = tuple(dict.fromkeys(component for component, _ in workers))
        return Credentials(self.options.directory / "certs", Namespace(self.options.namespace, components), workers)

    def _component(self, number: int) -> str:
        return self._role(number) if self.options.prefill else self.options.component

    def _routing(self) -> list[str]:
        config = self.options.scheduler_config
        return ["--router-mode", self.options.mode] if config is None else ["--config", str(config)]

    def _command(self, name: str, service: str, *arguments: str, account: Account | None = None) -> Command:
        security = self._security(account or Account(service))
        program = (sys.executable, "-m", f"kvrouter.{service}")
        return Command(name, (*program, *arguments, *security), service_environment(os.environ))

    def _security(self, account: Account) -> tuple[str, ...]:
        """Returns the flags with which a process protects its connections and authenticates."""
        return () if self.credentials is None else self.credentials.identities[account.name].options()

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
                except StartFailed:  # also raised if it was stopped meanwhile
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
                    await until_serving(target, service, self.tls, name.lower())
                async with open_channel(
                    self.frontend, tls=self.tls, role="frontend", api_key=self.options.api_key
                ) as channel:
                    frontend = cast(
                        "Frontend", remote(frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"], channel)
                    )
                    while missing := await self._missing_workers(frontend) or await self._missing_text(frontend):  # noqa: ASYNC110
                        await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise StackFailed(
                f"not ready after {_READY_SECONDS:.0f} s: {missing}; logs are in {self.options.logs}"
            ) from None

    async def _missing_text(self, frontend: Frontend) -> str:
        """Returns why a chat might not be served; empty if the system takes no text, or served a word."""
        if not self.options.has_text:
            return ""
        request = FrontendServiceGenerateRequest(
            model=self.options.model, prompt_text="ready", request_id="ready-check"
        )
        request.stop_conditions.max_tokens = 1
        try:
            async with aclosing(frontend.generate(request, deadline=Deadline.after(5))) as pieces:
                async for _ in pieces:
                    pass
        except KvRouterError as error:
            return f"the Frontend answers {error.code.name}, {error.message}"
        return ""

    async def _missing_workers(self, frontend: Frontend) -> str:
        """Returns why a worker might not serve a request; empty if all can."""
        found = 0
        for component in ("", "prefill") if self.options.prefill else ("",):
            request = FrontendServiceGetPotentialLoadsRequest()
            request.request.model = self.options.model
            request.request.token_ids.ids.extend(range(self.options.block_size))
            if component:
                request.request.component.namespace, request.request.component.name = self.options.namespace, component
            try:
                found += len((await frontend.get_potential_loads(request, deadline=Deadline.after(2))).loads)
            except KvRouterError as error:
                return f"the Frontend answers {error.code.name}, {error.message}"
        expected = len(self.worker_metrics)
        return "" if found == expected else f"{found} of {expected} workers are known"


async def until_serving(target: str, service: str, tls: Tls | None = None, role: str = "") -> None:
    """Returns when a service is ready by grpc.health."""
    async with open_channel(target, tls=tls, role=role) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while True:
            with suppress(grpc.aio.AioRpcError):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=2)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(_POLL_SECONDS)


@asynccontextmanager
async def running_stack(options: StackOptions, say: Callable[[str], None] = lambda _: None) -> AsyncIterator[Stack]:
    """Runs a system while the context lasts. Cancels the context if a process dies and is not restarted.

    Raises:
        ProcessDied: a process ended by itself and is not restarted.
        StackFailed, StartFailed, BinaryMissing: the system did not become ready.
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
    """Returns the environment without settings for other systems, such as NATS_SERVER."""
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT_SETTINGS or not (name.startswith("KVROUTER_") or name in {"NATS_SERVER", "ETCD_ENDPOINTS"})
    }


def why_not_free(port: int) -> str:
    """Returns why a loopback port cannot be listened on; empty if it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return "it is taken" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
    return ""


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the death of a process if there is one, since other failures are its consequences."""
    died = group.subgroup(ProcessDied) or group
    error: BaseException = died
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
