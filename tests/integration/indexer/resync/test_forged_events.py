"""Events that no worker sent: what they may cost, over real NATS, etcd and gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from kvrouter.indexer.replica.component import ComponentIndex
from kvrouter.indexer.resync import fetcher as resync
from kvrouter.indexer.resync.worker_client import fetch_events
from kvrouter.publisher.worker import Worker
from kvrouter.runtime.contracts import Worker as WorkerStub
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import Transport
from kvrouter.v1.events_pb2 import BlocksCleared, BlocksRemoved, KvEvent, KvEventBatch
from kvrouter.v1.names import ComponentName
from nats.aio.client import Client

from ....waiting import until
from ..event_batches import BLOCK_SIZE
from ..indexing import indexing
from .truth import Cache, agrees, caching, registration_of, resident_blocks, worker_config

LARGEST = (1 << 64) - 1
RANK = (1, 0)


@dataclass
class Scene:
    """A worker, its index, and somebody who publishes in the worker's name."""

    connection: Client
    component: ComponentName
    worker: Worker
    cache: Cache
    index: ComponentIndex

    async def forge(
        self,
        *events: KvEvent,
        next_event_id: int | None = None,
        incarnation: int | None = None,
        digest: int | None = None,
    ) -> None:
        batch = KvEventBatch(
            worker_id=1,
            incarnation=self.worker.incarnation if incarnation is None else incarnation,
            events=events,
            block_size=BLOCK_SIZE,
            next_event_id=(events[-1].event_id + 1 if events else self.next_event_id)
            if next_event_id is None
            else next_event_id,
            digest=digest,
        )
        core_nats = self.worker.transport == Transport.TRANSPORT_CORE_NATS
        subject = self.component.live_subject(1, 0) if core_nats else self.component.events_subject(1, 0)
        await self.connection.publish(subject, batch.SerializeToString())
        await self.connection.flush()

    @property
    def next_event_id(self) -> int:
        return self.cache.rank.stats().next_event_id

    async def heard(self, unconfirmed: int) -> None:
        await until(lambda: self.index.state.events.tally.unconfirmed >= unconfirmed)

    async def is_as_before(self) -> None:
        """The rank equals its worker, is verified, and never lost a block."""
        await agrees(self.index, self.worker, self.cache)
        await until(lambda: self.index.state.known.view(RANK).verified)
        assert self.index.state.events.tally.repairs == 0, "the rank was never dropped"


@asynccontextmanager
async def scene(
    connection: Client, component: ComponentName, nats_url: str, etcd: str, transport: Transport
) -> AsyncIterator[Scene]:
    # Idle but for what the tests do: neither heartbeats nor events heal anything behind their backs.
    config = worker_config(component, etcd, nats_url, 1, transport=transport, heartbeat_seconds=60.0)
    async with caching(config) as (worker, cache), indexing(connection, component) as index:
        index.update_workers({1: registration_of(worker)})
        cache.live(30)
        await worker.flush()
        await until(lambda: index.ready)
        await agrees(index, worker, cache)
        yield Scene(connection, component, worker, cache, index)


BOTH = pytest.mark.parametrize("transport", [Transport.TRANSPORT_DURABLE, Transport.TRANSPORT_CORE_NATS])


