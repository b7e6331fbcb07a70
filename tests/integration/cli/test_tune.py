"""``kvrouter tune --discover``: takes the fleet from the registrations of a running system."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from kvrouter.devcommands.fleet_file import FleetSize, read_fleet
from kvrouter.devtools.system.ports import free_port
from kvrouter.net.etcd import connect
from kvrouter.v1.common_pb2 import BusyThresholds, Role
from kvrouter.v1.names import ComponentName, threshold_key
from kvrouter.v1.registry_pb2 import BusyThresholdsRecord, RankRegistration, WorkerRegistration

SMALL = ("prompts", "--requests", "30", "--seeds", "1", "--processes", "1", "--no-splits", "--discover")


async def tune(*arguments: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli.main", "tune", *SMALL, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return process.returncode, " ".join(out.decode().split())


async def test_the_fleet_is_taken_from_the_registrations(etcd_endpoint: str, namespace: str, tmp_path: Path) -> None:
    rank = RankRegistration(total_blocks=20_000)
    async with connect(etcd_endpoint) as client:
        for worker_id, pool, role in (
            (1, "p", Role.ROLE_PREFILL),
            (2, "d", Role.ROLE_DECODE),
            (3, "d", Role.ROLE_DECODE),
        ):
            worker = WorkerRegistration(worker_id=worker_id, model="m", role=role, block_size=32, ranks=[rank])
            key = ComponentName(namespace, pool).worker_key(worker_id)
            await client.put(key.encode(), worker.SerializeToString())
        thresholds = BusyThresholds(active_prefill_tokens_threshold=50_000)
        record = BusyThresholdsRecord(model="m", thresholds=thresholds)
        await client.put(threshold_key(namespace, "m").encode(), record.SerializeToString())
    written = tmp_path / "tuned.toml"
    status, shown = await tune("--etcd", etcd_endpoint, "--namespace", namespace, "--write", str(written))
    assert status == 0, shown
    assert "of 3 workers on 21 requests" in shown
    assert "present, forecast, 1 prefill from 512 tokens, busy above 50,000 tokens" in shown
    assert read_fleet(written) in {FleetSize(2, 1), FleetSize(3, 0)}


@pytest.mark.full
async def test_an_empty_namespace_and_an_absent_etcd_are_named(etcd_endpoint: str, namespace: str) -> None:
    status, shown = await tune("--etcd", etcd_endpoint, "--namespace", namespace)
    assert status == 2
    assert "no worker is registered" in shown
    absent = f"127.0.0.1:{free_port()}"
    status, shown = await tune("--etcd", absent, "--namespace", namespace)
    assert status == 1
    assert f"etcd at {absent} does not answer" in shown
