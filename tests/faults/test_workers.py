"""Scenarios 3, 4, 5 and 9: workers that leave, return, lose their lease, switch, and whose messages go astray."""

from __future__ import annotations

import asyncio

import pytest
from kvrouter.publisher.etcd import TakenOver
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.devstack import NatsServer
from kvrouter.v1.common_pb2 import Transport
from kvrouter.v1.events_pb2 import BlocksRemoved, KvEvent, KvEventBatch
from kvrouter.v1.indexer_pb2 import FindMatchesRequest, LocalHashes, VerifyRequest
from nats.aio.msg import Msg

from .rig import BLOCK_SIZE, COMPONENT, NAMED, Rig


async def test_a_lease_that_lapses_costs_no_blocks(rig: Rig) -> None:
    nodes = await rig.start_nodes(1, 2)
    one = await rig.indexer("one", worker_grace_seconds=30)
    await rig.serve(10)
    await rig.agree(one)
    before = len(one.log())
    for node in nodes:
        await rig.delete_key(COMPONENT.worker_key(node.worker.config.worker_id))
    await rig.serve(10, 0.02)
    await rig.agree(one)
    assert "rank dropped" not in one.log()[before:]
    assert "rank is gone" not in one.log()[before:]


async def test_a_worker_leaves_and_comes_back_with_another_cache(rig: Rig) -> None:
    await rig.start_nodes(2)
    one = await rig.indexer("one")
    async with rig.node(1) as node:
        await rig.serve(15)
        await rig.agree(one)
        former = node.worker.incarnation
    await rig.agree(one)  # its blocks go after the grace
    async with rig.node(1) as node:
        node.serve(10)
        await rig.agree(one)
        late = KvEventBatch(
            worker_id=1,
            incarnation=former,
            block_size=BLOCK_SIZE,
            events=[KvEvent(event_id=0, removed=BlocksRemoved(engine_hashes=list(node.engine.cached_blocks())[:3]))],
            next_event_id=1,
        )
        client = await rig.client()
        await client.jetstream().publish(COMPONENT.events_subject(1, 0), late.SerializeToString())
        node.serve(2)
        await rig.agree(one)
        assert (await one.stats()).events.fenced == 1


async def test_of_two_workers_with_one_id_the_later_counts(rig: Rig) -> None:
    one = await rig.indexer("one")
    started = asyncio.Event()

    async def former() -> None:
        async with rig.node(1) as node:
            node.serve(5)
            started.set()
            await asyncio.Event().wait()

    ending = asyncio.create_task(former())
    await started.wait()
    await rig.agree(one)
    async with rig.node(1) as node:
        node.serve(5)
        with pytest.raises(TakenOver):
            await ending
        node.serve(5)
        await rig.agree(one)


async def test_light_messages_are_dropped_doubled_and_reordered(rig: Rig) -> None:
    """Workers publish to one NATS; what reaches the Indexer's goes through the test, which loses some."""
    far = await NatsServer(rig.directory / "far").start()
    rig.exits.push_async_callback(far.kill)
    near = await rig.client()
    here, rig.nats = rig.nats, far
    source = await rig.client()
    rig.nats = here
    counts = {"dropped": 0, "doubled": 0, "reordered": 0}
    delayed: list[Msg] = []

    async def forward(message: Msg) -> None:
        dice = rig.rng.random()
        if dice < 0.05:
            counts["dropped"] += 1
            return
        if dice < 0.10:
            counts["reordered"] += 1
            delayed.append(message)
            return
        copies = 2 if dice < 0.15 else 1
        counts["doubled"] += copies - 1
        for each in [message] * copies + delayed:
            await near.publish(each.subject, each.data)
        delayed.clear()

    await source.subscribe(COMPONENT.live_wildcard, cb=forward)
    await rig.start_nodes(1, 2, nats=far.url, transport=Transport.TRANSPORT_LIGHT)
    one = await rig.indexer("one")
    await rig.serve(10)
    await rig.agree(one)
    await rig.serve(120, 0.01)
    await rig.agree(one)
    assert all(counts.values()), counts
    stats = await one.stats()
    assert stats.events.gaps


async def test_both_transports_and_a_worker_that_switches(rig: Rig) -> None:
    await rig.start_nodes(2, transport=Transport.TRANSPORT_LIGHT)
    one, two = await rig.indexer("one"), await rig.indexer("two")
    async with rig.node(1, transport=Transport.TRANSPORT_DURABLE) as node:
        await rig.serve(15, 0.01)
        await rig.agree(one, two)
        engine = node.engine
    assert engine.cached_blocks()
    async with rig.node(1, transport=Transport.TRANSPORT_LIGHT) as node:
        await rig.serve(15, 0.01)
        await rig.agree(one, two)


async def test_an_operator_sees_that_index_and_workers_agree(rig: Rig) -> None:
    await rig.start_nodes(1, 2)
    one = await rig.indexer("one")
    await rig.serve(10)
    await rig.agree(one)
    async with one.called() as service:
        answers = [
            answer async for answer in service.verify(VerifyRequest(component=NAMED), deadline=Deadline.after(20))
        ]
        assert [(each.compared, each.missing_blocks, each.surplus_blocks) for each in answers] == [(True, 0, 0)] * 2
        found = await service.find_matches(
            FindMatchesRequest(component=NAMED, local_hashes=LocalHashes(hashes=[1])), deadline=Deadline.after(5)
        )
        assert list(found.worker_ids) == [1, 2]
