"""``kvrouter component forget``, and processes that refuse to start."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from kvrouter.net.etcd import connect
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import AppliedRecord, ComponentDescriptor, WorkerRegistration


async def run(module: str, *arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await process.communicate()
    return process.returncode, out.decode(), errors.decode()


async def put(etcd: str, key: str, value: bytes) -> None:
    async with connect(etcd) as client:
        await client.put(key.encode(), value)


async def test_a_component_is_forgotten_once_no_worker_is_registered(etcd_endpoint: str, namespace: str) -> None:
    name = ComponentName(namespace, "pool")
    command = ("component", "forget", str(name), "--etcd", etcd_endpoint)
    status, _, errors = await run("kvrouter.cli.main", *command)
    assert status == 1
    assert "no descriptor" in errors
    await put(etcd_endpoint, name.descriptor_key, ComponentDescriptor(model="m", block_size=32).SerializeToString())
    await put(etcd_endpoint, name.worker_key(17), WorkerRegistration(worker_id=17).SerializeToString())
    status, _, errors = await run("kvrouter.cli.main", *command)
    assert status == 1
    assert "registered workers (1: 17)" in " ".join(errors.split())
    async with connect(etcd_endpoint) as client:
        await client.delete(name.worker_key(17).encode())
        status, out, _ = await run("kvrouter.cli.main", *command)
        assert status == 0
        assert "model 'm', 32 tokens a block" in out
        assert await client.get(name.descriptor_key.encode()) is None


async def test_a_descriptor_that_workers_outvote_is_forgotten(etcd_endpoint: str, namespace: str) -> None:
    name = ComponentName(namespace, "pool")
    forged = ComponentDescriptor(model="forged", block_size=32)
    await put(etcd_endpoint, name.descriptor_key, forged.SerializeToString())
    for worker_id in (1, 2):
        registration = WorkerRegistration(worker_id=worker_id, model="m", block_size=16)
        await put(etcd_endpoint, name.worker_key(worker_id), registration.SerializeToString())
    status, out, _ = await run("kvrouter.cli.main", "component", "forget", str(name), "--etcd", etcd_endpoint)
    assert status == 0
    assert "model 'forged'" in out


def cause_of(output: str) -> str:
    """The cause in the last log line, which must be the only error and have no traceback."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert not [line for line in lines if "exception" in line]
    cause: str = lines[-1]["cause"]
    return cause


async def test_a_worker_that_does_not_fit_its_component_is_refused_in_one_line(
    etcd_endpoint: str, nats_url: str, namespace: str
) -> None:
    name = ComponentName(namespace, "workers")
    await put(etcd_endpoint, name.descriptor_key, ComponentDescriptor(model="m", block_size=32).SerializeToString())
    where = ("--namespace", namespace, "--etcd", etcd_endpoint, "--nats", nats_url)
    status, out, errors = await run("kvrouter.mocker", *where, "--model", "m", "--block-size", "16")
    assert status == 1
    cause = cause_of(out + errors)
    assert "block_size: expected 32, this worker has 16" in cause
    assert f"`kvrouter component forget {name}`" in cause


async def test_a_reset_beside_a_live_replica_is_refused_in_one_line(
    etcd_endpoint: str, nats_url: str, namespace: str, tmp_path: Path
) -> None:
    name = ComponentName(namespace, "workers")
    await put(etcd_endpoint, name.descriptor_key, ComponentDescriptor(model="m", block_size=16).SerializeToString())
    await put(etcd_endpoint, name.applied_key("other"), AppliedRecord().SerializeToString())
    where = ("--namespace", namespace, "--etcd", etcd_endpoint, "--nats", nats_url)
    status, out, errors = await run("kvrouter.indexer", *where, "--router-reset-states")
    assert status == 1
    cause = cause_of(out + errors)
    assert "other replicas are live: other" in cause
    assert "--reset-states-even-if-others-live" in cause
