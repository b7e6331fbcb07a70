"""Scenarios 3, 4, 5 and 9: workers that leave, return, lose their lease, switch, and whose messages go astray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack

import pytest
from kvrouter.devtools.system.servers import NatsServer
from kvrouter.net.etcd import KeyTaken
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import LocalHashes, RoutingRequest, TokenIds, Transport
from kvrouter.v1.events_pb2 import BlocksRemoved, KvEvent, KvEventBatch
from kvrouter.v1.indexer_pb2 import FindMatchesRequest, VerifyRequest
from kvrouter.v1.scheduler_pb2 import SelectWorkerRequest
from nats.aio.client import Client
from nats.aio.msg import Msg

from .processes import Processes, system
from .relays import start_relayed
from .rig import BLOCK_SIZE, COMPONENT, FULL, NAMED, Node, Rig
from .wires import AckLosingWire, Wire


async def test_leases_that_lapse_cost_no_blocks(rig: Rig) -> None:
    """Workers lose etcd for longer than their leases live, while their engines serve and the Indexer sees etcd."""
    wire = Wire(rig.etcd.port)
    await rig.exits.enter_async_context(wire.laid())
    nodes = await rig.start_nodes(1, 2, etcd=wire.address, lease_ttl_seconds=2)
    one = await rig.indexer("one", worker_grace_seconds=60)
    await rig.serve(10)
    await rig.agree(one)
    before = len(one.log())
    wire.cut()
    for node in nodes:
        await rig.until(lambda node=node: _is_gone(rig, node))  # type: ignore[misc]
    await rig.serve(10)
    await rig.agree(one)
    wire.mend()
    for node in nodes:
        await node.worker.registered()
    await rig.serve(10, 0.02)
    await rig.agree(one)
    for words in ("rank.dropped", "rank.removed", "rank.incarnation_started", "rank.resynced"):
        assert words not in one.log()[before:]


async def _is_gone(rig: Rig, node: Node) -> bool:
    return not await rig.has_key(COMPONENT.worker_key(node.worker.config.worker_id))


@pytest.mark.parametrize("how", ["signs off", pytest.param("killed", marks=pytest.mark.full)])
async def test_no_request_goes_to_a_worker_that_left_while_its_blocks_are_still_there(rig: Rig, how: str) -> None:
    (other,) = await rig.start_nodes(2)
    one = await rig.indexer("one", worker_grace_seconds=5)
    async with system(rig.nats.url, rig.etcd.endpoint, COMPONENT.namespace) as processes:
        await processes.start("scheduler", "scheduler", "--router-mode", "kv")
        await processes.ready("scheduler", "scheduler")
        scheduler = processes.scheduler("scheduler")

        async def chosen(prompt: bytes) -> tuple[int, int]:
            """The worker that a request would go to, and its overlap."""
            asked = RoutingRequest(model="m", token_ids=TokenIds(ids=memoryview(prompt).cast("I").tolist()))
            answer = await scheduler.select_worker(SelectWorkerRequest(request=asked), deadline=Deadline.after(10))
            return answer.rank.worker_id, answer.overlap_blocks

        async with AsyncExitStack() as stack:
            relayed = await start_relayed(rig, 1) if how == "killed" else None
            node = relayed or await stack.enter_async_context(rig.node(1))
            node.serve(10)
            other.serve(10)
            await rig.agree(one)
            prompt = node.longest_prompt() + b"\1\0\0\0"  # the last token is always computed
            blocks = len(prompt) // (4 * BLOCK_SIZE)
            await rig.until(lambda: _equals(chosen(prompt), (1, blocks)))
            if relayed:
                await relayed.kill_relay()
                del rig.nodes[1]
        await rig.until(lambda: _equals(_registered(processes), {2}))
        # The Scheduler hears of it by a watch of its own.
        await rig.until(lambda: _goes_to(chosen(prompt), 2))
        left = False
        while await one.held(1):
            assert (await chosen(prompt))[0] == 2
            left = True
        assert left, "its blocks were there for a while"
        await rig.agree(one)
        assert (await chosen(prompt))[0] == 2


async def _equals(answer: Awaitable[object], wanted: object) -> bool:
    return await answer == wanted


async def _goes_to(answer: Awaitable[tuple[int, int]], worker_id: int) -> bool:
    return (await answer)[0] == worker_id


async def _registered(processes: Processes) -> set[int]:
    return {worker for view in processes.directory.components.values() for worker in view.workers}


async def test_a_worker_comes_back_under_its_id_with_half_its_cache(rig: Rig) -> None:
    await rig.start_nodes(2)
    one = await rig.indexer("one", worker_grace_seconds=60)
    async with rig.node(1) as former:
        await rig.serve(15)
        await rig.agree(one)
    async with rig.node(1) as node:
        node.keep_half(former)
        await rig.agree(one)
        held = {block[1:3] for block in await one.held(1)}
        assert held < {block[1:3] for block in former.holds()}
        assert held
        node.serve(5)
        await rig.agree(one)


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
        fenced = (await one.stats()).events.fenced
        await client.jetstream().publish(COMPONENT.events_subject(1, 0), late.SerializeToString())
        node.serve(2)
        await rig.agree(one)
        assert (await one.stats()).events.fenced == fenced + 1


@pytest.mark.full
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
        with pytest.raises(KeyTaken):
            await ending
        node.serve(5)
        await rig.agree(one)


@pytest.mark.full
async def test_core_nats_messages_are_dropped_doubled_and_reordered(rig: Rig) -> None:
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
    await source.flush()
    await rig.start_nodes(1, 2, nats=far.url, transport=Transport.TRANSPORT_CORE_NATS)
    one = await rig.indexer("one")
    await rig.serve(10)
    await rig.agree(one)
    await rig.serve(120, 0.01)
    while not all(counts.values()) or not (await one.stats()).events.gaps:  # a slow machine sends fewer messages
        await rig.serve(10, 0.01)
    await rig.agree(one)


@pytest.mark.full
async def test_publish_acknowledgements_are_dropped_doubled_and_reordered(rig: Rig) -> None:
    wire = AckLosingWire(rig.nats.port, rig.rng)
    await rig.exits.enter_async_context(wire.laid())
    nodes = await rig.start_nodes(1, 2, nats=f"nats://{wire.address}", transport=Transport.TRANSPORT_DURABLE)
    one = await rig.indexer("one")
    rounds = 0
    while rounds < (100 if FULL else 20) or len(+wire.counts) < 3:
        rounds += 1
        await rig.serve(1)
        for node in nodes:
            await node.worker.flush()
    await rig.agree(one)
    # Those of heartbeats are dropped too, at any moment, and it takes a while until one is missed.
    await rig.until(lambda: sum(node.worker.rank(0).stats().retries for node in nodes) >= wire.counts["dropped"])
    counted = (await one.stats()).events
    assert (counted.gaps, counted.repairs) == (0, 0)
    event_ids = await _events_of_stream(await rig.client())
    assert len(event_ids) == len(set(event_ids)), "the stream keeps each event once"


async def _events_of_stream(client: Client) -> list[tuple[int, int]]:
    """(worker, event id) of all events that the stream holds."""
    js = client.jetstream()
    state = (await js.stream_info(COMPONENT.stream)).state
    messages = [await js.get_msg(COMPONENT.stream, seq) for seq in range(state.first_seq, state.last_seq + 1)]
    batches = [KvEventBatch.FromString(message.data or b"") for message in messages]
    return [(batch.worker_id, event.event_id) for batch in batches for event in batch.events]


@pytest.mark.full
async def test_both_transports_and_a_worker_that_switches(rig: Rig) -> None:
    await rig.start_nodes(2, transport=Transport.TRANSPORT_CORE_NATS)
    await rig.start_nodes(3, transport=Transport.TRANSPORT_DURABLE)
    one, two = await rig.indexer("one"), await rig.indexer("two")
    for transport in (Transport.TRANSPORT_DURABLE, Transport.TRANSPORT_CORE_NATS, Transport.TRANSPORT_DURABLE):
        async with rig.node(1, transport=transport) as node:
            await rig.serve(15, 0.01)
            await rig.agree(one, two)
            assert node.engine.cached_blocks()


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
