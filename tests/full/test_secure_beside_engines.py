"""The ports of a sidecar and of a relay with TLS admit only who authenticates, and there are no others."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvrouter.devtools.system.certificates import DevelopmentAuthority
from kvrouter.devtools.system.credentials import Credentials
from kvrouter.devtools.system.ports import free_ports
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.devtools.system.servers import EtcdServer, NatsServer
from kvrouter.devtools.system.stack import service_environment
from kvrouter.net.etcd import connect
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import WorkerRegistration

from ..integration.security.conftest import credentials, secure_etcd, secure_nats
from ..integration.security.test_secure_system import Client, Port, admitted_calls, grpc_answers, http_answers
from ..listening import listening_addresses

__all__ = ["credentials", "secure_etcd", "secure_nats"]

POOL = ComponentName("secure", "pool")
pytestmark = pytest.mark.timeout(180)


@dataclass(frozen=True)
class Beside:
    """A process beside an engine, with its worker's registration and the address of its metrics."""

    process: ManagedProcess
    worker_id: int
    http: str

    async def endpoint(self, credentials: Credentials, etcd: EtcdServer) -> str:
        """Waits until the worker is registered; returns its gRPC address."""
        async with asyncio.timeout(120), connect(credentials.etcd_access("admin", etcd.endpoint)) as client:
            while (found := await client.get(POOL.worker_key(self.worker_id).encode())) is None:
                await asyncio.sleep(0.1)
            return WorkerRegistration.FromString(found.value).endpoint


@pytest.fixture
async def processes(
    credentials: Credentials, secure_nats: NatsServer, secure_etcd: EtcdServer, tmp_path: Path
) -> AsyncIterator[list[Beside]]:
    api, events, sidecar, relay = free_ports(4)
    where = ("--namespace", "secure", "--component", "pool", "--etcd", secure_etcd.endpoint, "--nats", secure_nats.url)
    kv_events = f'{{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://127.0.0.1:{events}"}}'
    mocker = ("mocker", "--openai", "--model", "m", "--bind", f"127.0.0.1:{api}", "--http-bind", "")
    commands = {
        "engine": (*mocker, "--kv-events-config", kv_events),
        "sidecar": ("sidecar", *where, "--engine", f"http://127.0.0.1:{api}", "--worker-id", "1"),
        "relay": (
            *("relay", *where, "--kv-events", f"tcp://127.0.0.1:{events}", "--model", "m", "--block-size", "16"),
            *("--worker-id", "2", "--max-model-len", "262144"),  # as the engine tells the sidecar
        ),
    }
    found = []
    async with AsyncExitStack() as exits:
        for name, (module, *arguments) in commands.items():
            worker_id, port = {"sidecar": (1, sidecar), "relay": (2, relay)}.get(name, (0, 0))
            if worker_id:
                identity = credentials.identities[f"worker-{worker_id:016x}"]
                arguments += ["--http-bind", f"127.0.0.1:{port}", *identity.options()]
            program = (sys.executable, "-m", f"kvrouter.{module}", *arguments)
            process = await ManagedProcess.start(Command(name, program, service_environment({})), tmp_path)
            exits.push_async_callback(process.stop, 10)
            if worker_id:
                found.append(Beside(process, worker_id, f"127.0.0.1:{port}"))
        yield found


async def test_only_certificates_of_callers_pass(
    credentials: Credentials, secure_etcd: EtcdServer, processes: list[Beside], tmp_path: Path
) -> None:
    ours = credentials.authority
    stranger = DevelopmentAuthority(tmp_path / "stranger")
    administrator = Client("administrator", ours.paths("admin"), ours.certificate_path)
    strangers = [
        Client("no certificate", None, ours.certificate_path),
        Client("certificate of another authority", stranger.issue("admin"), ours.certificate_path),
        Client("server of another authority", ours.paths("admin"), stranger.certificate_path),
    ]
    for each in processes:
        port = Port("worker", await each.endpoint(credentials, secure_etcd))
        http = Port("worker", each.http)
        assert await grpc_answers(port, administrator)
        assert await http_answers(http, administrator, "/metrics")
        for client in strangers:
            assert not await grpc_answers(port, client), (port, client)
            assert not await http_answers(http, client, "/metrics"), (http, client)
        # The other worker has a certificate of the authority, but no business here.
        assert await admitted_calls(port, ours, f"worker-{3 - each.worker_id:016x}") == set()
        assert set(listening_addresses([each.process.pid])) == {port.address, each.http}
