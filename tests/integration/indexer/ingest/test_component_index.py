"""What one component's index makes of its stream, on a real NATS."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from kvrouter.devtools.system.servers import NatsServer
from kvrouter.indexer.replica.component import Limits
from kvrouter.net.nats.event_stream import ensure_stream
from kvrouter.v1.common_pb2 import CopyCounting
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import RankRegistration, WorkerRegistration
from nats.aio.client import Client
from nats.js.api import AckPolicy
from structlog.testing import capture_logs

from ....waiting import until
from ..event_batches import RankSource, tokens
from ..indexing import PATIENCE_SECONDS, connected, follows, indexing, matches, overlaps

PROMPT = tokens(6)


def registration(source: RankSource, incarnation: int | None = None) -> WorkerRegistration:
    return WorkerRegistration(
        worker_id=source.worker_id,
        ranks=[RankRegistration(dp_rank=source.dp_rank, incarnation=incarnation or source.incarnation)],
        publishes_events=True,
        copy_counting=CopyCounting.COPY_COUNTING_COUNTED,
    )


async def test_a_component_without_a_stream_is_empty_and_ready(connection: Client, component: ComponentName) -> None:
    async with indexing(connection, component) as index:
        await index.ingest.wait_caught_up()
        assert await overlaps(index, PROMPT) == {}
        assert await connection.jetstream().stream_info(component.stream)


async def test_it_follows_each_rank(connection: Client, component: ComponentName) -> None:
    js = connection.jetstream()
    await ensure_stream(js, component)
    one, other = RankSource(component, 1), RankSource(component, 2, dp_rank=1)
    async with indexing(connection, component) as index:
        await one.stored(PROMPT, 100).publish(js)
        await other.stored(PROMPT, 500).removed(503).publish(js)
        await follows(index, one)
        await follows(index, other)
        assert await overlaps(index, PROMPT) == {(1, 0): 6, (2, 1): 3}
        await one.cleared().publish(js)
        await follows(index, one)
        assert await overlaps(index, PROMPT) == {(1, 0): 0, (2, 1): 3}


async def test_a_restart_gives_the_same_answers(connection: Client, component: ComponentName) -> None:
    js = connection.jetstream()
    await ensure_stream(js, component)
    sources = [RankSource(component, worker) for worker in range(1, 9)]
    for round_ in range(40):
        for source in sources:
            source.stored(tokens(6, seed=round_ % 7), 1000 * round_)
            if round_ % 3 == source.worker_id % 3:
                source.removed(1000 * round_ + 5)
            await source.publish(js)
    prompts = [tokens(6, seed=seed) for seed in range(8)]
    async with indexing(connection, component) as index:
        await index.ingest.wait_caught_up()
        before = [await matches(index, prompt) for prompt in prompts]
        assert index.state.events.tally.applied == sum(source.next_event_id for source in sources)
    async with indexing(connection, component) as index:
        await index.ingest.wait_caught_up()
        assert [await matches(index, prompt) for prompt in prompts] == before
        assert max((await overlaps(index, prompts[0])).values()) == 6


async def test_it_is_ready_only_when_it_has_read_the_stream(connection: Client, component: ComponentName) -> None:
    js = connection.jetstream()
    await ensure_stream(js, component)
    source = RankSource(component, 1)
    for n in range(300):
        last = await source.stored(tokens(2, seed=n), 10 * n).publish(js)
    async with indexing(connection, component) as index:
        assert not index.ready
        seen = []
        while not index.ready:
            seen.append(index.ingest.progress.applied)
            await index.state.shared.change(lambda _: None)
        assert index.ingest.progress.applied >= last
        assert seen
        assert min(seen) < last


async def test_applied_messages_are_acknowledged_and_counted(connection: Client, component: ComponentName) -> None:
    js = connection.jetstream()
    stream = await ensure_stream(js, component)
    source = RankSource(component, 1)
    async with indexing(connection, component, "replica-7") as index:
        for n in range(5):
            await source.stored(tokens(1, seed=n), 10 * n).publish(js)
        await follows(index, source)
        durable = f"indexer-{'replica-7'}"
        config = (await js.consumer_info(component.stream, durable)).config
        assert config.ack_policy == AckPolicy.ALL
        assert config.inactive_threshold
        assert config.max_ack_pending
        acknowledged = 0
        while acknowledged < 5:
            info = await js.consumer_info(component.stream, durable)
            acknowledged = info.ack_floor.stream_seq if info.ack_floor else 0
        record = index.applied_record
        assert record is not None
        assert (record.stream, record.stream_sequence) == (component.stream, 5)
        assert stream.created
        assert abs(record.stream_created_unix_ns - stream.created.timestamp() * 1e9) < 1e4


async def test_a_gap_empties_the_rank_and_later_events_apply(connection: Client, component: ComponentName) -> None:
    js = connection.jetstream()
    await ensure_stream(js, component)
    source, other = RankSource(component, 1), RankSource(component, 2)
    async with indexing(connection, component) as index:
        await source.stored(PROMPT, 100).publish(js)
        await other.stored(PROMPT, 100).publish(js)
        source.removed(100).lose()
        await source.stored(tokens(4, seed=9), 900).publish(js)
        await follows(index, source)
        await follows(index, other)
        assert await overlaps(index, PROMPT) == {(1, 0): 0, (2, 0): 6}
        assert await overlaps(index, tokens(4, seed=9)) == {(1, 0): 4, (2, 0): 0}
        stats = await index.stats()
        assert (stats.events.gaps, stats.events.repairs, stats.events.duplicates) == (1, 1, 0)
        assert [rank.partial for rank in stats.ranks] == [True, False]
        assert stats.ranks[0].resync_reason == "gap"


async def test_a_gap_that_only_a_heartbeat_shows(connection: Client, component: ComponentName) -> None:
    js = connection.jetstream()
    await ensure_stream(js, component)
    source = RankSource(component, 1)
    async with indexing(connection, component) as index:
        await source.stored(PROMPT, 100).publish(js)
        source.removed(100).lose()
        await source.publish(js)
        await follows(index, source)
        assert await overlaps(index, PROMPT) == {(1, 0): 0}
        assert index.state.events.tally.gaps == 1


async def test_an_unknown_parent_drops_the_rank_once(connection: Client, component: ComponentName) -> None:
    js = connection.jetstream()
    await ensure_stream(js, component)
    source = RankSource(component, 1)
    async with indexing(connection, component) as index:
        await source.stored(PROMPT, 100).publish(js)
        await source.stored(tokens(2, seed=5), 700, parent=12345).publish(js)
        await follows(index, source)
        assert await overlaps(index, PROMPT) == {(1, 0): 0}
        await source.stored(PROMPT, 100).publish(js)
        await source.stored(tokens(2, seed=6), 800, parent=12345).publish(js)
        await follows(index, source)
        assert await overlaps(index, PROMPT) == {(1, 0): 6}
        assert (index.state.events.tally.unknown_parents, index.state.events.tally.repairs) == (2, 1)


async def test_messages_that_are_no_batches_are_quarantined_and_the_rest_goes_on(
    connection: Client, component: ComponentName
) -> None:
    js = connection.jetstream()
    await ensure_stream(js, component)
    source, liar, stranger = RankSource(component, 1), RankSource(component, 2), RankSource(component, 3, block_size=8)
    async with indexing(connection, component) as index:
        await source.stored(PROMPT, 100).publish(js)
        broken = await js.publish(source.subject, b"\xff\xff\xff not a batch")
        await js.publish(source.subject, liar.stored(PROMPT, 100).batch())
        await stranger.stored(PROMPT, 100).publish(js)
        last = await source.stored(tokens(2, seed=3), 300).publish(js)
        await follows(index, source)
        assert await overlaps(index, PROMPT) == {(1, 0): 6}
        assert [item.refusal.reason for item in index.state.events.quarantined] == ["unparsable", "rank", "block_size"]
        assert index.state.events.quarantined[0].sequence == broken.seq
        assert index.state.events.quarantined[0].subject == source.subject
        counts = (await index.stats()).events
        assert (counts.unparsable, counts.rejected, counts.applied) == (1, 2, 2)
        await until(lambda: index.ingest.progress.applied == last)


async def test_a_registration_with_a_later_incarnation_empties_the_rank_at_once(
    connection: Client, component: ComponentName
) -> None:
    js = connection.jetstream()
    await ensure_stream(js, component)
    source = RankSource(component, 1)
    async with indexing(connection, component) as index:
        index.update_workers({1: registration(source)})
        await source.stored(PROMPT, 100).publish(js)
        await follows(index, source)
        reborn = RankSource(component, 1, incarnation=2)
        index.update_workers({1: registration(reborn)})
        await follows(index, reborn)
        assert await overlaps(index, PROMPT) == {(1, 0): 0}
        await source.stored(tokens(3, seed=4), 400).publish(js)
        await reborn.stored(tokens(2), 100).publish(js)
        await follows(index, reborn)
        assert await overlaps(index, PROMPT) == {(1, 0): 2}
        assert index.state.events.tally.fenced == 1
        assert not (await index.stats()).ranks[0].partial


async def test_a_worker_that_is_gone_loses_its_blocks_after_the_grace(
    connection: Client, component: ComponentName
) -> None:
    js = connection.jetstream()
    await ensure_stream(js, component)
    stays, goes = RankSource(component, 1), RankSource(component, 2)
    async with indexing(connection, component, limits=Limits(grace_seconds=0.2)) as index:
        index.update_workers({1: registration(stays), 2: registration(goes)})
        await stays.stored(PROMPT, 100).publish(js)
        await goes.stored(PROMPT, 100).publish(js)
        await follows(index, stays)
        await follows(index, goes)
        await until(lambda: len(index.ranks) == 2)
        index.update_workers({1: registration(stays)})
        await until(lambda: len(index.ranks) == 1)
        assert await overlaps(index, PROMPT) == {(1, 0): 6}


async def test_a_consumer_that_somebody_deletes_is_made_again(connection: Client, component: ComponentName) -> None:
    js = connection.jetstream()
    await ensure_stream(js, component)
    source = RankSource(component, 1)
    with capture_logs() as logs:
        async with indexing(connection, component) as index:
            await source.stored(PROMPT, 100).publish(js)
            await follows(index, source)
            await js.delete_consumer(component.stream, "indexer-replica")
            await source.stored(tokens(2, seed=2), 200).publish(js)
            await follows(index, source)
            assert index.state.events.tally.duplicates == 0
            assert index.state.events.tally.gaps == 0
    created = [each["reason"] for each in logs if each["event"] == "ingest.consumer_created"]
    assert created == ["start", "consumer lost"]


async def test_a_stream_that_is_deleted_and_made_again_is_read_from_its_start(
    connection: Client, component: ComponentName
) -> None:
    js = connection.jetstream()
    await ensure_stream(js, component)
    source = RankSource(component, 1)
    async with indexing(connection, component) as index:
        for n in range(10):
            await source.stored(tokens(2, seed=n), 10 * n).publish(js)
        await follows(index, source)
        first = index.applied_record
        await js.delete_stream(component.stream)
        await ensure_stream(js, component)
        await source.stored(PROMPT, 500).publish(js)
        await follows(index, source)
        assert await overlaps(index, PROMPT) == {(1, 0): 6}
        assert index.state.events.tally.gaps == 0
        await until(lambda: index.ingest.progress.applied == 1)
        record = index.applied_record
        assert first is not None
        assert record is not None
        assert record.stream_created_unix_ns != first.stream_created_unix_ns
        # Truth is per rank: what the index knows stays right as long as event ids follow each other.
        assert await overlaps(index, tokens(2, seed=9)) == {(1, 0): 2}


async def test_events_that_a_lost_stream_took_along_show_as_a_gap(connection: Client, component: ComponentName) -> None:
    js = connection.jetstream()
    await ensure_stream(js, component)
    source = RankSource(component, 1)
    async with indexing(connection, component) as index:
        await source.stored(PROMPT, 100).publish(js)
        await follows(index, source)
        source.removed(100).lose()
        await js.delete_stream(component.stream)
        await ensure_stream(js, component)
        await source.publish(js)
        await follows(index, source)
        assert await overlaps(index, PROMPT) == {(1, 0): 0}
        assert index.state.events.tally.gaps == 1


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_it_reads_on_after_nats_was_away(own_nats: NatsServer, component: ComponentName, how: str) -> None:
    async with connected(own_nats.url) as connection, indexing(connection, component) as index:
        js = connection.jetstream()
        source = RankSource(component, 1)
        await index.ingest.wait_caught_up()
        await source.stored(PROMPT, 100).publish(js)
        await follows(index, source)
        await (own_nats.kill() if how == "kill" else own_nats.stop())
        assert await overlaps(index, PROMPT) == {(1, 0): 6}
        assert index.ready
        await own_nats.start()
        await until(lambda: connection.is_connected)
        await source.stored(tokens(2, seed=2), 200).publish(js)
        await follows(index, source)
        assert await overlaps(index, PROMPT) == {(1, 0): 6}
        assert await overlaps(index, tokens(2, seed=2)) == {(1, 0): 2}
        assert index.state.events.tally.gaps == 0


async def test_a_delivery_that_went_astray_is_fetched_again_and_is_no_gap(
    connection: Client, component: ComponentName
) -> None:
    js = connection.jetstream()
    await ensure_stream(js, component)
    source = RankSource(component, 1)
    async with indexing(connection, component) as index:
        await source.stored(PROMPT, 100).publish(js)
        await follows(index, source)
        thief = await js.pull_subscribe_bind(durable="indexer-replica", stream=component.stream)
        stolen = asyncio.create_task(thief.fetch(1, timeout=30))
        # The replica's own request may be served first, so the thief waits for its turn.
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not stolen.done():
                await source.stored(tokens(1, seed=source.next_event_id), 1000 + source.next_event_id).publish(js)
                await asyncio.sleep(0.01)
        assert await stolen
        await source.stored(tokens(2, seed=1), 300).publish(js)
        await follows(index, source)
        assert await overlaps(index, PROMPT) == {(1, 0): 6}
        assert (index.state.events.tally.gaps, index.state.events.tally.applied) == (0, source.next_event_id)


async def test_a_stream_that_was_rolled_back_and_has_grown_since_is_noticed(
    own_nats: NatsServer, component: ComponentName, tmp_path: Path
) -> None:
    data = own_nats.directory / "data"
    async with connected(own_nats.url) as connection, indexing(connection, component) as index:
        js = connection.jetstream()
        source = RankSource(component, 1)
        await index.ingest.wait_caught_up()
        await source.stored(PROMPT, 100).publish(js)
        await follows(index, source)
        await own_nats.stop()
        await asyncio.to_thread(shutil.copytree, data, tmp_path / "older")
        await own_nats.start()
        await until(lambda: connection.is_connected)
        await source.stored(tokens(2, seed=2), 200).publish(js)
        await follows(index, source)

        await own_nats.stop()
        await asyncio.to_thread(shutil.rmtree, data)
        await asyncio.to_thread(shutil.copytree, tmp_path / "older", data)
        # What comes next takes the stream sequence of a message that is lost.
        await own_nats.start()
        async with connected(own_nats.url) as publisher:
            await source.stored(tokens(2, seed=3), 300).publish(publisher.jetstream())
        await follows(index, source)
        assert await overlaps(index, tokens(2, seed=3)) == {(1, 0): 2}
        assert await overlaps(index, tokens(2, seed=2)) == {(1, 0): 2}
        assert index.state.events.tally.gaps == 0
        source.removed(100).lose()
        await source.publish(js)
        await follows(index, source)
        assert await overlaps(index, PROMPT) == {(1, 0): 0}
