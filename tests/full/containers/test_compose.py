"""The plain compose file: start, requests, restarts and stops."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path

import pytest

from .bases import PLAIN
from .engine import inspect
from .system import DEPLOY, SECONDS, System, started
from .traffic import Client, client

SERVERS = ("nats", "etcd")
OURS = tuple(service for service in PLAIN if service not in SERVERS)
RESTARTS_UNSEEN = ("indexer", "worker-1", "worker-2")
"""Services that may restart without a client noticing: another has their work, or requests go on without it."""
LONG = 500  # tokens, some seconds of a simulated engine

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
async def system(images: dict[str, str], compose_command: str, tmp_path: Path) -> AsyncIterator[System]:
    async with started(compose_command, tmp_path, str(DEPLOY / "compose.yaml")) as running:
        yield running


@pytest.fixture
async def calls(system: System) -> AsyncIterator[Client]:
    async with client(f"http://127.0.0.1:{system.http}") as made:
        await made.served()
        yield made


async def test_services_start_after_healthy_servers_and_are_hardened(system: System, calls: Client) -> None:
    healthy = [datetime.fromisoformat(system.first_healthy[server]) for server in SERVERS]
    for service in OURS:
        assert datetime.fromisoformat(system.state(service)["StartedAt"]) >= max(healthy)
    for service in PLAIN:
        host = inspect(system.container(service))["HostConfig"]
        assert host["ReadonlyRootfs"]
        assert host["RestartPolicy"]["Name"] == "unless-stopped"
        status = system.process_status(service)
        assert "Uid:\t10001\t10001\t10001\t10001" in status
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
    assert await calls.status() == 200


@pytest.mark.parametrize("service", PLAIN)
async def test_a_container_restarts_under_load(service: str, system: System, calls: Client) -> None:
    async with calls.load(4) as seen:
        await system.compose("restart", service)
        await system.healthy(service)
        await calls.served()
        if service in RESTARTS_UNSEEN:
            assert set(seen) == {200}, seen
    assert seen[200]


@pytest.mark.parametrize("service", PLAIN)
async def test_a_container_whose_process_dies_comes_back(service: str, system: System, calls: Client) -> None:
    before = system.state(service)["Pid"]
    os.kill(before, signal.SIGKILL)
    async with asyncio.timeout(SECONDS):
        while system.state(service)["Pid"] in {0, before}:
            await asyncio.sleep(0.1)
    await system.healthy(service)
    await calls.served()


async def test_sigterm_lets_a_stream_end(system: System, calls: Client) -> None:
    async with calls.stream(max_tokens=LONG) as response:
        await response.content.readany()
        stopping = asyncio.create_task(system.stop("frontend"))
        rest = await response.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        ended = await stopping
    assert ended["ExitCode"] == 0, await system.compose("logs", "frontend")


async def test_every_service_ends_with_status_0(system: System, calls: Client) -> None:
    for service in reversed(OURS):
        ended = await system.stop(service)
        assert ended["ExitCode"] == 0, await system.compose("logs", service)
