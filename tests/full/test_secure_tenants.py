"""Processes with certificates, accounts, a service token, and keys of two tenants: all of it together serves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from kvrouter.devtools.system.credentials import Credentials
from kvrouter.devtools.system.ports import free_ports
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.devtools.system.servers import EtcdServer, NatsServer
from kvrouter.devtools.system.stack import service_environment
from kvrouter.frontend.access.key_file import TenantEntry

from ..integration.frontend.access.keys import Keys
from ..integration.security.conftest import credentials, secure_etcd, secure_nats
from ..integration.security.test_secure_system import Port, admitted_calls

__all__ = ["credentials", "secure_etcd", "secure_nats"]

pytestmark = pytest.mark.timeout(240)


@dataclass(frozen=True)
class Secured:
    http: str
    scheduler: str
    worker: str


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    made = Keys(tmp_path / "keys.json")
    made.add("one", tenant="t", models=["m"])
    made.add("two", tenant="u", models=["another"])
    made.tenants = [TenantEntry(name="t", isolated=True), TenantEntry(name="u")]
    made.write()
    return made


@pytest.fixture
async def secured(
    credentials: Credentials, secure_nats: NatsServer, secure_etcd: EtcdServer, keys: Keys, tmp_path: Path
) -> AsyncIterator[Secured]:
    http, scheduler, worker = free_ports(3)
    account = "worker-0000000000000001"
    salted = ("--cache-salt-key-file", str(credentials.folder / "cache-salt.key"))
    pool = ("--component", "pool", "--worker-id", "1", "--model", "m", "--bind", f"127.0.0.1:{worker}")
    commands = {
        "indexer": ("indexer",),
        "scheduler": ("scheduler", "--bind", f"127.0.0.1:{scheduler}"),
        account: ("mocker", *pool),
        "frontend": ("frontend", "--port", str(http), "--api-keys", str(keys.path), *salted),
    }
    where = ("--namespace", "secure", "--etcd", secure_etcd.endpoint, "--nats", secure_nats.url)
    async with AsyncExitStack() as exits:
        for identity, (service, *arguments) in commands.items():
            token = credentials.folder / ("service-token.digest" if identity == account else "service-token")
            options = (*where, *credentials.identities[identity].options(), "--service-token-file", str(token))
            program = (sys.executable, "-m", f"kvrouter.{service}", *arguments, *options)
            process = await ManagedProcess.start(Command(service, program, service_environment({})), tmp_path)
            exits.push_async_callback(process.stop, 10)
        yield Secured(f"https://127.0.0.1:{http}", f"127.0.0.1:{scheduler}", f"127.0.0.1:{worker}")


async def test_tenants_are_served_and_confined_in_a_secure_system(
    credentials: Credentials, secured: Secured, keys: Keys
) -> None:
    context = credentials.admin_tls().client_context()
    body = {"model": "m", "prompt": list(range(64)), "max_tokens": 4}
    async with aiohttp.ClientSession() as session:

        async def complete(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            url = f"{secured.http}/v1/completions"
            async with session.post(url, json=body, ssl=context, headers=headers) as response:
                return response.status

        async with asyncio.timeout(120):
            while True:  # 503 until the services have found each other
                try:
                    if (status := await complete(keys["one"])) not in {404, 503}:
                        break
                except aiohttp.ClientConnectorError:
                    pass
                await asyncio.sleep(0.1)
        assert status == 200
        assert await complete("") == 401
        assert await complete(keys["one"][:-1] + "x") == 401
        assert await complete(keys["two"]) in {403, 404}
    # Even an administrator's certificate opens nothing without the token.
    for port in (Port("scheduler", secured.scheduler), Port("worker", secured.worker)):
        assert await admitted_calls(port, credentials.authority, "admin") == set()
