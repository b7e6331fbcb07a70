"""Scenario 4: relays that die and come back beside engines that live on."""

from __future__ import annotations

import asyncio

import pytest

from .relays import start_relayed
from .rig import FULL, Held, Rig


async def test_a_relay_that_is_killed_goes_on_with_its_incarnation(rig: Rig) -> None:
    node = await start_relayed(rig, 1)
    one = await rig.indexer("one", worker_grace_seconds=30)
    await rig.agree(one)
    for _ in range(10 if FULL else 2):
        serving = asyncio.create_task(rig.serve(rig.rng.randrange(10, 60), 0.005))
        await asyncio.sleep(rig.rng.uniform(0, 0.3))
        await node.kill_relay()
        await serving
        await node.start_relay()
    await rig.serve(5)
    await rig.agree(one)
    assert len(set(node.incarnations)) == 1
    assert one.log().count("rank.incarnation_started") == 1
    assert "rank.dropped" not in one.log()


@pytest.mark.parametrize("fault", ["gone", pytest.param("damaged", marks=pytest.mark.full)])
async def test_a_relay_without_a_sound_file_begins_a_new_incarnation(rig: Rig, fault: str) -> None:
    node = await start_relayed(rig, 1)
    one = await rig.indexer("one")
    await rig.serve(10)
    await rig.agree(one)
    await node.kill_relay()
    (file,) = node.state.glob("*.snapshot")
    if fault == "gone":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[rig.rng.randrange(len(data))] ^= 1
        file.write_bytes(data)
    await rig.serve(5)
    await node.start_relay()
    await rig.agree(one)
    assert node.incarnations[0] < node.incarnations[1]


async def test_an_engine_that_cannot_repeat_missed_events_costs_blocks_only(rig: Rig) -> None:
    node = await start_relayed(rig, 1)
    one = await rig.indexer("one")
    await rig.serve(10)
    await rig.agree(one)
    await node.kill_relay()
    await rig.serve(5)
    node.forget_messages()
    await node.start_relay()
    held: Held = set()
    while len(held) < 5:  # what the engine stores below blocks that are not known is not known either
        await rig.serve(3)
        await rig.until(lambda: rig.is_there(one))
        held = await one.held(1)
    assert {block[:3] for block in held} <= {block[:3] for block in node.holds()}
    assert node.incarnations[0] < node.incarnations[1]
    node.engine.clear_cache()
    await rig.serve(5)
    await rig.agree(one)
