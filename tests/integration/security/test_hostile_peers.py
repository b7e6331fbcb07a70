"""Peers without a credential on every port, and services that speak garbage: others are served, and memory is bounded.

``KVROUTER_ATTACK_SECONDS`` sets how long the attacks last. A minute or more also reports what they cost.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ...attacked_system import AttackedSystem, Served, attacked_system, clients, serve
from ...hostile_services import HOSTILE_MODEL
from ...hostile_traffic import Attack
from ...listening import listening_addresses

SECONDS = float(os.environ.get("KVROUTER_ATTACK_SECONDS") or 8)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(int(2 * SECONDS) + 240)]
ALONE_SECONDS = min(60.0, SECONDS / 2)
MAX_GROWTH_BYTES = 64 << 20
CONNECTIONS = 1000
Record = Callable[[str, object], None]


@pytest.fixture
async def system(
    etcd_endpoint: str, nats_url: str, namespace: str, tmp_path: Path
) -> AsyncIterator[tuple[AttackedSystem, Served]]:
    """A system, and how its clients were served alone."""
    async with attacked_system(etcd_endpoint, nats_url, namespace, tmp_path) as running:
        yield running, await serve(running, after(ALONE_SECONDS))


def after(seconds: float) -> Callable[[], bool]:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    return lambda: loop.time() > end


@asynccontextmanager
async def process(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a program until the context ends."""
    started = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        yield started
    finally:
        with suppress(ProcessLookupError):
            started.kill()
        await started.wait()


async def exposition(address: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as response:
        return await response.text()


def report(record: Record, alone: Served, attacked: Served) -> None:
    """Records how clients were served, and what the processes used."""
    for name in alone.seconds:
        for share in (0.5, 0.99):
            times = [1e3 * each.percentile(name, share) for each in (alone, attacked)]
            record(f"{name} p{100 * share:g}", f"{times[0]:.1f} -> {times[1]:.1f} ms of {len(attacked.seconds[name])}")
    for name, size in attacked.memory.items():
        record(f"{name} memory", f"+{(size - alone.memory[name]) / (1 << 20):.1f} MiB")
        record(f"{name} cores", f"{alone.cpu_share[name]:.2f} -> {attacked.cpu_share[name]:.2f}")


@pytest.mark.full
async def test_peers_without_a_credential_harm_nobody(
    system: tuple[AttackedSystem, Served], record_property: Record
) -> None:
    running, alone = system
    ports = set(running.http.values()) | set(running.grpc.values())
    assert set(listening_addresses(each.pid for each in running.processes.values())) == ports
    attack = Attack(list(running.http.values()), list(running.grpc.values()), SECONDS, CONNECTIONS)
    async with process(*attack.arguments()) as attacker:
        output = asyncio.create_task(attacker.communicate())
        attacked = await serve(running, output.done)
    record_property("attack", (await output)[0].decode())
    report(record_property, alone, attacked)
    assert attacker.returncode == 0
    metrics = {name: await exposition(address) for name, address in running.http.items() if name in running.processes}
    assert all(re.search(r'(?m)^kvrouter_bound_limit{bound="grpc_calls"', text) for text in metrics.values())
    closed = [re.findall(r"(?m)^kvrouter_grpc_connections_closed_total (\S+)", text) for text in metrics.values()]
    record_property("closed gRPC connections", closed)
    assert all(closed)
    await running.check_running()
    assert {name: size - alone.memory[name] for name, size in attacked.memory.items()} == {
        name: pytest.approx(0, abs=MAX_GROWTH_BYTES) for name in alone.memory
    }


@pytest.mark.full
async def test_services_that_speak_garbage_harm_nobody(
    system: tuple[AttackedSystem, Served], etcd_endpoint: str, namespace: str, record_property: Record
) -> None:
    running, alone = system
    seed = os.environ.get("KVROUTER_SEED") or str(os.getpid())
    record_property("seed", seed)
    hostile = ("nice", "-n", "19", sys.executable, "-m", "tests.hostile_services", etcd_endpoint, namespace, seed)
    calls = 0
    done = after(SECONDS)

    async def call(run: Callable[[], Any]) -> None:
        nonlocal calls
        while not done():
            with suppress(Exception):
                await run()
            calls += 1
            await asyncio.sleep(0.2)

    async with (
        process(*hostile),
        clients(running, HOSTILE_MODEL, seconds=2) as deceived,
        asyncio.TaskGroup() as group,
    ):
        for each in deceived.values():
            group.create_task(call(each))
        attacked = await serve(running, done)
    report(record_property, alone, attacked)
    assert calls > 0
    await running.check_running()
    assert {name: size - alone.memory[name] for name, size in attacked.memory.items()} == {
        name: pytest.approx(0, abs=MAX_GROWTH_BYTES) for name in alone.memory
    }
