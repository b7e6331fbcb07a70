"""How an index heals from its workers, over real NATS, etcd and gRPC."""

from __future__ import annotations

import asyncio
import random

import pytest
from kvrouter.core import Rank
from kvrouter.indexer.index.state import RankDump
from kvrouter.indexer.replica.component import Limits
from kvrouter.indexer.resync import fetcher as resync
from kvrouter.indexer.resync.worker_client import fetch_state
from kvrouter.net.nats.event_stream import ensure_stream
from kvrouter.runtime.contracts import Worker as WorkerStub
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import Transport
from kvrouter.v1.events_pb2 import BlocksRemoved, KvEvent, KvEventBatch
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import RankRegistration, WorkerRegistration
from nats.aio.client import Client
from nats.aio.msg import Msg

from ....waiting import until
from ..event_batches import BLOCK_SIZE
from ..indexing import indexing
from .truth import Cache, agrees, caching, registration_of, resident_blocks, worker_config


def forged(cache: Cache, *events: KvEvent, incarnation: int, digest: int | None = None) -> bytes:
    """A batch in the worker's name that the worker did not send."""
    batch = KvEventBatch(
        worker_id=1,
        incarnation=incarnation,
        events=events,
        block_size=BLOCK_SIZE,
        next_event_id=events[-1].event_id + 1 if events else cache.rank.stats().next_event_id,
    )
    if digest is not None:
        batch.digest = digest
    return batch.SerializeToString()


@pytest.mark.parametrize("transport", [Transport.TRANSPORT_DURABLE, Transport.TRANSPORT_CORE_NATS])
async def test_a_worker_that_is_found_is_fetched_whole(
    connection: Client, component: ComponentName, nats_url: str, etcd_endpoint: str, transport: Transport
) -> None:
    config = worker_config(component, etcd_endpoint, nats_url, 1, transport=transport, buffer_events=8)
    async with caching(config) as (worker, cache):
        cache.live(200)
        await worker.flush()
        if transport == Transport.TRANSPORT_DURABLE:
            await connection.jetstream().purge_stream(component.stream)
        async with indexing(connection, component) as index:
            index.update_workers({1: registration_of(worker)})
            await until(lambda: index.ready)
            await agrees(index, worker, cache)
            assert index.resync.resyncs
            cache.live(4)
            await agrees(index, worker, cache)
            rank = (await index.stats()).ranks[0]
            assert rank.verified
            assert rank.resynced_unix_ns


async def test_a_rank_whose_worker_lost_events_of_its_engine_is_partial(
    connection: Client, component: ComponentName, nats_url: str, etcd_endpoint: str
) -> None:
    config = worker_config(component, etcd_endpoint, nats_url, 1)
    async with caching(config) as (worker, cache), indexing(connection, component) as index:

        async def until_rank(*, partial: bool, verified: bool) -> None:
            index.update_workers({1: registration_of(worker)})
            await agrees(index, worker, cache)
            while (rank := (await index.stats()).ranks[0]).verified != verified:
                await asyncio.sleep(0.01)  # Events may come before the comparison.
            assert rank.partial == partial

        cache.live(20)
        await until_rank(partial=False, verified=True)
        cache.rank.events_lost()
        cache.table.clear()
        cache.store()
        await until_rank(partial=True, verified=False)
        cache.rank.cleared()
        cache.table.clear()
        cache.store()
        await until_rank(partial=False, verified=True)


async def test_readiness_waits_for_workers_that_answer_only(connection: Client, component: ComponentName) -> None:
    async with indexing(connection, component, limits=Limits(compare_seconds=30.0)) as index:
        gone = registration_of_nobody()
        index.update_workers({9: gone})
        await until(lambda: index.ready)
        assert not index.state.known.view((9, 0)).verified


def registration_of_nobody() -> WorkerRegistration:
    return WorkerRegistration(
        worker_id=9,
        endpoint="127.0.0.1:1",
        publishes_events=True,
        ranks=[RankRegistration(dp_rank=0, incarnation=1)],
    )


async def test_lost_live_events_are_fetched_without_dropping_the_rank(
    connection: Client, component: ComponentName, nats_url: str, etcd_endpoint: str
) -> None:
    config = worker_config(component, etcd_endpoint, nats_url, 1, transport=Transport.TRANSPORT_CORE_NATS)
    rng = random.Random(11)
    async with caching(config) as (worker, cache), indexing(connection, component) as index:
        take = index.live._take

        async def lossy(message: Msg) -> None:
            dice = rng.random()
            if dice > 0.2:
                await take(message)
            if dice > 0.9:
                await take(message)

        # Before the index's tasks have run for the first time, so that it subscribes with this.
        index.live._take = lossy  # type: ignore[method-assign]
        index.update_workers({1: registration_of(worker)})
        await until(lambda: index.ready)
        for _ in range(60):
            cache.live(3)
            await worker.flush()
        await agrees(index, worker, cache)
        assert index.state.events.tally.gaps
        assert index.state.events.tally.repairs == 0, "no rank was dropped"


