"""A worker in a real etcd: its lease, its component, its incarnations."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine

import pytest
from kvrouter.devtools.system.servers import EtcdServer
from kvrouter.net.etcd import KeyTaken, connect
from kvrouter.publisher.errors import DescriptorMismatch, UnknownRank
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.publisher.registration import EtcdAndNats, begin_incarnation
from kvrouter.publisher.worker import WorkerConfig, running
from kvrouter.v1.common_pb2 import Role, Transport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, IncarnationRecord, WorkerRegistration

from .worker_harness import EchoEngine, config, eventually


async def registration(settings: WorkerConfig) -> WorkerRegistration | None:
    async with connect(settings.etcd) as client:
        found = await client.get(settings.component.worker_key(settings.worker_id).encode())
    return WorkerRegistration.FromString(found.value) if found is not None else None


async def test_a_worker_registers_and_signs_off(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    settings = config(namespace, etcd_endpoint, nats_url, labels={"zone": "a"}, ranks={0: 10, 3: 20})
    async with running(settings, EchoEngine()) as worker:
        await worker.registered()
        found = await registration(settings)
        assert found is not None
        assert found.worker_id == settings.worker_id
        assert found.endpoint == worker.endpoint
        assert found.transport == Transport.TRANSPORT_DURABLE
        assert found.labels == {"zone": "a"}
        assert [(rank.dp_rank, rank.incarnation, rank.total_blocks) for rank in found.ranks] == [
            (0, worker.incarnation, 10),
            (3, worker.incarnation, 20),
        ]
        assert found.publishes_events
        assert not found.draining
        with pytest.raises(UnknownRank, match="received 1"):
            worker.rank(1)
    assert await registration(settings) is None


def lose_and_fail(rank: RankPublisher) -> None:
    with rank.reporting(0):
        rank.events_lost()
        raise ZeroDivisionError


async def test_a_loss_of_events_is_registered_until_the_cache_is_cleared(
    namespace: str, etcd_endpoint: str, nats_url: str
) -> None:
    settings = config(namespace, etcd_endpoint, nats_url, ranks={0: 10, 1: 10})

    async def lost() -> list[bool]:
        found = await registration(settings)
        return [] if found is None else [rank.events_lost for rank in found.ranks]

    async def is_lost(*expected: bool) -> None:
        async def equal() -> bool:
            return await lost() == [*expected]

        await eventually(equal)

    async with running(settings, EchoEngine()) as worker:
        await is_lost(False, False)
        with pytest.raises(ZeroDivisionError):
            lose_and_fail(worker.rank(0))
        await asyncio.to_thread(worker.rank(1).events_lost)
        await is_lost(False, True)
        with worker.rank(1).reporting(1):
            worker.rank(1).cleared()
        await is_lost(False, False)


async def test_the_lease_ends_with_the_worker(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    settings = config(namespace, etcd_endpoint, nats_url)
    async with running(settings, EchoEngine()) as worker:
        await worker.registered()
        async with connect(etcd_endpoint) as client:
            found = await client.get(settings.component.worker_key(settings.worker_id).encode())
            assert found is not None
            assert found.lease
            assert (await client.get_lease_info(found.lease)).grantedTTL == settings.lease_ttl_seconds


async def test_a_lost_lease_is_replaced(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    settings = config(namespace, etcd_endpoint, nats_url)
    async with running(settings, EchoEngine()) as worker:
        await worker.registered()
        before = await registration(settings)
        async with connect(etcd_endpoint) as client:
            found = await client.get(settings.component.worker_key(settings.worker_id).encode())
            assert found is not None
            await client.revoke_lease(found.lease)
        await eventually(lambda: worker.stats().registrations >= 2)
        assert await registration(settings) == before


async def test_a_registration_that_was_deleted_comes_back(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    settings = config(namespace, etcd_endpoint, nats_url)
    async with running(settings, EchoEngine()) as worker:
        await worker.registered()
        async with connect(etcd_endpoint) as client:
            await client.delete(settings.component.worker_key(settings.worker_id).encode())

        async def back() -> bool:
            return await registration(settings) is not None

        await eventually(back)


async def test_a_worker_outlives_etcd(namespace: str, own_etcd: EtcdServer, nats_url: str) -> None:
    settings = config(namespace, own_etcd.endpoint, nats_url)
    async with running(settings, EchoEngine()) as worker:
        await worker.registered()
        await own_etcd.kill()
        await eventually(lambda: not worker.stats().registered)
        await own_etcd.start()
        await eventually(lambda: worker.stats().registered)
        found = await registration(settings)
        assert found is not None
        assert found.ranks[0].incarnation == worker.incarnation


async def test_a_worker_waits_for_etcd(namespace: str, own_etcd: EtcdServer, nats_url: str) -> None:
    await own_etcd.kill()
    settings = config(namespace, own_etcd.endpoint, nats_url)
    entered = asyncio.Event()

    async def work() -> None:
        async with running(settings, EchoEngine()) as worker:
            await worker.registered()
            entered.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(work())
        await own_etcd.start()
        async with asyncio.timeout(60):
            await entered.wait()


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("block_size", 8, "block_size: expected 4, this worker has 8"),
        ("model", "other", "model: expected 'm', this worker has 'other'"),
        ("role", Role.ROLE_PREFILL, "role: expected 'ROLE_BOTH', this worker has 'ROLE_PREFILL'"),
        ("max_model_len", 5, "max_model_len: expected 0, this worker has 5"),
    ],
)
async def test_a_worker_that_differs_is_refused(
    namespace: str, etcd_endpoint: str, nats_url: str, field: str, value: object, expected: str
) -> None:
    async with running(config(namespace, etcd_endpoint, nats_url), EchoEngine()):
        other = config(namespace, etcd_endpoint, nats_url, **{field: value})
        with pytest.raises(DescriptorMismatch) as caught:
            async with running(other, EchoEngine()):
                pass
        assert expected in str(caught.value)
        assert list(caught.value.differences) == [field]
        assert await registration(other) is None


async def test_the_first_worker_sets_the_default_transport(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    first = config(namespace, etcd_endpoint, nats_url, transport=Transport.TRANSPORT_CORE_NATS)
    async with (
        running(first, EchoEngine()),
        running(config(namespace, etcd_endpoint, nats_url), EchoEngine()) as second,
    ):
        assert second.transport == Transport.TRANSPORT_CORE_NATS
        async with connect(etcd_endpoint) as client:
            found = await client.get(first.component.descriptor_key.encode())
        assert found is not None
        descriptor = ComponentDescriptor.FromString(found.value)
        assert descriptor.default_transport == Transport.TRANSPORT_CORE_NATS
        assert (descriptor.model, descriptor.block_size, descriptor.hash_scheme) == ("m", 4, "xxh3-1337")


async def test_incarnations_rise_even_if_the_clock_went_back(namespace: str, etcd_endpoint: str) -> None:
    component = ComponentName(namespace, "pool")
    now = time.time_ns()
    async with connect(etcd_endpoint) as client:
        drawn = [await begin_incarnation(client, component, 5, at) for at in (now, now - 10**12, 1, now + 100, now)]
        assert drawn == [now, now + 1, now + 2, now + 100, now + 101]
        together = await asyncio.gather(*(begin_incarnation(client, component, 5, now) for _ in range(8)))
        assert len(set(together)) == 8
        assert await begin_incarnation(client, component, 6, 1) == 1
        found = await client.get(component.incarnation_key(5).encode())
        assert found is not None
        assert IncarnationRecord.FromString(found.value).incarnation == max(together)


async def test_a_worker_that_starts_again_begins_another_incarnation(
    namespace: str, etcd_endpoint: str, nats_url: str
) -> None:
    settings = config(namespace, etcd_endpoint, nats_url)
    async with running(settings, EchoEngine()) as first:
        pass
    async with running(settings, EchoEngine()) as second:
        assert second.incarnation > first.incarnation


async def test_the_former_self_of_a_worker_ends(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    settings = config(namespace, etcd_endpoint, nats_url)
    ended = asyncio.Event()

    async def former(entered: asyncio.Event) -> None:
        with contextlib.suppress(KeyTaken):
            async with running(settings, EchoEngine()) as worker:
                await worker.registered()
                entered.set()
                await asyncio.Event().wait()
        ended.set()

    async with asyncio.TaskGroup() as tasks:
        entered = asyncio.Event()
        tasks.create_task(former(entered))
        await entered.wait()
        async with running(settings, EchoEngine()) as successor:
            await successor.registered()
            async with asyncio.timeout(30):
                await ended.wait()
            found = await registration(settings)
            assert found is not None
            assert found.endpoint == successor.endpoint


async def test_of_two_that_start_at_one_moment_the_later_stays(
    namespace: str, etcd_endpoint: str, nats_url: str
) -> None:
    """The earlier one begins its life first, and registers last."""
    settings = config(namespace, etcd_endpoint, nats_url)
    begun, go_on = asyncio.Event(), asyncio.Event()

    class Slow(EtcdAndNats):
        async def settle(self, config: WorkerConfig, former: int | None) -> tuple[int, Transport]:
            settled = await super().settle(config, former)
            begun.set()
            await go_on.wait()
            return settled

    async def earlier() -> None:
        async with running(settings, EchoEngine(), Slow()) as worker:
            await worker.registered()
            await asyncio.Event().wait()

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(_key_taken(earlier()))
        await begun.wait()
        async with running(settings, EchoEngine()) as later:
            await later.registered()
            key = settings.component.worker_key(settings.worker_id).encode()
            async with connect(etcd_endpoint) as client:
                before = await client.get(key)
                go_on.set()
                await ending
                after = await client.get(key)
            assert after is not None
            assert before is not None
            assert WorkerRegistration.FromString(after.value).endpoint == later.endpoint
            assert after.mod_revision == before.mod_revision, "the earlier one's was never there"


async def _key_taken(registering: Coroutine[None, None, None]) -> None:
    with pytest.raises(KeyTaken):
        await registering


async def test_a_worker_whose_successor_came_and_went_ends(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    settings = config(namespace, etcd_endpoint, nats_url)

    async def outlive_a_successor() -> None:
        async with asyncio.timeout(30), running(settings, EchoEngine()) as worker:
            await eventually(lambda: worker.stats().registrations == 1)
            async with connect(etcd_endpoint) as client:
                # What the worker reports from here on is fenced, though nobody else is registered.
                await begin_incarnation(client, settings.component, settings.worker_id, time.time_ns())
                found = await client.get(settings.component.worker_key(settings.worker_id).encode())
                assert found is not None
                await client.revoke_lease(found.lease)
            await asyncio.Event().wait()

    with pytest.raises(KeyTaken):
        await outlive_a_successor()


@pytest.mark.parametrize("recorded", [b"\xff\xff", IncarnationRecord(incarnation=(1 << 64) - 1).SerializeToString()])
async def test_a_record_that_no_worker_can_follow_does_not_keep_a_worker_from_starting(
    namespace: str, etcd_endpoint: str, nats_url: str, recorded: bytes
) -> None:
    settings = config(namespace, etcd_endpoint, nats_url)
    key = settings.component.incarnation_key(settings.worker_id).encode()
    async with asyncio.timeout(30), connect(etcd_endpoint) as client:
        await client.put(key, recorded)
        async with running(settings, EchoEngine()) as worker:
            await worker.registered()
            found = await client.get(key)
            assert found is not None
            assert IncarnationRecord.FromString(found.value).incarnation == worker.incarnation


async def test_a_worker_follows_a_registration_whose_record_is_lost(
    namespace: str, etcd_endpoint: str, nats_url: str
) -> None:
    settings = config(namespace, etcd_endpoint, nats_url)
    ahead = time.time_ns() + 10 * 365 * 86_400 * 10**9
    former = settings.registration(
        endpoint="127.0.0.1:1", incarnation=ahead, transport=Transport.TRANSPORT_DURABLE, registered_unix_ns=1
    )
    async with asyncio.timeout(30), connect(etcd_endpoint) as client:
        lease = await client.lease(60)
        key = settings.component.worker_key(settings.worker_id).encode()
        await client.put(key, former.SerializeToString(), lease=lease.id)
        async with running(settings, EchoEngine()) as worker:
            await worker.registered()
            assert worker.incarnation == ahead + 1


@pytest.mark.parametrize("value", [None, b"\xff", b""])
@pytest.mark.parametrize("which", ["descriptor", "incarnation", "worker", "all"])
async def test_a_key_that_is_lost_comes_back(
    namespace: str, etcd_endpoint: str, nats_url: str, which: str, value: bytes | None
) -> None:
    """Deleted, or overwritten with what cannot be used; the lease lives on."""
    settings = config(namespace, etcd_endpoint, nats_url)
    component = settings.component
    keys = {
        "descriptor": component.descriptor_key,
        "incarnation": component.incarnation_key(settings.worker_id),
        "worker": component.worker_key(settings.worker_id),
    }
    async with running(settings, EchoEngine()) as worker, connect(etcd_endpoint) as client:
        await eventually(lambda: worker.stats().registrations == 1)
        before = {key: found.value for key in keys.values() if (found := await client.get(key.encode()))}
        assert len(before) == 3
        for key in keys.values() if which == "all" else [keys[which]]:
            if value is None:
                await client.delete(key.encode())
            else:
                await client.put(key.encode(), value)

        async def back() -> bool:
            found = [await client.get(key.encode()) for key in before]
            return [each.value if each else None for each in found] == list(before.values())

        await eventually(back)
        assert worker.stats().registrations == 1
