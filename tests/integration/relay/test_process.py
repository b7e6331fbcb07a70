"""``kvrouter relay`` as a process: its options, its end, and its death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kvrouter.net.etcd import connect
from kvrouter.publisher.config import WorkerConfig
from kvrouter.publisher.snapshots.rank_file import NO_POSITION
from kvrouter.publisher.snapshots.resume import positions
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import WorkerRegistration

from .engine import Engine, stored

COMMAND = [str(Path(sys.executable).with_name("kvrouter")), "relay"]
WORKER = 7


async def run(*options: str) -> tuple[int, str]:
    """Returns the status and what the command wrote."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


class Process:
    """A running relay and its log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.events: list[str] = []

    async def until(self, event: str) -> dict[str, Any]:
        """Waits for a log event."""
        assert self.process.stderr is not None
        async with asyncio.timeout(30):
            while line := await self.process.stderr.readline():
                entry: dict[str, Any] = json.loads(line)
                self.events.append(entry["event"])
                if entry["event"] == event:
                    return entry
        raise AssertionError(f"the relay ended before {event}: {self.events}")

    async def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        async with asyncio.timeout(30):
            return await self.process.wait()


@asynccontextmanager
async def relaying(*options: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(*COMMAND, *options, stderr=asyncio.subprocess.PIPE)
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture
def options(namespace: str, etcd_endpoint: str, nats_url: str, tmp_path: Path) -> list[str]:
    return [
        *("--namespace", namespace, "--etcd", etcd_endpoint, "--nats", nats_url, "--model", "m", "--block-size", "4"),
        *("--worker-id", str(WORKER), "--state", str(tmp_path), "--state-seconds", "0.05"),
        *("--lease-seconds", "2", "--http-bind", ""),
    ]


async def incarnation(namespace: str, etcd_endpoint: str) -> int:
    """Waits for the registration, and returns its incarnation."""
    key = ComponentName(namespace, "workers").worker_key(WORKER).encode()
    async with asyncio.timeout(30), connect(etcd_endpoint) as client:
        while (found := await client.get(key)) is None:
            await asyncio.sleep(0.01)
    return WorkerRegistration.FromString(found.value).ranks[0].incarnation


@pytest.mark.full
async def test_a_killed_relay_resumes(options: list[str], namespace: str, etcd_endpoint: str, tmp_path: Path) -> None:
    engine = Engine()
    await engine.start()
    config = WorkerConfig(
        component=ComponentName(namespace, "workers"),
        model="m",
        block_size=4,
        ranks={0: None},
        worker_id=WORKER,
        state=tmp_path,
        engine_incarnation=engine.events_endpoint,
    )
    try:
        await engine.publish(stored([1], 0))
        sockets = ["--kv-events", engine.events_endpoint, "--kv-replay", engine.replay_endpoint]
        async with relaying(*options, *sockets) as relay:
            await relay.until("registration.written")
            first = await incarnation(namespace, etcd_endpoint)
            while positions(config).get(0, NO_POSITION) == NO_POSITION:
                await asyncio.sleep(0.01)
            assert await relay.end(signal.SIGKILL) == -signal.SIGKILL
        await engine.publish(stored([2], 4, parent=1))
        async with relaying(*options, *sockets) as relay:
            assert (await relay.until("worker.serving"))["resumed"]
            assert await incarnation(namespace, etcd_endpoint) == first
            assert await relay.end(signal.SIGTERM) == 0
    finally:
        await engine.stop()


async def test_a_relay_that_waits_for_its_engine_ends_on_a_signal(options: list[str]) -> None:
    engine = Engine()
    sockets = ["--kv-events", engine.events_endpoint, "--kv-replay", engine.replay_endpoint]
    async with relaying(*options, *sockets) as relay:
        await relay.until("relay.waiting_for_engine")
        assert await relay.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--kv-events", "127.0.0.1:5557"], "kv-events"),
        (["--kv-events", "tcp://127.0.0.1"], "kv-events"),
        (["--kv-events", "tcp://127.0.0.1:5557", "--kv-replay", "udp://x:1"], "kv-replay"),
        (["--kv-events", "tcp://127.0.0.1:5557", "--lora-ids", "x=adapter"], "lora-ids"),
        (["--kv-events", "tcp://127.0.0.1:5557", "--bind", "0.0.0.0:0"], "bind"),
        ([], "kv-events"),
    ],
)
async def test_wrong_options_are_named(options: list[str], wrong: list[str], named: str) -> None:
    status, output = await run(*options, *wrong)
    assert status == 2
    assert named in output.replace("_", "-")
    assert "Traceback" not in output


async def test_an_endpoint_in_use_is_named(options: list[str]) -> None:
    engine = Engine()
    await engine.start()
    endpoint = engine.events_endpoint.replace("127.0.0.1", "*")
    try:
        status, output = await run(*options, "--kv-events", endpoint)
    finally:
        await engine.stop()
    assert status == 1
    assert endpoint in output
    assert "Traceback" not in output


async def test_a_state_needs_a_name(tmp_path: Path) -> None:
    known = ["--kv-events", "tcp://127.0.0.1:5557", "--model", "m", "--block-size", "4"]
    status, output = await run(*known, "--state", os.fspath(tmp_path))
    assert (status, "--worker-id" in output) == (2, True)
