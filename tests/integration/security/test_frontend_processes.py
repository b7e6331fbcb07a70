"""The processes of one Frontend encrypt what they say to each other, too."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from kvrouter.devtools.system.credentials import Credentials
from kvrouter.devtools.system.ports import free_ports
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.devtools.system.servers import EtcdServer, NatsServer
from kvrouter.devtools.system.stack import service_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
async def frontend(
    credentials: Credentials, secure_nats: NatsServer, secure_etcd: EtcdServer, tmp_path: Path
) -> AsyncIterator[tuple[int, int]]:
    """Ports of the HTTP API and of the ops server."""
    port, ops = free_ports(2)
    arguments = (
        *("--namespace", "secure", "--processes", "2", "--port", str(port), "--http-bind", f"127.0.0.1:{ops}"),
        *("--etcd", secure_etcd.endpoint, "--nats", secure_nats.url, "--drain-seconds", "0"),
        *credentials.identities["frontend"].options(),
    )
    program = (sys.executable, "-m", "kvrouter.frontend")
    process = await ManagedProcess.start(Command("frontend", (*program, *arguments), service_environment({})), tmp_path)
    yield port, ops
    await process.stop(10)


async def read(url: str, context: ssl.SSLContext) -> str:
    """Returns what a Frontend says once it listens."""
    async with asyncio.timeout(120), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url, ssl=context) as response:
                    return await response.text()
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.1)


async def test_metrics_of_all_processes_are_read_over_tls(credentials: Credentials, frontend: tuple[int, int]) -> None:
    context = credentials.admin_tls().client_context()
    port, ops = frontend
    assert "kvrouter_frontend_processes" in await read(f"https://127.0.0.1:{ops}/metrics", context)
    # The process that answers asks its parent for the metrics of the others.
    assert "kvrouter_frontend_processes" in await read(f"https://127.0.0.1:{port}/metrics", context)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://127.0.0.1:{ops}/metrics")
