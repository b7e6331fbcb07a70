"""A whole system of processes of its own: each of them can be frozen, killed and started again under its name.

Two Frontends, two Schedulers, two Indexers, three workers, NATS and etcd.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from kvrouter.devtools.system.processes import with_parent
from kvrouter.devtools.system.servers import EtcdServer, NatsServer
from kvrouter.runtime.contracts import Frontend, Indexer, Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import frontend_pb2, indexer_pb2, scheduler_pb2
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ServiceRegistration, WorkerRegistration
from kvrouter.v1.scheduler_pb2 import GetStatusRequest, GetStatusResponse
from prometheus_client import CollectorRegistry

from . import newer_etcd
from .shifted_clock import set_clock
from .worker_process import SOCKET

COMPONENT = ComponentName("fleet", "workers")
BLOCK_SIZE = 8
LEASE_SECONDS = 3
PATIENCE_SECONDS = 90.0
CALL_SECONDS = 5.0
POLL_SECONDS = 0.1
FRONTENDS = ("frontend-0", "frontend-1")
SCHEDULERS = ("scheduler-0", "scheduler-1")
INDEXERS = ("indexer-0", "indexer-1")
WORKERS = {"worker-1": 1, "worker-2": 2, "worker-3": 3}
"""Worker ids by name."""
SERVERS = ("nats", "etcd")

_TREE = Path(__file__).parents[2]
_COMMON = ("--lease-seconds", str(LEASE_SECONDS))
_OPTIONS = {
    "frontend": ("--port", "0", "--worker-probe-seconds", "0.5"),
    "scheduler": ("--http-bind", "", "--session-grace-seconds", "5", "--overload-lag-ms", "0"),
    "indexer": ("--http-bind", "", "--worker-grace-seconds", "1", "--compare-seconds", "5"),
    "worker": (
        *("--http-bind", "", "--block-size", str(BLOCK_SIZE), "--num-blocks", "384", "--stream-interval", "4"),
        *("--heartbeat-seconds", "0.5", "--load-report-seconds", "0.5"),
    ),
}
_MODULES = {kind: f"kvrouter.{kind}" for kind in _OPTIONS} | {"worker": "tests.faults.worker_process"}
_STUBS = {
    "frontend": frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"],
    "scheduler": scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
    "indexer": indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"],
}

Registration = ServiceRegistration | WorkerRegistration


@dataclass
class Member:
    """A process of the fleet."""

    kind: str
    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    process: asyncio.subprocess.Process | None = None
    former: Registration | None = None
    """What was registered when it was started last: of the process before it."""


@dataclass
class Fleet:
    """The processes, what is registered of them, and stubs of those that serve."""

    directory: Path
    nats: NatsServer
    etcd: EtcdServer
    registered: Directory
    exits: AsyncExitStack
    members: dict[str, Member] = field(default_factory=dict)
    _stubs: dict[str, Any] = field(default_factory=dict)

    async def start_all(self, *, scheduler_options: tuple[str, ...] = (), shifted_clocks: bool = False) -> None:
        """Starts every process, and returns when all are ready.

        Args:
            scheduler_options: Further options of the Schedulers.
            shifted_clocks: Whether ``shift_clock`` can be used on the processes.
        """
        for name in (*SCHEDULERS, *INDEXERS, *FRONTENDS, *WORKERS):
            kind = name.partition("-")[0]
            clock = self.directory / f"{name}.clock"
            set_clock(clock, 0)
            launcher = ("tests.faults.shifted_clock", str(clock)) if shifted_clocks else ()
            self.members[name] = Member(
                kind,
                name,
                (
                    *(sys.executable, "-m", *launcher, _MODULES[kind], "--instance-id", name),
                    *("--namespace", COMPONENT.namespace, "--nats", self.nats.url, "--etcd", self.etcd.endpoint),
                    *(*_COMMON, *_OPTIONS[kind], *(scheduler_options if kind == "scheduler" else ())),
                    *(("--component", COMPONENT.name, "--worker-id", str(WORKERS[name])) if name in WORKERS else ()),
                ),
                {SOCKET: str(self.block_table_socket(name))},
            )
        for name in self.members:
            await self._start(name)
        for name in self.members:
            await self.ready(name)

    async def _start(self, name: str) -> None:
        member = self.members[name]
        member.former = self.registration(name)
        self.block_table_socket(name).unlink(missing_ok=True)
        with self.log(name).open("ab") as log:
            member.process = await asyncio.create_subprocess_exec(
                *with_parent(*member.command),
                stderr=log,
                cwd=_TREE,
                env={**os.environ, **member.environment},
            )
        self.exits.push_async_callback(self._end, member.process)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            process.kill()
        await process.wait()

    async def ready(self, name: str) -> None:
        """Returns when the process that was started last is registered and serves."""
        member = self.members[name]

        def is_new(_: Directory) -> bool:
            found = self.registration(name)
            return found not in (None, member.former) and getattr(found, "ready", True)

        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.registered.wait_for(is_new)
        if member.kind in _STUBS:
            channel = await self.exits.enter_async_context(open_channel(self._endpoint(name)))
            self._stubs[name] = remote(_STUBS[member.kind], channel)

    def registration(self, name: str) -> Registration | None:
        """What etcd has of a process, as far as is known."""
        if name in WORKERS:
            view = self.registered.components.get(COMPONENT)
            return view.workers.get(WORKERS[name]) if view else None
        return self.registered.services(name.partition("-")[0]).get(name)

    def _endpoint(self, name: str) -> str:
        found = self.registration(name)
        assert found is not None, f"{name} is not registered"
        return found.endpoint

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def block_table_socket(self, name: str) -> Path:
        return self.directory / f"{name}.socket"

    def freeze(self, name: str) -> None:
        """Stops a process as SIGSTOP does: its connections stay open and nothing answers."""
        self._signal(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self._signal(name, signal.SIGCONT)

    def _signal(self, name: str, which: signal.Signals) -> None:
        if name in SERVERS:
            server = self._server(name)
            server.pause() if which == signal.SIGSTOP else server.resume()
        else:
            process = self.members[name].process
            assert process is not None
            process.send_signal(which)

    async def kill(self, name: str) -> None:
        """Ends a process as ``kill -9`` does."""
        if name in SERVERS:
            await self._server(name).kill()
        else:
            process = self.members[name].process
            assert process is not None
            await self._end(process)

    async def restart(self, name: str) -> None:
        """Starts a process that was killed; returns when it serves."""
        if name in SERVERS:
            await self._server(name).start()
        else:
            await self._start(name)
            await self.ready(name)

    def _server(self, name: str) -> NatsServer | EtcdServer:
        return self.nats if name == "nats" else self.etcd

    def shift_clock(self, name: str, seconds: int) -> None:
        """Sets the wall clock of a process apart from the true one."""
        set_clock(self.directory / f"{name}.clock", seconds)

    def serving_frontends(self) -> list[str]:
        """The Frontends whose processes live: a load balancer knows a refused connection, but not a frozen process."""
        return [name for name in FRONTENDS if (process := self.members[name].process) and process.returncode is None]

    def frontend(self, name: str) -> Frontend:
        return cast(Frontend, self._stubs[name])

    def indexer(self, name: str) -> Indexer:
        return cast(Indexer, self._stubs[name])

    async def scheduler_status(self, name: str) -> GetStatusResponse:
        scheduler = cast(Scheduler, self._stubs[name])
        return await scheduler.get_status(GetStatusRequest(), deadline=Deadline.after(CALL_SECONDS))

    async def deciding_scheduler(self) -> tuple[str, str]:
        """The Scheduler that has the sessions of all Frontends, and the other one."""
        while True:
            sessions = [(await self.scheduler_status(name)).sessions for name in SCHEDULERS]
            if sorted(sessions) == [0, len(FRONTENDS)]:
                return SCHEDULERS if sessions[0] else SCHEDULERS[::-1]
            await asyncio.sleep(POLL_SECONDS)

    async def until_unregistered(self, name: str) -> None:
        """Returns when etcd no longer has the process: its lease has run out."""
        await self.registered.wait_for(lambda _: self.registration(name) is None)


@asynccontextmanager
async def fleet(directory: Path) -> AsyncIterator[Fleet]:
    """Servers of its own and no process yet; all that was started is killed at the end."""
    nats, etcd = NatsServer(directory / "nats"), EtcdServer(directory / "etcd", binary=newer_etcd.find())
    async with AsyncExitStack() as exits:
        for server in (nats, etcd):
            exits.push_async_callback(server.kill)
            await server.start()
        registered = Directory(etcd.endpoint, COMPONENT.namespace, CollectorRegistry())
        following = asyncio.create_task(registered.run())
        try:
            yield Fleet(directory, nats, etcd, registered, exits)
        finally:
            following.cancel()
            await asyncio.wait({following})
