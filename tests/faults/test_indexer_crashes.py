"""Scenarios 1 and 6: Indexers that are killed, and snapshots that cannot be used."""

from __future__ import annotations

import asyncio

import pytest
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.indexer_pb2 import TakeSnapshotRequest

from .rig import COMPONENT, FULL, NAMED, TAKEN, Rig

FAILPOINTS = ["read", "put", "uploaded", "pointed", "cleaned", "purged"]


@pytest.mark.full
@pytest.mark.parametrize("place", FAILPOINTS if FULL else ["pointed"])
async def test_killed_while_it_takes_a_snapshot(rig: Rig, place: str) -> None:
    await rig.start_nodes(1, 2)
    first = await rig.indexer("first", snapshot_threshold=15)
    await rig.serve(20, 0.01)
    await rig.until(lambda: TAKEN in first.log())
    await first.kill()
    doomed = await rig.indexer("doomed", place, snapshot_threshold=15)
    while doomed.running:
        await rig.serve(3, 0.02)
    rig.indexers.remove(doomed)
    rig.indexers.remove(first)
    await rig.serve(10)
    after = await rig.indexer("after")
    await rig.agree(after)
    assert '"event": "snapshot.restored"' in after.log()


async def test_killed_at_random_moments(rig: Rig) -> None:
    await rig.start_nodes(1, 2, 3)
    one = await rig.indexer("one", snapshot_threshold=10)
    for number in range(20 if FULL else 4):
        if number % 2:  # the others may die while they start
            await rig.until(one.stats)
        serving = asyncio.create_task(rig.serve(rig.rng.randrange(10, 40), 0.02))
        await asyncio.sleep(rig.rng.uniform(0, 1.0))
        await one.kill()
        await one.start()
        await serving
    await rig.agree(one)


@pytest.mark.full
async def test_a_snapshot_that_cannot_be_used_gives_way_to_the_one_before(rig: Rig) -> None:
    await rig.start_nodes(1, 2)
    one = await rig.indexer("one")
    client = await rig.client()
    names = []
    for _ in range(2):
        await rig.serve(5)
        await rig.agree(one)
        async with one.called() as service:
            answer = await service.take_snapshot(TakeSnapshotRequest(component=NAMED), deadline=Deadline.after(20))
        names.append(answer.object_name)
    store = await client.jetstream().object_store(COMPONENT.snapshot_bucket)
    data = (await store.get(names[-1])).data
    assert data
    at = rig.rng.randrange(len(data) // 2, len(data))
    for damaged in (
        data[: rig.rng.randrange(len(data))],
        data[:at] + bytes([data[at] ^ 1 << rig.rng.randrange(8)]) + data[at + 1 :],
        data.replace(b"\x08\x01", b"\x08\x09", 1),  # a later format version
    ):
        await one.kill()
        await store.put(names[-1], damaged)
        before = len(one.log())
        await rig.serve(3)
        await one.start()
        await rig.agree(one)
        log = one.log()[before:]
        assert "snapshot.unusable" in log
        assert names[0] in next(line for line in log.splitlines() if '"event": "snapshot.restored"' in line)
