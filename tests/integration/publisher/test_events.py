"""Events through a real NATS: order, ids, and what an absence does to them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping

from kvrouter.core import PrefixIndex
from kvrouter.devtools.system.servers import NatsServer
from kvrouter.net.nats.connection import connect_nats
from kvrouter.net.nats.event_stream import MAX_AGE_SECONDS, ensure_stream
from kvrouter.publisher.worker import running
from kvrouter.v1.common_pb2 import Transport
from kvrouter.v1.events_pb2 import KvEventBatch, LoadReport
from kvrouter.v1.names import ComponentName
from nats.js.api import StorageType, StreamConfig

from .worker_harness import EchoEngine, config, event_ids, eventually, store, stream_batches


async def test_events_arrive_in_order_with_rising_ids(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    settings = config(namespace, etcd_endpoint, nats_url, ranks={0: 100, 1: 100})
    async with running(settings, EchoEngine()) as worker, connect_nats(nats_url, "test") as client:
        for number in range(1, 200):
            for rank in (0, 1):
                store(worker.rank(rank), number, 1, parent=number - 1 if number > 1 else None)
            await asyncio.sleep(0)
        worker.rank(1).removed(range(150, 200))
        worker.rank(0).cleared()
        await worker.flush()
        batches = await stream_batches(client, settings.component)
        stats = worker.stats()
    for rank in (0, 1):
        own = [batch for batch in batches if batch.dp_rank == rank]
        assert event_ids(own) == list(range(200))
        assert {(batch.worker_id, batch.incarnation) for batch in own} == {(settings.worker_id, worker.incarnation)}
        assert own[-1].digest == stats.ranks[rank].digest
        assert own[-1].next_event_id == stats.ranks[rank].next_event_id == 200
    assert stats.ranks[0].blocks == 0
    assert stats.ranks[1].blocks == 149


async def test_an_index_fed_with_the_batches_has_the_digest(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    settings = config(namespace, etcd_endpoint, nats_url)
    async with running(settings, EchoEngine()) as worker, connect_nats(nats_url, "test") as client:
        rank = worker.rank()
        for number in range(1, 60):
            store(rank, number * 10, 5)
            store(rank, number * 10 + 4, 1, parent=number * 10 + 3)
            rank.removed([number * 10 + 4, (number - 1) * 10 + 1])
        await worker.flush()
        index = PrefixIndex()
        for batch in await stream_batches(client, settings.component):
            summary = index.apply(batch.SerializeToString())
            assert not summary.unknown_parents
            assert not summary.digest_differs
        stats = rank.stats()
        assert index.digest((settings.worker_id, 0)) == stats.digest != 0
        assert index.cursor((settings.worker_id, 0)) == (worker.incarnation, stats.next_event_id)


async def test_nothing_is_lost_while_nats_is_away(namespace: str, etcd_endpoint: str, own_nats: NatsServer) -> None:
    settings = config(namespace, etcd_endpoint, own_nats.url)
    async with running(settings, EchoEngine()) as worker, connect_nats(own_nats.url, "test") as client:
        rank = worker.rank()
        numbers = itertools.count(1)
        for turn in range(2):
            for _ in range(100):
                store(rank, next(numbers))
            await eventually(lambda turn=turn: rank.stats().batches_sent > turn)
            await own_nats.kill()
            for _ in range(100):
                store(rank, next(numbers))
            assert rank.stats().unsent_events
            await own_nats.start()
            await worker.flush()
        await eventually(lambda: client.is_connected)
        ids = event_ids(await stream_batches(client, settings.component))
        stats = rank.stats()
    assert sorted(set(ids)) == list(range(400))
    # A batch whose acknowledgement was lost may be there twice, but never out of order.
    assert list(dict.fromkeys(ids)) == list(range(400))
    assert stats.events_dropped == 0
    assert stats.retries > 0


async def test_a_long_absence_shows_as_a_gap(namespace: str, etcd_endpoint: str, own_nats: NatsServer) -> None:
    settings = config(namespace, etcd_endpoint, own_nats.url, buffer_events=50)
    async with running(settings, EchoEngine()) as worker, connect_nats(own_nats.url, "test") as client:
        rank = worker.rank()
        store(rank, 1)
        await worker.flush()
        await own_nats.kill()
        for number in range(2, 302):
            store(rank, number)
        await own_nats.start()
        await worker.flush()
        await eventually(lambda: client.is_connected)
        batches = await stream_batches(client, settings.component)
        stats = rank.stats()
        state = list(rank.state_chunks())
    ids = list(dict.fromkeys(event_ids(batches)))
    assert ids == sorted(ids)
    assert ids[0] == 0
    assert ids[-50:] == list(range(251, 301))
    assert len(ids) + stats.events_dropped == 301
    assert stats.events_dropped > 0
    assert batches[-1].digest == stats.digest == state[-1].digest
    assert sum(len(chunk.blocks) for chunk in state) == 301


async def test_a_worker_starts_before_nats(namespace: str, etcd_endpoint: str, own_nats: NatsServer) -> None:
    await own_nats.kill()
    settings = config(namespace, etcd_endpoint, own_nats.url)
    async with running(settings, EchoEngine()) as worker:
        await worker.registered()
        store(worker.rank(), 1)
        await own_nats.start()
        await worker.flush()
        async with connect_nats(own_nats.url, "test") as client:
            assert event_ids(await stream_batches(client, settings.component)) == [0]


async def test_a_stream_that_was_deleted_is_made_again(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    settings = config(namespace, etcd_endpoint, nats_url)
    async with running(settings, EchoEngine()) as worker, connect_nats(nats_url, "test") as client:
        store(worker.rank(), 1)
        await worker.flush()
        await client.jetstream().delete_stream(settings.component.stream)
        store(worker.rank(), 2)
        await worker.flush()
        assert event_ids(await stream_batches(client, settings.component)) == [1]


async def test_a_missing_stream_is_made_although_somebody_subscribes_to_its_subjects(
    namespace: str, etcd_endpoint: str, nats_url: str
) -> None:
    settings = config(namespace, etcd_endpoint, nats_url)
    async with connect_nats(nats_url, "test") as client:
        # Messages without a stream have a receiver now, so the server does not say that none stored them.
        await client.subscribe(settings.component.events_wildcard)
        await client.flush()
        async with running(settings, EchoEngine()) as worker:
            store(worker.rank(), 1)
            await worker.flush()
            assert event_ids(await stream_batches(client, settings.component)) == [0]


async def test_an_idle_worker_is_heard(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    settings = config(namespace, etcd_endpoint, nats_url, heartbeat_seconds=0.05)
    async with running(settings, EchoEngine()) as worker, connect_nats(nats_url, "test") as client:

        async def heard() -> bool:
            return len(await stream_batches(client, settings.component)) >= 3

        await eventually(heard)
        store(worker.rank(), 1)
        await worker.flush()
        sent = worker.stats().ranks[0].heartbeats_sent
        await eventually(lambda: worker.stats().ranks[0].heartbeats_sent > sent)
        last = (await stream_batches(client, settings.component))[-1]
        assert (len(last.events), last.next_event_id, last.digest) == (0, 1, worker.rank().stats().digest)


async def test_core_nats_events_travel_without_a_stream(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    settings = config(
        namespace, etcd_endpoint, nats_url, transport=Transport.TRANSPORT_CORE_NATS, heartbeat_seconds=0.05
    )
    async with connect_nats(nats_url, "test") as client:
        live = await client.subscribe(settings.component.live_wildcard)
        await client.flush()
        async with running(settings, EchoEngine()) as worker:
            store(worker.rank(), 1, 3)
            worker.rank().removed([3])
            batches: list[KvEventBatch] = []
            while event_ids(batches) != [0, 1]:
                message = await live.next_msg(timeout=20)
                assert message.subject == settings.component.live_subject(settings.worker_id, 0)
                batches.append(KvEventBatch.FromString(message.data))
            assert batches[-1].digest == worker.rank().stats().digest
        assert await stream_batches(client, settings.component) == []


async def test_load_is_reported(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    settings = config(namespace, etcd_endpoint, nats_url, load_report_seconds=0.05)
    async with connect_nats(nats_url, "test") as client:
        reports = await client.subscribe(settings.component.load_wildcard)
        await client.flush()
        async with running(settings, EchoEngine()) as worker:
            message = await reports.next_msg(timeout=20)
            report = LoadReport.FromString(message.data)
            assert message.subject == settings.component.load_subject(settings.worker_id, 0)
            assert (report.rank.worker_id, report.rank.dp_rank) == (settings.worker_id, 0)
            assert report.incarnation == worker.incarnation
            assert report.total_blocks == 100
            assert report.measured_unix_ns


async def test_an_unchanged_load_is_not_reported_again(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    settings = config(namespace, etcd_endpoint, nats_url, load_report_seconds=0.01)
    engine = EchoEngine()
    asked, running_requests = 0, 0

    def load() -> Mapping[int, LoadReport]:
        nonlocal asked
        asked += 1
        return {0: LoadReport(running_requests=running_requests)}

    engine.load = load  # type: ignore[method-assign]
    async with connect_nats(nats_url, "test") as client:
        reports = await client.subscribe(settings.component.load_wildcard)
        await client.flush()
        async with running(settings, engine):
            idle = LoadReport.FromString((await reports.next_msg(timeout=20)).data)
            asked = 0
            while asked < 5:
                await asyncio.sleep(0.01)
            running_requests = 1
            busy = LoadReport.FromString((await reports.next_msg(timeout=20)).data)
    assert (idle.running_requests, busy.running_requests) == (0, 1)
    assert busy.sequence > idle.sequence + 1


async def test_many_may_create_a_stream_at_once(namespace: str, nats_url: str) -> None:
    component = ComponentName(namespace, "pool")
    async with connect_nats(nats_url, "test") as client:
        js = client.jetstream()
        infos = await asyncio.gather(*(ensure_stream(js, component, max_bytes=(20 << 20) + i) for i in range(10)))
        assert len({(info.created, info.config.max_bytes) for info in infos}) == 1
        assert infos[0].config.max_age == MAX_AGE_SECONDS
        again = await ensure_stream(js, component)
        assert again.created == infos[0].created


async def test_a_stream_of_the_operators_making_is_left_alone(namespace: str, nats_url: str) -> None:
    component = ComponentName(namespace, "pool")
    async with connect_nats(nats_url, "test") as client:
        js = client.jetstream()
        await js.add_stream(
            StreamConfig(
                name=component.stream, subjects=[component.events_wildcard], max_msgs=10, storage=StorageType.MEMORY
            )
        )
        info = await ensure_stream(js, component)
        assert (info.config.max_msgs, info.config.storage) == (10, StorageType.MEMORY)