@pytest.mark.parametrize("fault", ["refused", "drift"])
async def test_a_rank_that_went_wrong_is_replaced(
    connection: Client, component: ComponentName, nats_url: str, etcd_endpoint: str, fault: str
) -> None:
    await ensure_stream(connection.jetstream(), component)
    async with caching(worker_config(component, etcd_endpoint, nats_url, 1)) as (worker, cache):
        cache.live(100)
        await worker.flush()  # else the index would find nothing in the stream, and fetch the rank at once
        async with indexing(connection, component) as index:
            index.update_workers({1: registration_of(worker)})
            await until(lambda: index.ready)
            await agrees(index, worker, cache)
            assert index.resync.resyncs == 0
            subject = component.events_subject(1, 0)
            if fault == "refused":
                bad = KvEvent(event_id=cache.rank.stats().next_event_id)
                await connection.publish(subject, forged(cache, bad, incarnation=worker.incarnation))
            else:
                # An event that the worker never had, hidden in the past of the digest.
                at = cache.rank.stats().next_event_id
                victim = next(iter(cache.table))
                await index.state.shared.change(
                    lambda core: core.apply(
                        forged(
                            cache,
                            KvEvent(event_id=at, removed=BlocksRemoved(engine_hashes=[victim])),
                            incarnation=worker.incarnation,
                        )
                    )
                )
                cache.store(1)
                await worker.flush()
            await until(lambda: bool(index.resync.resyncs))
            cache.live(20)
            await agrees(index, worker, cache)
            stats = (await index.stats()).ranks[0]
            # The forged event took an id, so that after the rank was replaced a gap to it was seen too.
            assert stats.resync_reason in (("rejected", "gap") if fault == "refused" else ("drift",))
            assert stats.drifts == (fault == "drift")


async def test_drift_that_persists_is_logged_and_not_fetched_again(
    connection: Client, component: ComponentName, nats_url: str, etcd_endpoint: str
) -> None:
    await ensure_stream(connection.jetstream(), component)
    config = worker_config(component, etcd_endpoint, nats_url, 1, heartbeat_seconds=60.0)
    async with caching(config) as (worker, cache):
        cache.live(20)
        await worker.flush()
        async with indexing(connection, component) as index:
            index.update_workers({1: registration_of(worker)})
            await until(lambda: index.ready)
            await agrees(index, worker, cache)
            assert index.resync.resyncs == 0
            lie = forged(cache, incarnation=worker.incarnation, digest=1)
            await connection.publish(component.events_subject(1, 0), lie)
            await until(lambda: index.resync.resyncs == 1)
            await agrees(index, worker, cache)
            await connection.publish(component.events_subject(1, 0), lie)
            await until(lambda: index.state.known.view((1, 0)).drifts == 2)
            assert await resident_blocks(index, 1) == set()
            await connection.publish(component.events_subject(1, 0), lie)
            cache.store(1)
            await worker.flush()
            await until(lambda: index.resync.pending == 0)
            assert index.resync.resyncs == 1


async def test_ranks_that_come_back_at_once_are_fetched_a_few_at_a_time(
    connection: Client, component: ComponentName, nats_url: str, etcd_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way = most = 0

    async def counted(worker: WorkerStub, rank: Rank, deadline: Deadline) -> RankDump:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            return await fetch_state(worker, rank, deadline)
        finally:
            under_way -= 1

    monkeypatch.setattr(resync, "fetch_state", counted)
    # One worker under many names: its events name another worker than is asked for, so its state is fetched.
    async with caching(worker_config(component, etcd_endpoint, nats_url, 1)) as (worker, cache):
        cache.live(50)
        registration = registration_of(worker)
        crowd = {number: WorkerRegistration() for number in range(2, 102)}
        for number, each in crowd.items():
            each.CopyFrom(registration)
            each.worker_id = number
        async with indexing(connection, component) as index:
            index.update_workers(crowd)
            await until(lambda: all(index.state.known.view((number, 0)).verified for number in crowd))
            for number in crowd:
                assert await resident_blocks(index, number) == set(cache.table)
    assert 1 < most <= 8


async def test_both_transports_and_a_worker_that_switches(
    connection: Client, component: ComponentName, nats_url: str, etcd_endpoint: str
) -> None:
    durable = worker_config(component, etcd_endpoint, nats_url, 1, transport=Transport.TRANSPORT_DURABLE)
    core_nats = worker_config(component, etcd_endpoint, nats_url, 2, transport=Transport.TRANSPORT_CORE_NATS)
    switched = worker_config(component, etcd_endpoint, nats_url, 1, transport=Transport.TRANSPORT_CORE_NATS)
    async with caching(core_nats, 2) as (two, cache_two), indexing(connection, component) as index:
        async with caching(durable) as (one, cache_one):
            index.update_workers({1: registration_of(one), 2: registration_of(two)})
            for _ in range(20):
                cache_one.live(2)
                cache_two.live(2)
                await one.flush()
            await agrees(index, one, cache_one)
            await agrees(index, two, cache_two)
        async with caching(switched, 3) as (one, cache_one):
            index.update_workers({1: registration_of(one), 2: registration_of(two)})
            cache_one.live(50)
            await agrees(index, one, cache_one)
            await agrees(index, two, cache_two)
