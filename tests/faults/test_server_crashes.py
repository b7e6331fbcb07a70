"""Scenarios 2, 3 and 8: NATS and etcd that go, come back, forget, or bring back what is past."""

from __future__ import annotations

import asyncio
import shutil
import signal

import pytest
from kvrouter.net.nats.event_stream import stream_config
from kvrouter.v1.common_pb2 import Transport
from nats.aio.client import Client

from . import newer_etcd
from .rig import COMPONENT, FULL, TAKEN, Rig


@pytest.mark.parametrize("transport", ["DURABLE", "CORE_NATS"])
async def test_nats_is_killed_and_comes_back(rig: Rig, transport: str) -> None:
    await rig.start_nodes(1, 2, transport=Transport.Value(f"TRANSPORT_{transport}"))
    one = await rig.indexer("one")
    for _ in range(3 if FULL else 1):
        await rig.serve(10, 0.02)
        await rig.nats.kill()
        await rig.serve(10)
        await rig.nats.start()
    await rig.agree(one)


@pytest.mark.full
async def test_nats_is_away_for_longer_than_the_buffers_hold(rig: Rig) -> None:
    (node,) = await rig.start_nodes(1, buffer_events=8)
    one = await rig.indexer("one")
    await rig.serve(10)
    await rig.agree(one)
    await rig.nats.stop()
    await rig.serve(60)
    assert node.worker.rank(0).stats().events_dropped
    await rig.nats.start()
    await rig.agree(one)


@pytest.mark.full
@pytest.mark.parametrize("store", [pytest.param("empty", marks=pytest.mark.full), "rolled back"])
async def test_nats_comes_back_with_another_store(rig: Rig, store: str) -> None:
    await rig.start_nodes(1, 2)
    one = await rig.indexer("one", snapshot_threshold=20)
    await rig.serve(20, 0.01)
    await rig.agree(one)
    await rig.nats.stop()
    data, past = rig.nats.directory / "data", rig.directory / "past"
    shutil.copytree(data, past)
    await rig.nats.start()
    await rig.serve(30, 0.01)
    await rig.agree(one)
    await rig.nats.kill()
    shutil.rmtree(data)
    if store == "rolled back":
        shutil.copytree(past, data)
    await rig.nats.start()
    await rig.serve(10, 0.01)
    late = await rig.indexer("late")
    await rig.agree(one, late)


@pytest.mark.full
async def test_etcd_is_away_for_longer_than_leases_live(rig: Rig) -> None:
    await rig.start_nodes(1, 2, lease_ttl_seconds=2)
    one = await rig.indexer("one")
    await rig.serve(10)
    await rig.agree(one)
    await rig.etcd.stop()
    await rig.serve(10)
    await rig.etcd.start()
    await rig.serve(10)
    await rig.agree(one)


@pytest.mark.skipif(
    newer_etcd.find() is None,
    reason="etcd before 3.5.3 is not to be killed: set KVROUTER_ETCD_BINARY, or run tests/faults/newer_etcd.py",
)
async def test_etcd_is_killed(rig: Rig) -> None:
    await rig.start_nodes(1, 2)
    one = await rig.indexer("one", snapshot_threshold=10)
    for _ in range(10 if FULL else 3):
        serving = asyncio.create_task(rig.serve(rig.rng.randrange(5, 30), 0.02))
        await asyncio.sleep(rig.rng.uniform(0, 0.5))
        await rig.etcd.kill()
        await serving
        await rig.etcd.start()
    await rig.agree(one)
    late = await rig.indexer("late")
    await rig.agree(one, late)


async def test_a_holder_that_was_paused_past_its_lease_publishes_nothing(rig: Rig) -> None:
    await rig.start_nodes(1, 2)
    paused = await rig.indexer("paused", "uploaded:pause", snapshot_threshold=5)
    await rig.until(lambda: paused.stopped)  # with the lock
    await rig.serve(20, 0.01)
    other = await rig.indexer("other", snapshot_threshold=5)
    await rig.until(lambda: TAKEN in other.log())
    before = len(paused.log())
    paused.signal(signal.SIGCONT)
    await rig.until(lambda: "snapshot.skipped" in paused.log()[before:])
    # It may take a snapshot later, when it has the lock again.
    assert TAKEN not in paused.log()[: paused.log().index("snapshot.skipped", before)]
    await rig.serve(10, 0.01)
    await rig.agree(other)


@pytest.mark.parametrize("limit", [pytest.param("age", marks=pytest.mark.full), "bytes"])
async def test_the_stream_drops_messages_that_a_replica_has_not_read(rig: Rig, limit: str) -> None:
    await rig.start_nodes(1, 2)
    one = await rig.indexer("one")
    await rig.serve(10)
    await rig.agree(one)
    await one.kill()
    client = await rig.client()
    config = stream_config(COMPONENT, max_bytes=20_000 if limit == "bytes" else 1 << 30)
    if limit == "age":
        config.max_age, config.duplicate_window = 0.5, 0.5
    await client.jetstream().update_stream(config)
    await rig.serve(60, 0.02)
    await rig.until(lambda: _lost_some(client))
    await one.start()
    await rig.serve(5)
    await rig.agree(one)


async def test_the_stream_forgets_everything_while_nothing_happens(rig: Rig) -> None:
    await rig.start_nodes(1, 2, heartbeat_seconds=3600)
    one = await rig.indexer("one")
    await rig.serve(20)
    await rig.agree(one)
    client = await rig.client()
    config = stream_config(COMPONENT)
    config.max_age, config.duplicate_window = 0.5, 0.5
    await client.jetstream().update_stream(config)
    await rig.until(lambda: TAKEN in one.log())  # before half of that has passed, nothing is due
    await rig.until(lambda: _is_empty(client))
    late = await rig.indexer("late")
    await rig.agree(one, late)
    assert '"event": "snapshot.restored"' in late.log()
    await client.jetstream().update_stream(stream_config(COMPONENT))  # what comes next may take longer to be read
    await rig.serve(5)
    await rig.agree(one, late)
    for each in (one, late):
        assert (await each.stats()).events.gaps == 0
        assert "rank.resynced" not in each.log()


async def _is_empty(client: Client) -> bool:
    return (await client.jetstream().stream_info(COMPONENT.stream)).state.messages == 0


async def _lost_some(client: Client) -> bool:
    return (await client.jetstream().stream_info(COMPONENT.stream)).state.first_seq > 20


async def test_a_reset_is_refused_while_another_replica_is_live(rig: Rig) -> None:
    await rig.start_nodes(1, 2)
    one = await rig.indexer("one", lease_seconds=60)
    await rig.serve(10)
    await rig.agree(one)
    await rig.until(lambda: rig.has_key(COMPONENT.applied_key("one")))
    refused = await rig.indexer("refused", reset_states=True)
    await refused.ended()
    assert "other replicas are live: one" in refused.log()
    rig.indexers.remove(refused)
    meant = await rig.indexer("meant", reset_states=True, reset_states_even_if_others_live=True)
    await rig.agree(meant, one)
    assert "snapshot.states_reset" in meant.log()
    await rig.serve(5)
    await rig.agree(meant, one)
