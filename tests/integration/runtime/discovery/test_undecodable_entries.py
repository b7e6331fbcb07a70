"""Entries in etcd that cannot be decoded: skipped, counted, and healed where they are corrected or deleted."""

from __future__ import annotations

from kvrouter.net.etcd import connect
from kvrouter.runtime.process.context import Runtime
from kvrouter.v1.names import ComponentName, namespace_prefix
from kvrouter.v1.registry_pb2 import ServiceRegistration

from .test_directory import opened, put_descriptor, put_worker, until_workers


def quarantined(runtime: Runtime) -> float | None:
    return runtime.registry.get_sample_value("kvrouter_quarantined_entries")


async def test_a_key_that_is_not_utf8_is_skipped_and_released_when_it_is_deleted(
    etcd_endpoint: str, namespace: str
) -> None:
    pool = ComponentName(namespace, "pool")
    await put_descriptor(etcd_endpoint, pool)
    bad = f"{namespace_prefix(namespace)}services/indexer/".encode() + b"\xff\xfe"
    async with connect(etcd_endpoint) as client:
        await client.put(bad, ServiceRegistration(endpoint="h:1").SerializeToString())
        async with opened(etcd_endpoint, namespace) as runtime:
            await runtime.directory.synced()
            assert quarantined(runtime) == 1
            await client.put(bad + b"\xfd", b"")
            await put_worker(etcd_endpoint, pool, 1)
            await until_workers(runtime, pool, 1)
            assert quarantined(runtime) == 2
            labels = {"source": "etcd", "reason": "not_utf8"}
            assert runtime.registry.get_sample_value("kvrouter_quarantined_total", labels) == 2
            await client.delete(bad)
            await client.delete(bad + b"\xfd")
            await put_worker(etcd_endpoint, pool, 2)
            await until_workers(runtime, pool, 1, 2)
            assert quarantined(runtime) == 0


async def test_a_value_that_cannot_be_decoded_leaves_its_entry_out_until_it_is_corrected(
    etcd_endpoint: str, namespace: str
) -> None:
    pool = ComponentName(namespace, "pool")
    await put_descriptor(etcd_endpoint, pool)
    await put_worker(etcd_endpoint, pool, 1)
    async with opened(etcd_endpoint, namespace) as runtime, connect(etcd_endpoint) as client:
        await until_workers(runtime, pool, 1)
        await client.put(pool.worker_key(1).encode(), b"\xff\xff")
        await until_workers(runtime, pool)
        assert list(runtime.directory.ignored) == [pool.worker_key(1)]
        assert quarantined(runtime) == 1
        await put_worker(etcd_endpoint, pool, 1)
        await until_workers(runtime, pool, 1)
        assert not runtime.directory.ignored
        assert quarantined(runtime) == 0


async def test_a_registration_that_somebody_overwrote_by_hand_is_written_again(
    etcd_endpoint: str, namespace: str
) -> None:
    async with opened(etcd_endpoint, namespace) as runtime, connect(etcd_endpoint) as client:
        runtime.registrar.register("indexer", ServiceRegistration(endpoint="h:1"))
        await runtime.directory.wait_for(lambda it: "one" in it.services("indexer"))
        await client.put(f"{namespace_prefix(namespace)}services/indexer/one".encode(), b"\xff")
        await runtime.directory.wait_for(lambda it: "one" not in it.services("indexer"))
        await runtime.directory.wait_for(lambda it: "one" in it.services("indexer"))
