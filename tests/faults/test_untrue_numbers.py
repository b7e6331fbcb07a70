"""Numbers that are untrue: forged events, and clocks that are wrong, jump, and come right."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from kvrouter.net.etcd import connect
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import Transport
from kvrouter.v1.events_pb2 import BlocksCleared, KvEvent, KvEventBatch
from kvrouter.v1.indexer_pb2 import TakeSnapshotRequest
from kvrouter.v1.scheduler_pb2 import RankStatus

from .processes import PATIENCE_SECONDS, Processes
from .relays import start_relayed
from .rig import BLOCK_SIZE, COMPONENT, FULL, NAMED, Rig
from .shifted_clock import set_clock

LARGEST = (1 << 64) - 1
HOUR = 3600
TEN_YEARS = 10 * 365 * 24 * HOUR


def forged(incarnation: int, next_event_id: int, *events: KvEvent) -> bytes:
    return KvEventBatch(
        worker_id=1, incarnation=incarnation, block_size=BLOCK_SIZE, events=events, next_event_id=next_event_id
    ).SerializeToString()


@pytest.mark.parametrize(
    "transport",
    [Transport.TRANSPORT_DURABLE, pytest.param(Transport.TRANSPORT_CORE_NATS, marks=pytest.mark.full)],
)
async def test_forged_events_cost_no_block(rig: Rig, transport: Transport) -> None:
    await rig.start_nodes(1, 2, transport=transport)
    one = await rig.indexer("one", worker_grace_seconds=60)
    await rig.serve(15)
    await rig.agree(one)
    client = await rig.client()
    durable = transport == Transport.TRANSPORT_DURABLE
    subject = COMPONENT.events_subject(1, 0) if durable else COMPONENT.live_subject(1, 0)
    before = len(one.log())
    rounds = 30 if FULL else 5
    for number in range(rounds):
        incarnation, event_id = rig.nodes[1].cursor
        for batch in (
            forged(LARGEST, 0),
            forged(incarnation + 1 + number, 1, KvEvent(event_id=0, cleared=BlocksCleared())),
            forged(incarnation, event_id + 1001, KvEvent(event_id=event_id + 1000, cleared=BlocksCleared())),
            forged(incarnation, LARGEST - 1),
        ):
            await client.publish(subject, batch)
        await client.flush()
        await rig.serve(3, 0.02)
    await rig.until(lambda: _unconfirmed(one, 3 * rounds))
    await rig.agree(one)
    for words in ("rank.dropped", "rank.incarnation_started", "rank.resynced"):
        assert words not in one.log()[before:]
    await one.kill()
    await one.start()
    await rig.serve(2)
    await rig.agree(one)


async def _unconfirmed(process: object, count: int) -> bool:
    return (await process.stats()).events.unconfirmed >= count  # type: ignore[attr-defined]


@pytest.mark.full
async def test_a_worker_whose_clock_was_ten_years_ahead_comes_back_right(rig: Rig) -> None:
    """Its record in etcd is lost meanwhile, so that its next incarnation is below the last one."""
    clock = rig.directory / "clock"
    set_clock(clock, TEN_YEARS)
    node = await start_relayed(rig, 1, clock)
    one = await rig.indexer("one", worker_grace_seconds=60)
    await rig.serve(15)
    await rig.agree(one)
    async with one.called() as service:
        await service.take_snapshot(TakeSnapshotRequest(component=NAMED), deadline=Deadline.after(20))
    await node.kill_relay()
    await rig.until(lambda: _is_lapsed(rig))
    async with connect(rig.etcd.endpoint) as client:
        await client.delete(COMPONENT.incarnation_key(1).encode())
    shutil.rmtree(node.state)
    set_clock(clock, 0)
    node.engine.clear_cache()
    await node.start_relay()
    assert node.incarnations[1] < node.incarnations[0]
    await rig.serve(5)
    await rig.agree(one)
    # Snapshot and stream still have the former incarnation, which is higher.
    await one.kill()
    await one.start()
    await rig.serve(5)
    await rig.agree(one)
    await rig.agree(await rig.indexer("two"))


async def _is_lapsed(rig: Rig) -> bool:
    return not await rig.has_key(COMPONENT.worker_key(1))


@pytest.mark.full
async def test_clocks_that_jump_while_they_serve(rig: Rig) -> None:
    near, far = rig.directory / "near-clock", rig.directory / "far-clock"
    for clock in (near, far):
        set_clock(clock, 0)
    await start_relayed(rig, 1, near)
    one = await rig.indexer("one", clock=far, snapshot_threshold=20)
    two = await rig.indexer("two", snapshot_threshold=20)
    for clock in (near, far):
        for seconds in (HOUR, -HOUR, TEN_YEARS, 0):
            set_clock(clock, seconds)
            await rig.serve(10, 0.01)
            await rig.agree(one, two)
    assert "rank.dropped" not in one.log() + two.log()
    await one.kill()
    await one.start()
    await rig.agree(one)


async def test_a_worker_whose_clock_goes_back_is_heard_of_its_load(processes: Processes, tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    set_clock(clock, HOUR)
    await processes.start("scheduler", "scheduler")
    await processes.start("mocker", "mocker", "--worker-id", "1", "--load-report-seconds", "0.1", clock=clock)
    await processes.ready("scheduler", "scheduler")
    before = (await _reported(processes, 0)).reported.measured_unix_ns
    set_clock(clock, 0)
    # It is an hour earlier there, and stays that.
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await _reported(processes, 0)).reported.measured_unix_ns >= before:
            await asyncio.sleep(0.05)


async def _reported(processes: Processes, number: int) -> RankStatus:
    """The status of a rank, once its load is reported."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            components = (await processes.status("scheduler")).components
            if components and len(components[0].ranks) > number and components[0].ranks[number].HasField("reported"):
                return components[0].ranks[number]
            await asyncio.sleep(0.05)
