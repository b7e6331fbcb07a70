"""A directory over a real etcd, through changes and absences."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from kvrouter.devtools.system.servers import EtcdServer
from kvrouter.net.etcd import LeasedKeys, connect
from kvrouter.runtime.config.settings import ServiceSettings
from kvrouter.runtime.process.context import Runtime, open_runtime
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, ServiceRegistration, WorkerRegistration


@pytest.fixture
def pool(namespace: str) -> ComponentName:
    return ComponentName(namespace, "pool")


@asynccontextmanager
async def opened(endpoint: str, namespace: str, instance_id: str = "one") -> AsyncIterator[Runtime]:
    settings = ServiceSettings(etcd=endpoint, namespace=namespace, instance_id=instance_id)
    async with asyncio.timeout(60), open_runtime(settings) as runtime:
        yield runtime


async def put_descriptor(endpoint: str, pool: ComponentName) -> None:
    descriptor = ComponentDescriptor(model="m", block_size=16, hash_scheme="xxh3-1337")
    async with connect(endpoint) as client:
        await client.put(pool.descriptor_key.encode(), descriptor.SerializeToString())


async def put_worker(endpoint: str, pool: ComponentName, worker_id: int, block_size: int = 16) -> None:
    worker = WorkerRegistration(worker_id=worker_id, model="m", block_size=block_size, hash_scheme="xxh3-1337")
    async with connect(endpoint) as client:
        await client.put(pool.worker_key(worker_id).encode(), worker.SerializeToString())


async def delete_worker(endpoint: str, pool: ComponentName, worker_id: int) -> None:
    async with connect(endpoint) as client:
        await client.delete(pool.worker_key(worker_id).encode())


async def until_workers(runtime: Runtime, pool: ComponentName, *expected: int) -> None:
    await runtime.directory.wait_for(
        lambda it: pool in it.components and set(it.components[pool].workers) == set(expected)
    )


async def test_the_age_of_registrations_is_known(etcd_endpoint: str, pool: ComponentName) -> None:
    async with opened(etcd_endpoint, pool.namespace) as runtime:
        assert runtime.directory.age_seconds is None, "etcd was not asked yet"
        await runtime.directory.synced()
        before = runtime.directory.age_seconds
        assert before is not None
        after = runtime.directory.age_seconds
        assert after is not None
        assert after >= before, "it grows until etcd is heard again"


async def test_workers_come_and_go(etcd_endpoint: str, pool: ComponentName) -> None:
    await put_descriptor(etcd_endpoint, pool)
    await put_worker(etcd_endpoint, pool, 1)
    async with opened(etcd_endpoint, pool.namespace) as runtime:
        await runtime.directory.synced()
        assert set(runtime.directory.components[pool].workers) == {1}
        await put_worker(etcd_endpoint, pool, 2)
        await until_workers(runtime, pool, 1, 2)
        await delete_worker(etcd_endpoint, pool, 1)
        await until_workers(runtime, pool, 2)


async def test_a_namespace_sees_nothing_of_another(etcd_endpoint: str, pool: ComponentName) -> None:
    other = ComponentName(f"{pool.namespace}x", "pool")
    await put_descriptor(etcd_endpoint, other)
    await put_descriptor(etcd_endpoint, pool)
    async with opened(etcd_endpoint, pool.namespace) as runtime:
        await runtime.directory.synced()
        assert set(runtime.directory.components) == {pool}


async def test_a_worker_that_differs_is_ignored_and_counted(etcd_endpoint: str, pool: ComponentName) -> None:
    await put_descriptor(etcd_endpoint, pool)
    async with opened(etcd_endpoint, pool.namespace) as runtime:
        await put_worker(etcd_endpoint, pool, 2, block_size=32)
        await runtime.directory.wait_for(lambda it: bool(it.ignored))
        await put_worker(etcd_endpoint, pool, 1)
        await until_workers(runtime, pool, 1)
        assert runtime.registry.get_sample_value("kvrouter_directory_ignored_total") == 1
        assert runtime.registry.get_sample_value("kvrouter_directory_workers") == 1


async def test_changes_tell_of_every_state_at_least_once(etcd_endpoint: str, pool: ComponentName) -> None:
    await put_descriptor(etcd_endpoint, pool)
    async with opened(etcd_endpoint, pool.namespace) as runtime:
        async for directory in runtime.directory.changes():
            workers = set(directory.components[pool].workers)
            if len(workers) == 5:
                break
            await put_worker(etcd_endpoint, pool, len(workers))


async def test_registrations_stay_while_etcd_is_away_and_are_corrected_afterwards(
    own_etcd: EtcdServer, pool: ComponentName
) -> None:
    await put_descriptor(own_etcd.endpoint, pool)
    await put_worker(own_etcd.endpoint, pool, 1)
    async with (
        opened(own_etcd.endpoint, pool.namespace) as runtime,
        opened(own_etcd.endpoint, pool.namespace, "two") as second,
    ):
        await until_workers(runtime, pool, 1)
        await own_etcd.kill()
        assert set(runtime.directory.components[pool].workers) == {1}
        await own_etcd.start()
        await put_worker(own_etcd.endpoint, pool, 2)
        await delete_worker(own_etcd.endpoint, pool, 1)
        await until_workers(runtime, pool, 2)
        await until_workers(second, pool, 2)


async def test_a_process_starts_before_etcd_does(own_etcd: EtcdServer, pool: ComponentName) -> None:
    await put_descriptor(own_etcd.endpoint, pool)
    await own_etcd.stop()
    async with opened(own_etcd.endpoint, pool.namespace) as runtime:
        runtime.registrar.register("indexer", ServiceRegistration(endpoint="h:1"))
        assert not runtime.directory.is_synced
        await own_etcd.start()
        await runtime.directory.wait_for(lambda it: "one" in it.services("indexer"))
        assert pool in runtime.directory.components


async def test_services_register_say_when_they_are_ready_and_withdraw(etcd_endpoint: str, namespace: str) -> None:
    async with opened(etcd_endpoint, namespace) as watcher:
        async with opened(etcd_endpoint, namespace, "two") as runtime:
            runtime.registrar.register("scheduler", ServiceRegistration(endpoint="h:1"))
            await watcher.directory.wait_for(lambda it: "two" in it.services("scheduler"))
            found = watcher.directory.services("scheduler")["two"]
            assert (found.endpoint, found.instance_id, found.ready) == ("h:1", "two", False)
            runtime.registrar.set_ready("scheduler", True)
            await watcher.directory.wait_for(lambda it: it.services("scheduler")["two"].ready)
            runtime.registrar.withdraw()
            await watcher.directory.wait_for(lambda it: not it.services("scheduler"))
            runtime.registrar.register("scheduler", ServiceRegistration(endpoint="h:2"))
            await watcher.directory.wait_for(lambda it: "two" in it.services("scheduler"))
        await watcher.directory.wait_for(lambda it: not it.services("scheduler"))


async def test_a_background_task_that_fails_ends_the_runtime(etcd_endpoint: str, namespace: str) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - the context is what raises
        async with opened(etcd_endpoint, namespace) as runtime:
            runtime.spawn(fail(), "fails")
            await asyncio.Event().wait()
    assert caught.group_contains(ZeroDivisionError)


async def test_leased_keys_of_a_runtime_go_with_it(etcd_endpoint: str, namespace: str) -> None:
    key = f"/{namespace}/own"
    async with opened(etcd_endpoint, namespace) as runtime:
        assert isinstance(runtime.keys, LeasedKeys)
        runtime.keys.put(key, b"1")
        await runtime.keys.wait_registered()
    async with connect(etcd_endpoint) as client:
        assert await client.get(key.encode()) is None
