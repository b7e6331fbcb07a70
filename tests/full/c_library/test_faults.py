"""Workers in C in the fault scenarios of the Python SDK; the index equals the engines' own block tables after each."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvrouter.net.etcd import connect
from kvrouter.net.nats.event_stream import stream_config
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import TokenIds, Transport
from kvrouter.v1.indexer_pb2 import FindMatchesRequest, VerifyRequest
from kvrouter.v1.registry_pb2 import ComponentDescriptor
from nats.js.errors import NotFoundError

from ...faults.rig import BLOCK_SIZE, COMPONENT, NAMED, IndexerProcess, Rig
from ...faults.wires import AckLosingWire, Wire
from .driven import DESCRIPTOR_MISMATCH, KEY_TAKEN, STOPPED, DrivenWorker, start_driven

TRANSPORTS = [Transport.TRANSPORT_DURABLE, Transport.TRANSPORT_CORE_NATS]


@pytest.mark.parametrize("transport", TRANSPORTS, ids=["durable", "core"])
async def test_an_index_has_what_a_worker_in_c_reported(rig: Rig, driven_worker: Path, transport: Transport) -> None:
    node = await start_driven(rig, driven_worker, 1, transport=transport)
    one = await rig.indexer("one")
    await rig.serve(20)
    await rig.agree(one)
    prompt = node.longest_prompt()
    async with one.called() as service:
        found = await service.find_matches(
            FindMatchesRequest(component=NAMED, token_ids=TokenIds(ids=memoryview(prompt).cast("I").tolist())),
            deadline=Deadline.after(5),
        )
        assert list(found.worker_ids) == [1]
        assert list(found.device_blocks) == [len(prompt) // (4 * BLOCK_SIZE)]
        answers = [each async for each in service.verify(VerifyRequest(component=NAMED), deadline=Deadline.after(20))]
        assert [(each.compared, each.missing_blocks, each.surplus_blocks) for each in answers] == [(True, 0, 0)]


async def test_workers_in_c_and_in_python_share_a_component(rig: Rig, driven_worker: Path) -> None:
    await start_driven(rig, driven_worker, 1)
    await rig.start_nodes(2)
    one = await rig.indexer("one")
    await rig.serve(15)
    await rig.agree(one)


@pytest.mark.parametrize("transport", TRANSPORTS, ids=["durable", "core"])
async def test_nats_is_killed_and_comes_back(rig: Rig, driven_worker: Path, transport: Transport) -> None:
    await start_driven(rig, driven_worker, 1, transport=transport)
    one = await rig.indexer("one")
    await rig.serve(10)
    await rig.agree(one)
    await rig.nats.kill()
    await rig.serve(10)
    await rig.nats.start()
    await rig.serve(10)
    await rig.agree(one)


async def test_nats_is_away_for_longer_than_the_buffer_holds(rig: Rig, driven_worker: Path) -> None:
    node = await start_driven(rig, driven_worker, 1, buffer_events=20, transport=Transport.TRANSPORT_DURABLE)
    one = await rig.indexer("one")
    await rig.serve(5)
    await rig.agree(one)
    await rig.nats.kill()
    while not node.worker.obey("check").events_dropped:
        await rig.serve(5)
    await rig.nats.start()
    await rig.serve(5)
    await rig.agree(one)


async def test_the_stream_is_lost(rig: Rig, driven_worker: Path) -> None:
    await start_driven(rig, driven_worker, 1, transport=Transport.TRANSPORT_DURABLE)
    one = await rig.indexer("one")
    await rig.serve(10)
    await rig.agree(one)
    client = await rig.client()
    await client.jetstream().delete_stream(COMPONENT.stream)
    await rig.serve(10)
    await rig.agree(one)


async def test_a_missing_stream_is_made_although_somebody_subscribes_to_its_subjects(
    rig: Rig, driven_worker: Path
) -> None:
    client = await rig.client()
    # Messages without a stream have a receiver now, so the server does not say that none stored them.
    await client.subscribe(COMPONENT.events_wildcard)
    await client.flush()
    await start_driven(rig, driven_worker, 1, transport=Transport.TRANSPORT_DURABLE)
    await rig.serve(10)

    async def stored() -> bool:
        try:
            return (await client.jetstream().stream_info(COMPONENT.stream)).state.messages > 0
        except NotFoundError:
            return False

    await rig.until(stored)


async def test_an_indexer_that_lacks_messages_fetches_them_from_the_worker(rig: Rig, driven_worker: Path) -> None:
    """The stream drops messages that the Indexer has not read."""
    await start_driven(rig, driven_worker, 1, transport=Transport.TRANSPORT_DURABLE)
    one = await rig.indexer("one")
    await rig.serve(10)
    await rig.agree(one)
    await one.kill()
    client = await rig.client()
    await client.jetstream().update_stream(stream_config(COMPONENT, max_bytes=20_000))
    first = (await client.jetstream().stream_info(COMPONENT.stream)).state.last_seq
    while (await client.jetstream().stream_info(COMPONENT.stream)).state.first_seq <= first + 1:
        await rig.serve(10, 0.01)
    await one.start()
    await rig.serve(5)
    await rig.agree(one)


async def test_lost_acknowledgements_store_no_event_twice(rig: Rig, driven_worker: Path) -> None:
    wire = AckLosingWire(rig.nats.port, rig.rng)
    await rig.exits.enter_async_context(wire.laid())
    nats = f"nats://{wire.address}"
    node = await start_driven(rig, driven_worker, 1, nats=nats, transport=Transport.TRANSPORT_DURABLE)
    one = await rig.indexer("one")
    while len(+wire.counts) < 3:
        await rig.serve(1)
        assert (await node.worker.awaited("flush")).status == 0
    await rig.agree(one)
    counted = (await one.stats()).events
    assert (counted.gaps, counted.repairs) == (0, 0)


async def test_a_lease_that_lapses_costs_no_blocks(rig: Rig, driven_worker: Path) -> None:
    wire = Wire(rig.etcd.port)
    await rig.exits.enter_async_context(wire.laid())
    node = await start_driven(rig, driven_worker, 1, etcd=wire.address)
    one = await rig.indexer("one", worker_grace_seconds=60)
    await rig.serve(10)
    await rig.agree(one)
    before = len(one.log())
    wire.cut()
    await rig.until(lambda: _is_gone(rig, 1))
    await rig.until(lambda: not node.worker.obey("check").registered)
    await rig.serve(10)
    await rig.agree(one)
    wire.mend()
    await rig.until(lambda: node.worker.obey("check").registered)
    await rig.serve(10, 0.02)
    await rig.agree(one)
    for words in ("rank.dropped", "rank.removed", "rank.incarnation_started", "rank.resynced"):
        assert words not in one.log()[before:]


async def test_etcd_loses_everything_and_the_worker_registers_again(rig: Rig, driven_worker: Path) -> None:
    await start_driven(rig, driven_worker, 1)
    async with connect(rig.etcd.endpoint) as client:
        await client.delete_prefix(b"/kvrouter/")
    for key in (COMPONENT.worker_key(1), COMPONENT.descriptor_key, COMPONENT.incarnation_key(1)):
        await rig.until(lambda key=key: rig.has_key(key))  # type: ignore[misc]


async def test_a_killed_worker_comes_back_as_a_new_incarnation(rig: Rig, driven_worker: Path) -> None:
    former = await start_driven(rig, driven_worker, 1)
    one = await rig.indexer("one", worker_grace_seconds=60)
    await rig.serve(15)
    await rig.agree(one)
    incarnation, _ = former.cursor
    await former.worker.kill()
    node = await start_driven(rig, driven_worker, 1)
    assert node.cursor[0] > incarnation
    node.keep_half(former)
    await rig.agree(one)
    node.serve(5)
    await rig.agree(one)


async def test_of_two_workers_with_one_id_the_later_counts(rig: Rig, driven_worker: Path) -> None:
    former = await start_driven(rig, driven_worker, 1)
    former.serve(5)
    one = await rig.indexer("one")
    await rig.agree(one)
    node = await start_driven(rig, driven_worker, 1)
    node.serve(5)
    await rig.until(lambda: former.worker.obey("check").status == KEY_TAKEN)
    assert "give each process an id of its own" in former.worker.obey("cleared").error
    node.serve(5)
    await rig.agree(one)
    assert await former.worker.close() == 0


async def test_a_rank_that_lost_events_is_announced_until_it_is_cleared(rig: Rig, driven_worker: Path) -> None:
    node = await start_driven(rig, driven_worker, 1)
    one = await rig.indexer("one")
    await rig.serve(5)
    await rig.agree(one)
    node.worker.obey("lost")
    await rig.until(lambda: _partial(one, True))
    node.worker.obey("cleared")
    await rig.until(lambda: _partial(one, False))


async def test_a_worker_that_stops_deregisters_and_has_sent_everything(rig: Rig, driven_worker: Path) -> None:
    node = await start_driven(rig, driven_worker, 1, lease_ttl_seconds=60)
    one = await rig.indexer("one", worker_grace_seconds=60)
    await rig.agree(one)
    node.serve(10)
    cursor, held = node.cursor, node.holds()
    assert (await node.worker.awaited("stop")).status == 0
    assert not await rig.has_key(COMPONENT.worker_key(1))
    assert node.worker.obey("cleared").status == STOPPED
    await rig.until(lambda: _reaches(one, cursor))
    assert await one.held(1) == held
    assert await node.worker.close() == 0


async def test_a_worker_that_does_not_fit_its_component_is_refused(rig: Rig, driven_worker: Path) -> None:
    await start_driven(rig, driven_worker, 1)
    worker = DrivenWorker(driven_worker, 2, etcd=rig.etcd.endpoint, nats=rig.nats.url, model="other")
    rig.exits.push_async_callback(worker.kill)
    answer = await worker.opened()
    assert answer.status == DESCRIPTOR_MISMATCH
    assert "model: expected m, this worker has other" in answer.error
    async with connect(rig.etcd.endpoint) as client:
        found = await client.get(COMPONENT.descriptor_key.encode())
        assert ComponentDescriptor.FromString(found.value).model == "m"


async def _is_gone(rig: Rig, worker_id: int) -> bool:
    return not await rig.has_key(COMPONENT.worker_key(worker_id))


async def _partial(one: IndexerProcess, expected: bool) -> bool:
    return [rank.partial for rank in (await one.stats()).ranks] == [expected]


async def _reaches(one: IndexerProcess, cursor: tuple[int, int]) -> bool:
    ranks = (await one.stats()).ranks
    return [(rank.cursor.incarnation, rank.cursor.next_event_id) for rank in ranks] == [cursor]
