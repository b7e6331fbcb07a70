"""Scenarios 5 and 7 of replicas: slow, away for long, gone for good, and one that is there alone."""

from __future__ import annotations

import signal

import pytest
from nats.aio.client import Client
from nats.js.errors import NotFoundError

from .rig import COMPONENT, TAKEN, IndexerProcess, Rig


async def first_sequence(client: Client) -> int:
    try:
        return (await client.jetstream().stream_info(COMPONENT.stream)).state.first_seq
    except NotFoundError:
        return 0


async def purged_beyond(rig: Rig, client: Client, sequence: int) -> None:
    """Waits until messages up to a sequence are gone, while events flow."""

    async def purged() -> bool:
        await rig.serve(5)
        return await first_sequence(client) > sequence

    await rig.until(purged)


async def snapshots(rig: Rig, one: IndexerProcess, count: int) -> None:
    """Waits until an Indexer has taken so many more, while events flow."""
    before = one.log().count(TAKEN)

    async def taken() -> bool:
        await rig.serve(5)
        return one.log().count(TAKEN) >= before + count

    await rig.until(taken)


async def test_messages_that_a_slow_replica_has_not_read_are_not_purged(rig: Rig) -> None:
    await rig.start_nodes(1, 2)
    slow = await rig.indexer("slow", lease_seconds=60)
    await rig.serve(5)
    await rig.agree(slow)
    await rig.until(lambda: rig.has_key(COMPONENT.applied_key("slow")))
    slow.signal(signal.SIGSTOP)
    one = await rig.indexer("one", snapshot_threshold=10)
    await snapshots(rig, one, 3)
    client = await rig.client()
    kept = await first_sequence(client)
    before = len(slow.log())
    slow.signal(signal.SIGCONT)
    await rig.agree(slow, one)
    assert (await slow.stats()).events.gaps == 0
    assert '"event": "snapshot.restored"' not in slow.log()[before:], "the stream still had all that it lacked"
    await purged_beyond(rig, client, kept)  # it holds nothing back once it has read
    await rig.agree(slow, one)


async def test_a_replica_that_was_away_for_longer_than_the_stream_keeps_takes_the_newer_snapshot(rig: Rig) -> None:
    await rig.start_nodes(1, 2)
    away = await rig.indexer("away", lease_seconds=2)
    await rig.serve(5)
    await rig.agree(away)
    await rig.until(lambda: rig.has_key(COMPONENT.applied_key("away")))
    away.signal(signal.SIGSTOP)
    await rig.until(lambda: away.stopped)
    client = await rig.client()
    published = (await client.jetstream().stream_info(COMPONENT.stream)).state.last_seq
    one = await rig.indexer("one", snapshot_threshold=10)
    # Heartbeats come all the time, so where it has stopped is only known to be no later than this.
    await purged_beyond(rig, client, published + 1)
    before = len(away.log())
    away.signal(signal.SIGCONT)
    await rig.agree(away, one)
    await rig.serve(5)
    await rig.agree(away, one)
    # The workers' own events, which it fetches of ranks that were silent, may come before the stream's.
    await rig.until(lambda: '"event": "snapshot.restored"' in away.log()[before:])
    assert "rank.dropped" not in away.log()[before:]
    assert "rank.resynced" not in away.log()[before:], "no worker was asked for its state"


@pytest.mark.full
async def test_a_third_replica_restores_everything_while_the_others_are_down(rig: Rig) -> None:
    await rig.start_nodes(1, 2)
    first = await rig.indexer("first", snapshot_threshold=10)
    second = await rig.indexer("second", snapshot_threshold=10)
    await purged_beyond(rig, await rig.client(), 1)
    for process in (first, second):
        await process.kill()
    await rig.serve(5)
    third = await rig.indexer("third")
    await rig.agree(third)
    assert '"event": "snapshot.restored"' in third.log()
    assert (await third.stats()).events.gaps == 0


@pytest.mark.full
async def test_a_replica_that_is_gone_for_good_holds_nothing_back(rig: Rig) -> None:
    await rig.start_nodes(1)
    gone = await rig.indexer("gone")
    await rig.serve(5)
    await rig.agree(gone)
    await gone.kill()
    rig.indexers.remove(gone)
    one = await rig.indexer("one", snapshot_threshold=20)
    await purged_beyond(rig, await rig.client(), 10)
    await rig.agree(one)
    third = await rig.indexer("third")
    await rig.agree(third)