@BOTH
async def test_event_ids_far_ahead_cost_a_few_questions_and_no_block(
    connection: Client,
    component: ComponentName,
    nats_url: str,
    etcd_endpoint: str,
    transport: Transport,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    questions = 0

    async def counted(
        worker: WorkerStub, rank: tuple[int, int], cursor: tuple[int, int], deadline: Deadline
    ) -> list[bytes] | None:
        nonlocal questions
        questions += 1
        return await fetch_events(worker, rank, cursor, deadline)

    monkeypatch.setattr(resync, "fetch_events", counted)
    async with scene(connection, component, nats_url, etcd_endpoint, transport) as there:
        before = questions
        for ahead in (1000, LARGEST - 1 - there.next_event_id):
            await there.forge(KvEvent(event_id=there.next_event_id + ahead, removed=BlocksRemoved(engine_hashes=[1])))
        await there.forge(next_event_id=there.next_event_id + 7)
        await there.heard(3)
        await until(lambda: there.index.resync.pending == 0)
        assert questions - before <= 4
        await there.is_as_before()
        assert there.index.resync.false_alarms
        there.cache.live(10)
        await there.is_as_before()


@BOTH
async def test_a_stream_of_event_ids_far_ahead_holds_up_no_real_event(
    connection: Client, component: ComponentName, nats_url: str, etcd_endpoint: str, transport: Transport
) -> None:
    async with scene(connection, component, nats_url, etcd_endpoint, transport) as there:
        for n in range(100):
            await there.forge(KvEvent(event_id=there.next_event_id + 1000 + n, cleared=BlocksCleared()))
            there.cache.live(1)
            await there.worker.flush()
        await there.heard(100)
        assert there.index.resync.false_alarms < 30
        await agrees(there.index, there.worker, there.cache)
        for n in range(3):
            await there.forge(KvEvent(event_id=there.next_event_id + 1000 + n, cleared=BlocksCleared()))
        await until(lambda: (repair := there.index.resync.repair_of(RANK)) is not None and repair.attempts > 0)
        assert (await there.index.stats()).ranks[0].repair.reason == "gap"


@BOTH
@pytest.mark.parametrize("incarnation", ["largest", "next"])
async def test_a_forged_incarnation_empties_no_rank(
    connection: Client,
    component: ComponentName,
    nats_url: str,
    etcd_endpoint: str,
    transport: Transport,
    incarnation: str,
) -> None:
    async with scene(connection, component, nats_url, etcd_endpoint, transport) as there:
        number = LARGEST if incarnation == "largest" else there.worker.incarnation + 1
        before = await resident_blocks(there.index, 1)
        await there.forge(next_event_id=0, incarnation=number)
        await there.heard(1)
        assert await resident_blocks(there.index, 1) == before
        await there.is_as_before()
        there.cache.live(10)
        await there.forge(KvEvent(event_id=0, cleared=BlocksCleared()), incarnation=number)
        await there.heard(2)
        await there.is_as_before()


async def test_events_that_the_worker_never_had_are_undone(
    connection: Client, component: ComponentName, nats_url: str, etcd_endpoint: str
) -> None:
    async with scene(connection, component, nats_url, etcd_endpoint, Transport.TRANSPORT_DURABLE) as there:
        at = there.next_event_id
        for n in range(5):
            await there.forge(KvEvent(event_id=at + n, cleared=BlocksCleared()))
        await until(lambda: there.index.state.events.tally.applied >= at + 5)
        assert await resident_blocks(there.index, 1) == set()
        there.cache.live(1)
        await agrees(there.index, there.worker, there.cache)


async def test_drift_that_was_forged_twice_heals(
    connection: Client, component: ComponentName, nats_url: str, etcd_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrouter.indexer.resync.resync_queue._PERSISTENT_PAUSE_SECONDS", (0.1, 0.2))
    async with scene(connection, component, nats_url, etcd_endpoint, Transport.TRANSPORT_DURABLE) as there:
        await there.forge(digest=1)
        await until(lambda: there.index.resync.resyncs == 1)
        await agrees(there.index, there.worker, there.cache)
        await there.forge(digest=1)
        await until(lambda: there.index.state.known.view(RANK).drifts == 2)
        await agrees(there.index, there.worker, there.cache)


async def test_a_worker_that_comes_back_in_a_lower_incarnation_counts_and_its_former_one_is_fenced(
    connection: Client, component: ComponentName, nats_url: str, etcd_endpoint: str
) -> None:
    config = worker_config(component, etcd_endpoint, nats_url, 1)
    async with indexing(connection, component) as index, caching(config) as (worker, cache):
        # The index has this worker in an incarnation of years ahead, as its clock was wrong, or somebody lied.
        late = registration_of(worker)
        late.ranks[0].incarnation += 10 * 365 * 86_400 * 10**9
        index.update_workers({1: late})
        await until(lambda: index.state.events.incarnations.current(RANK) == late.ranks[0].incarnation)
        cache.live(30)
        await worker.flush()
        await until(lambda: index.ready)
        await agrees(index, worker, cache)
        assert index.state.events.incarnations.current(RANK) == worker.incarnation, "the worker's own word"
        forged = KvEventBatch(
            worker_id=1, incarnation=late.ranks[0].incarnation, block_size=BLOCK_SIZE, next_event_id=0
        )
        await connection.publish(component.events_subject(1, 0), forged.SerializeToString())
        await until(lambda: index.state.events.tally.unconfirmed >= 1)
        cache.live(10)
        await agrees(index, worker, cache)


async def test_a_rank_that_was_loaded_in_a_later_incarnation_heals_from_its_worker(
    connection: Client, component: ComponentName, nats_url: str, etcd_endpoint: str
) -> None:
    config = worker_config(component, etcd_endpoint, nats_url, 1)
    async with caching(config) as (worker, cache), indexing(connection, component) as index:
        cache.live(30)
        await worker.flush()
        await until(lambda: index.ready)
        # Nobody is registered yet: as a snapshot, or a stream, of before would have it.
        await index.state.shared.change(lambda core: core.reset_rank(RANK, LARGEST, 0, partial=False))
        index.update_workers({1: registration_of(worker)})
        await agrees(index, worker, cache)
        cache.live(10)
        await agrees(index, worker, cache)
