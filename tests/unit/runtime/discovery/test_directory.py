"""What a directory makes of the entries in etcd."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from kvrouter.net.etcd import Change, Delete, Put, Snapshot
from kvrouter.runtime.discovery.directory import Directory, build_views, differences
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, WorkerRegistration
from prometheus_client import CollectorRegistry

POOL = ComponentName("ns", "pool")
DESCRIPTOR = ComponentDescriptor(
    component=Component(namespace="ns", name="pool"), model="m", block_size=16, hash_scheme="xxh3-1337"
)


def worker(worker_id: int, **changes: object) -> WorkerRegistration:
    fields = {"model": "m", "block_size": 16, "hash_scheme": "xxh3-1337", **changes}
    return WorkerRegistration(worker_id=worker_id, **fields)  # type: ignore[arg-type]


def entries(*workers: WorkerRegistration, descriptor: ComponentDescriptor | None = DESCRIPTOR) -> dict[str, bytes]:
    found = {POOL.worker_key(each.worker_id): each.SerializeToString() for each in workers}
    if descriptor is not None:
        found[POOL.descriptor_key] = descriptor.SerializeToString()
    return found


def test_a_component_has_its_descriptor_and_its_workers() -> None:
    views, ignored = build_views(entries(worker(1), worker(2)), "ns")
    assert not ignored
    assert views[POOL].descriptor == DESCRIPTOR
    assert views[POOL].name == POOL
    assert set(views[POOL].workers) == {1, 2}


def test_a_component_without_workers_is_known() -> None:
    views, _ = build_views(entries(), "ns")
    assert views[POOL].workers == {}


@pytest.mark.parametrize("change", [{"model": "x"}, {"block_size": 32}, {"hash_scheme": "md5"}])
def test_a_worker_that_differs_is_left_out_with_the_reason(change: dict[str, object]) -> None:
    views, ignored = build_views(entries(worker(1), worker(2, **change)), "ns")
    assert set(views[POOL].workers) == {1}
    (reason,) = ignored.values()
    (field, value) = next(iter(change.items()))
    assert f"{field} {value!r}" in reason
    assert len(differences(DESCRIPTOR, worker(2, **change))) == 1


def test_workers_describe_a_component_without_a_descriptor() -> None:
    views, ignored = build_views(entries(worker(1), worker(2, model="x"), worker(3), descriptor=None), "ns")
    assert views[POOL].descriptor.model == "m"
    assert set(views[POOL].workers) == {1, 3}
    assert not views[POOL].is_written
    assert list(ignored) == [POOL.worker_key(2)]


def test_a_replaced_descriptor_is_not_followed_while_workers_disagree() -> None:
    forged = ComponentDescriptor(model="x", block_size=64, hash_scheme="xxh3-1337")
    before, _ = build_views(entries(worker(1), worker(2)), "ns")
    attacker = worker(2, model="x", block_size=64)
    for former in (before, {}):
        views, ignored = build_views(entries(worker(1), attacker, worker(3), descriptor=forged), "ns", former)
        followed = views[POOL].descriptor
        assert (followed.model, followed.block_size) == ("m", 16)
        assert set(views[POOL].workers) == {1, 3}
        assert set(ignored) == {POOL.descriptor_key, POOL.worker_key(2)}
        assert "conflict" in ignored[POOL.descriptor_key]


def test_of_two_workers_the_established_one_stays() -> None:
    forged = ComponentDescriptor(model="x", block_size=64, hash_scheme="xxh3-1337")
    before, _ = build_views(entries(worker(2)), "ns")
    attacker = worker(1, model="x", block_size=64)
    views, _ = build_views(entries(attacker, worker(2), descriptor=forged), "ns", before)
    assert set(views[POOL].workers) == {2}


@pytest.mark.parametrize("field", ["role", "max_model_len", "default_transport"])
def test_no_field_of_a_descriptor_changes_while_its_workers_live(field: str) -> None:
    forged = ComponentDescriptor()
    forged.CopyFrom(DESCRIPTOR)
    setattr(forged, field, 1)
    before, _ = build_views(entries(worker(1)), "ns")
    views, ignored = build_views(entries(worker(1), descriptor=forged), "ns", before)
    assert views[POOL].descriptor == DESCRIPTOR
    assert POOL.descriptor_key in ignored


def test_one_worker_alone_does_not_outvote_a_descriptor() -> None:
    views, ignored = build_views(entries(worker(1, model="x")), "ns")
    assert views[POOL].descriptor == DESCRIPTOR
    assert list(ignored) == [POOL.worker_key(1)]


def test_a_component_is_formed_anew_once_its_workers_have_left() -> None:
    before, _ = build_views(entries(worker(1), worker(2)), "ns")
    again = ComponentDescriptor(model="x", block_size=64, hash_scheme="xxh3-1337")
    views, ignored = build_views(entries(worker(1, model="x", block_size=64), descriptor=again), "ns", before)
    assert views[POOL].descriptor.model == "x"
    assert not ignored


def test_an_undecodable_entry_does_not_affect_others() -> None:
    broken = {
        **entries(worker(1)),
        POOL.worker_key(2): b"\xff\xff",
        POOL.worker_key(3): worker(4).SerializeToString(),
        "/kvrouter/v1/ns/components/bad name/descriptor": b"",
        "/kvrouter/v1/ns/components/broken/descriptor": b"\xff\xff",
        POOL.applied_key("replica"): b"\xff",
        POOL.incarnation_key(9): b"\xff",
    }
    views, ignored = build_views(broken, "ns")
    assert set(views) == {POOL}
    assert set(views[POOL].workers) == {1}
    assert len(ignored) == 4


def test_a_registration_that_did_not_change_is_the_same_object() -> None:
    first, _ = build_views(entries(worker(1), worker(2)), "ns")
    second, _ = build_views(entries(worker(1), worker(2), worker(3)), "ns")
    assert all(second[POOL].workers[n] is first[POOL].workers[n] for n in (1, 2))


async def test_thousands_that_come_at_once_are_read_a_few_times() -> None:
    async def source() -> AsyncGenerator[Change]:
        yield Snapshot(entries())
        for number in range(2000):
            yield Put(POOL.worker_key(number), worker(number).SerializeToString())
            await asyncio.sleep(0)
        await asyncio.Event().wait()

    directory = Directory("127.0.0.1:1", "ns", CollectorRegistry(), source=source)
    following = asyncio.create_task(directory.run())
    readings = 0
    async for seen in directory.changes():
        readings += 1
        if len(seen.components[POOL].workers) == 2000:
            break
    following.cancel()
    await asyncio.wait({following})
    assert readings < 200


async def test_a_process_that_was_frozen_follows_changes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: asyncio.Queue[Change] = asyncio.Queue()

    async def source() -> AsyncGenerator[Change]:
        yield Snapshot(entries(worker(1)))
        while True:
            yield await changes.get()

    def frozen(*arguments: Any) -> Any:
        time.sleep(2)
        return build_views(*arguments)

    directory = Directory("127.0.0.1:1", "ns", CollectorRegistry(), source=source)
    with monkeypatch.context() as patch:
        patch.setattr("kvrouter.runtime.discovery.directory.build_views", frozen)
        following = asyncio.create_task(directory.run())
        await directory.synced()
    changes.put_nowait(Put(POOL.worker_key(2), worker(2).SerializeToString()))
    async with asyncio.timeout(30):
        await directory.wait_for(lambda seen: 2 in seen.components[POOL].workers)
    following.cancel()
    await asyncio.wait({following})


async def test_only_changed_registrations_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrouter.runtime.discovery.directory.REST_PER_WORK", 0.0)
    changes: asyncio.Queue[Change] = asyncio.Queue()

    async def source() -> AsyncGenerator[Change]:
        yield Snapshot(entries(worker(1)))
        while True:
            yield await changes.get()

    directory = Directory("127.0.0.1:1", "ns", CollectorRegistry(), source=source)
    following = asyncio.create_task(directory.run())
    await directory.synced()
    components = directory.components
    for again in (
        Put(POOL.worker_key(1), worker(1).SerializeToString()),
        Put(POOL.applied_key("indexer-1"), b"5"),
        Delete(POOL.snapshot_key),
    ):
        changes.put_nowait(again)
    for _ in range(20):
        await asyncio.sleep(0)
    assert changes.empty()
    assert directory.components is components
    changes.put_nowait(Put(POOL.worker_key(2), worker(2).SerializeToString()))
    await directory.wait_for(lambda seen: 2 in seen.components[POOL].workers)
    following.cancel()
    await asyncio.wait({following})
