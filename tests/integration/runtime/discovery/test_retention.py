"""Registrations that vanish from etcd: kept while their process answers, and gone at once where it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from kvrouter.net.etcd import connect
from kvrouter.publisher.worker_server import SERVICE
from kvrouter.runtime.discovery import retention
from kvrouter.runtime.process.context import Runtime
from kvrouter.v1.names import ComponentName, service_key
from kvrouter.v1.registry_pb2 import ServiceRegistration, WorkerRegistration

from .test_directory import opened, put_descriptor, until_workers

INDEXER = "kvrouter.v1.IndexerService"


@pytest.fixture
def pool(namespace: str) -> ComponentName:
    return ComponentName(namespace, "pool")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves in such a test does not leave because its time was over."""
    monkeypatch.setattr(retention, "KEPT_SECONDS", 3600.0)


@pytest.fixture
def slow_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What answers in such a test does so in time, however busy the machine is."""
    monkeypatch.setattr(retention, "_PROBE_SECONDS", 30.0)


@asynccontextmanager
async def process(*services: str, serving: bool = True) -> AsyncIterator[str]:
    """A process that answers grpc.health; yields its address."""
    server, servicer = grpc.aio.server(), health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    status = health_pb2.HealthCheckResponse
    for service in services or (SERVICE, INDEXER):
        await servicer.set(service, status.SERVING if serving else status.NOT_SERVING)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def registration(worker_id: int, endpoint: str, *, draining: bool = False) -> bytes:
    return WorkerRegistration(
        worker_id=worker_id,
        model="m",
        block_size=16,
        hash_scheme="xxh3-1337",
        endpoint=endpoint,
        draining=draining,
    ).SerializeToString()


async def put(etcd: str, pool: ComponentName, worker_id: int, value: bytes) -> None:
    async with connect(etcd) as client:
        await client.put(pool.worker_key(worker_id).encode(), value)


async def delete(etcd: str, *keys: str) -> None:
    async with connect(etcd) as client:
        for key in keys:
            await client.delete(key.encode())


async def seen_deleted(etcd: str, runtime: Runtime, pool: ComponentName) -> None:
    """Returns when the directory has seen everything that was written to etcd before."""
    await put(etcd, pool, 99, registration(99, ""))
    await runtime.directory.wait_for(lambda it: 99 in it.components[pool].workers)
    await delete(etcd, pool.worker_key(99))
    await runtime.directory.wait_for(lambda it: 99 not in it.components[pool].workers)


def retained(runtime: Runtime) -> float | None:
    return runtime.registry.get_sample_value("kvrouter_directory_retained")


async def test_a_worker_that_answers_stays_until_it_registers_again(
    etcd_endpoint: str, pool: ComponentName, patient: None, slow_probes: None
) -> None:
    await put_descriptor(etcd_endpoint, pool)
    async with process() as address, opened(etcd_endpoint, pool.namespace) as runtime:
        await put(etcd_endpoint, pool, 1, registration(1, address))
        await until_workers(runtime, pool, 1)
        before = runtime.directory.components[pool].workers[1]
        await delete(etcd_endpoint, pool.worker_key(1))
        await seen_deleted(etcd_endpoint, runtime, pool)
        assert runtime.directory.components[pool].workers[1] is before
        assert retained(runtime) == 1
        await put(etcd_endpoint, pool, 1, registration(1, address))
        await seen_deleted(etcd_endpoint, runtime, pool)
        assert retained(runtime) == 0
        assert runtime.directory.components[pool].workers[1] is before


async def test_a_service_that_answers_stays_until_it_stops(
    etcd_endpoint: str, pool: ComponentName, patient: None, slow_probes: None
) -> None:
    key = service_key(pool.namespace, "indexer", "two")
    await put_descriptor(etcd_endpoint, pool)
    async with opened(etcd_endpoint, pool.namespace) as runtime:
        async with process() as address:
            async with connect(etcd_endpoint) as client:
                entry = ServiceRegistration(instance_id="two", endpoint=address, ready=True)
                await client.put(key.encode(), entry.SerializeToString())
            await runtime.directory.wait_for(lambda it: "two" in it.services("indexer"))
            await delete(etcd_endpoint, key)
            await seen_deleted(etcd_endpoint, runtime, pool)
            assert "two" in runtime.directory.services("indexer")
        await runtime.directory.wait_for(lambda it: "two" not in it.services("indexer"))


async def test_a_worker_that_is_draining_leaves_although_it_answers(
    etcd_endpoint: str, pool: ComponentName, patient: None
) -> None:
    await put_descriptor(etcd_endpoint, pool)
    async with process() as address, opened(etcd_endpoint, pool.namespace) as runtime:
        await put(etcd_endpoint, pool, 1, registration(1, address, draining=True))
        await until_workers(runtime, pool, 1)
        await delete(etcd_endpoint, pool.worker_key(1))
        await until_workers(runtime, pool)


async def test_a_worker_that_says_that_it_stops_leaves(etcd_endpoint: str, pool: ComponentName, patient: None) -> None:
    await put_descriptor(etcd_endpoint, pool)
    async with process(serving=False) as address, opened(etcd_endpoint, pool.namespace) as runtime:
        await put(etcd_endpoint, pool, 1, registration(1, address))
        await until_workers(runtime, pool, 1)
        await delete(etcd_endpoint, pool.worker_key(1))
        await until_workers(runtime, pool)


async def test_a_worker_that_is_gone_leaves(etcd_endpoint: str, pool: ComponentName, patient: None) -> None:
    await put_descriptor(etcd_endpoint, pool)
    async with process() as address:
        pass
    async with opened(etcd_endpoint, pool.namespace) as runtime:
        await put(etcd_endpoint, pool, 1, registration(1, address))
        await until_workers(runtime, pool, 1)
        await delete(etcd_endpoint, pool.worker_key(1))
        await until_workers(runtime, pool)


async def test_a_worker_that_is_frozen_leaves(etcd_endpoint: str, pool: ComponentName, patient: None) -> None:
    """Its connections are accepted, by the kernel, and nothing answers."""
    await put_descriptor(etcd_endpoint, pool)

    async def ignore(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    connections: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(ignore, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with opened(etcd_endpoint, pool.namespace) as runtime:
            await put(etcd_endpoint, pool, 1, registration(1, f"127.0.0.1:{port}"))
            await until_workers(runtime, pool, 1)
            await delete(etcd_endpoint, pool.worker_key(1))
            await until_workers(runtime, pool)
    finally:
        server.close()
        for writer in connections:
            writer.close()


async def test_a_worker_that_answers_and_does_not_register_again_leaves_after_a_while(
    etcd_endpoint: str, pool: ComponentName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "KEPT_SECONDS", 0.2)
    await put_descriptor(etcd_endpoint, pool)
    async with process() as address, opened(etcd_endpoint, pool.namespace) as runtime:
        await put(etcd_endpoint, pool, 1, registration(1, address))
        await until_workers(runtime, pool, 1)
        await delete(etcd_endpoint, pool.worker_key(1))
        await until_workers(runtime, pool)


async def test_a_worker_leaves_when_another_registers_at_its_address(
    etcd_endpoint: str, pool: ComponentName, patient: None
) -> None:
    await put_descriptor(etcd_endpoint, pool)
    async with process() as address, opened(etcd_endpoint, pool.namespace) as runtime:
        await put(etcd_endpoint, pool, 1, registration(1, address))
        await until_workers(runtime, pool, 1)
        await delete(etcd_endpoint, pool.worker_key(1))
        await seen_deleted(etcd_endpoint, runtime, pool)
        await put(etcd_endpoint, pool, 2, registration(2, address))
        await until_workers(runtime, pool, 2)


async def test_a_component_without_its_descriptor_stays_while_it_has_workers(
    etcd_endpoint: str, pool: ComponentName
) -> None:
    await put_descriptor(etcd_endpoint, pool)
    async with opened(etcd_endpoint, pool.namespace) as runtime:
        await put(etcd_endpoint, pool, 1, registration(1, ""))
        await until_workers(runtime, pool, 1)
        await delete(etcd_endpoint, pool.descriptor_key)
        await seen_deleted(etcd_endpoint, runtime, pool)
        assert set(runtime.directory.components[pool].workers) == {1}
        await delete(etcd_endpoint, pool.worker_key(1))
        await runtime.directory.wait_for(lambda it: pool not in it.components)
