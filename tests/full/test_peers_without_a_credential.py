"""Peers without a credential flood the gRPC ports of services: memory stays bounded, clients with a key are served."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from kvrouter.devtools.system.ports import free_ports
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.devtools.system.stack import service_environment
from kvrouter.v1.frontend_pb2 import ListModelsRequest

from ..hostile_peer import HostilePeer, hostile_peer
from ..hostile_traffic import FLOODS
from ..integration.frontend.access.keys import Keys

pytestmark = pytest.mark.timeout(300)

CONNECTIONS = 200
ROUNDS = 100
"""Rounds of a flood. In each, every tenth connection takes a turn, and a client with a key makes a call."""
MAX_GROWTH_BYTES = 64 << 20
LIST_MODELS = "/kvrouter.v1.FrontendService/ListModels"


@dataclass
class Services:
    processes: dict[str, ManagedProcess]
    addresses: dict[str, str]
    key: str

    def memory(self, name: str) -> int:
        status = Path(f"/proc/{self.processes[name].pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) << 10


@pytest.fixture
async def services(nats_url: str, etcd_endpoint: str, namespace: str, tmp_path: Path) -> AsyncIterator[Services]:
    keys = Keys(tmp_path / "keys.json")
    keys.add("client")
    keys.write()
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    http, *ports = free_ports(4)
    processes, addresses = {}, {}
    async with AsyncExitStack() as exits:
        for name, port in zip(("indexer", "scheduler", "frontend"), ports, strict=True):
            addresses[name] = f"127.0.0.1:{port}"
            arguments = ["--namespace", namespace, "--etcd", etcd_endpoint, "--nats", nats_url]
            arguments += ["--bind", addresses[name], "--service-token-file", str(token)]
            if name == "frontend":
                arguments += ["--port", str(http), "--api-keys", str(keys.path)]
            program = (sys.executable, "-m", f"kvrouter.{name}", *arguments)
            process = await ManagedProcess.start(Command(name, program, service_environment(os.environ)), tmp_path)
            exits.push_async_callback(process.stop, 10)
            processes[name] = process
        for address in addresses.values():
            async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(60):
                await channel.channel_ready()
        yield Services(processes, addresses, keys["client"])


async def flood(address: str, attack: Callable[[HostilePeer], object], serve: Callable[[], Any]) -> None:
    async with AsyncExitStack() as exits:
        peers = [await exits.enter_async_context(hostile_peer(address)) for _ in range(CONNECTIONS)]
        for number in range(ROUNDS):
            for place in range(number % 10, CONNECTIONS, 10):
                if peers[place].writer.is_closing() or peers[place].reader.at_eof():
                    peers[place] = await exits.enter_async_context(hostile_peer(address))
                attack(peers[place])
            await serve()


@pytest.mark.parametrize("attack", FLOODS.values(), ids=FLOODS.keys())
async def test_a_flood_takes_little_memory_and_no_service(
    services: Services, attack: Callable[[HostilePeer], object]
) -> None:
    async with grpc.aio.insecure_channel(services.addresses["frontend"]) as channel:
        call: Any = channel.unary_unary(LIST_MODELS, request_serializer=ListModelsRequest.SerializeToString)

        async def list_models() -> None:
            await call(ListModelsRequest(), metadata=[("authorization", f"Bearer {services.key}")], timeout=30)

        await list_models()
        for name, address in services.addresses.items():
            before = services.memory(name)
            await flood(address, attack, list_models)
            assert services.memory(name) - before < MAX_GROWTH_BYTES, name
