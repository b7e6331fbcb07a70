"""Snapshots over real NATS and etcd: what is taken, what is restored, and what nobody may lose."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest
from kvrouter.indexer.ingest.jetstream import Delivery, DurableConsumer
from kvrouter.indexer.ingest.read_position import Position
from kvrouter.indexer.replica.component import ComponentIndex, Limits
from kvrouter.indexer.snapshots.coordinator import OthersLive, SnapshotHome, SnapshotOptions
from kvrouter.indexer.snapshots.lock import LockLost, Pointer, acquired, read_pointer
from kvrouter.net.decoding import Quarantine
from kvrouter.net.etcd import connect
from kvrouter.net.nats.event_stream import ensure_stream
from kvrouter.v1.common_pb2 import Transport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import AppliedRecord, ComponentDescriptor, WorkerRegistration
from kvrouter.v1.snapshot_pb2 import SnapshotPointer
from nats.aio.client import Client

from ....waiting import until
from ..event_batches import BLOCK_SIZE, RankSource, tokens
from ..indexing import follows, indexing, matches, overlaps

PROMPT = tokens(6)


def home(etcd: str, replica: str = "replica", threshold: int = 1_000_000) -> SnapshotHome:
    return SnapshotHome(etcd, replica, SnapshotOptions(threshold, check_seconds=0.05))


async def pointer_of(etcd: str, component: ComponentName) -> Pointer:
    async with connect(etcd) as client:
        return await read_pointer(client, component, Quarantine())


async def fill(connection: Client, component: ComponentName, count: int = 5) -> list[RankSource]:
    """Events of a few ranks, in the stream."""
    await ensure_stream(connection.jetstream(), component)
    sources = [RankSource(component, worker) for worker in range(1, 4)]
    await more(connection, sources, 0, count)
    return sources


async def more(connection: Client, sources: list[RankSource], start: int, stop: int) -> None:
    for n in range(start, stop):
        for source in sources:
            source.stored(tokens(6, seed=n), 100 * n)
            if n % 3 == source.worker_id % 3:
                source.removed(100 * n + 4)
            await source.publish(connection.jetstream())


async def answers(index: object, upto: int) -> list[bytes]:
    return [await matches(index, tokens(6, seed=n)) for n in range(upto)]  # type: ignore[arg-type]


async def test_the_state_comes_back_from_snapshot_and_stream(
    connection: Client, component: ComponentName, etcd_endpoint: str
) -> None:
    sources = await fill(connection, component)
    async with indexing(connection, component, home=home(etcd_endpoint)) as index:
        await until(lambda: index.ready)
        assert index.snapshots
        ref, blocks = await index.snapshots.take(index.position)
        assert (ref.stream_sequence, blocks > 0) == (15, True)
        await more(connection, sources, 5, 8)
        for source in sources:
            await follows(index, source)
        expected = await answers(index, 8)
        stats = await index.stats()
        assert stats.snapshot_sequence == 15
    # What the snapshot covers is gone: only it can bring the first events back.
    await connection.jetstream().purge_stream(component.stream, seq=16)
    async with indexing(connection, component, "another", home=home(etcd_endpoint, "another")) as index:
        await until(lambda: index.ready)
        assert await answers(index, 8) == expected
        assert index.state.events.tally.gaps == 0
        assert index.state.events.tally.batches == 9, "only what came after the snapshot was read again"


async def test_it_is_taken_when_it_is_due_by_one_of_the_replicas(
    connection: Client, component: ComponentName, etcd_endpoint: str
) -> None:
    sources = await fill(connection, component)
    async with (
        indexing(connection, component, "one", home=home(etcd_endpoint, "one", threshold=10)) as one,
        indexing(connection, component, "two", home=home(etcd_endpoint, "two", threshold=10)) as two,
    ):
        assert one.snapshots and two.snapshots  # noqa: PT018
        snapshots = (one.snapshots, two.snapshots)
        await until(lambda: sum(each.taken for each in snapshots) >= 1)
        await more(connection, sources, 5, 9)
        await until(lambda: sum(each.taken for each in snapshots) >= 2)
        pointer = (await pointer_of(etcd_endpoint, component)).value
        assert pointer.previous.stream_sequence < pointer.current.stream_sequence


async def test_it_is_due_before_the_stream_drops_messages_for_its_size(
    connection: Client, component: ComponentName, etcd_endpoint: str
) -> None:
    await ensure_stream(connection.jetstream(), component, max_bytes=8192)
    async with indexing(connection, component, home=home(etcd_endpoint)) as index:
        await until(lambda: index.ready)
        snapshots = index.snapshots
        assert snapshots
        sources = await fill(connection, component)
        # A few at once: the stream drops messages that the Indexer reads too late.
        for n in range(10, 40):
            await more(connection, sources, n, n + 1)
            for source in sources:
                await follows(index, source)
            if n % 10 == 9:
                await until(lambda least=n // 10: snapshots.taken >= least)  # type: ignore[misc]


async def test_questions_are_answered_and_events_applied_while_one_is_written(
    connection: Client, component: ComponentName, etcd_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = await fill(connection, component)
    async with indexing(connection, component, home=home(etcd_endpoint)) as index:
        await until(lambda: index.ready)
        assert index.snapshots
        writing, go_on = asyncio.Event(), asyncio.Event()
        put = index.snapshots._store.put

        async def slow_put(name: str, parts: Sequence[bytes]) -> None:
            writing.set()
            await go_on.wait()
            await put(name, parts)

        monkeypatch.setattr(index.snapshots._store, "put", slow_put)
        taking = asyncio.create_task(index.snapshots.take(index.position))
        await writing.wait()
        await more(connection, sources, 5, 8)
        for source in sources:
            await follows(index, source)
        assert max((await overlaps(index, tokens(6, seed=7))).values()) == 6
        go_on.set()
        ref, _ = await taking
        assert ref.stream_sequence == 15
        expected = await answers(index, 8)
    async with indexing(connection, component, "another", home=home(etcd_endpoint, "another")) as index:
        await until(lambda: index.ready)
        assert await answers(index, 8) == expected


@pytest.mark.parametrize("damage", ["flipped", "truncated", "gone", "future"])
async def test_one_that_cannot_be_used_gives_way_to_the_one_before(
    connection: Client, component: ComponentName, etcd_endpoint: str, damage: str
) -> None:
    sources = await fill(connection, component)
    async with indexing(connection, component, home=home(etcd_endpoint)) as index:
        await until(lambda: index.ready)
        assert index.snapshots
        await index.snapshots.take(index.position)
        await more(connection, sources, 5, 7)
        for source in sources:
            await follows(index, source)
        newest, _ = await index.snapshots.take(index.position)
        expected = await answers(index, 7)
    store = await connection.jetstream().object_store(component.snapshot_bucket)
    data = (await store.get(newest.object_name)).data
    assert data
    if damage == "gone":
        await store.delete(newest.object_name)
    else:
        changed = {
            "flipped": data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
            "truncated": data[: len(data) // 2],
            "future": data.replace(b"\x08\x01", b"\x08\x09", 1),
        }[damage]
        await store.put(newest.object_name, changed)
    async with indexing(connection, component, "another", home=home(etcd_endpoint, "another")) as index:
        await until(lambda: index.ready)
        assert index.snapshots
        assert index.snapshots.unusable == 1
        assert await answers(index, 7) == expected


async def test_a_stream_that_is_another_one_is_read_from_its_start(
    connection: Client, component: ComponentName, etcd_endpoint: str
) -> None:
    sources = await fill(connection, component)
    async with indexing(connection, component, home=home(etcd_endpoint)) as index:
        await until(lambda: index.ready)
        assert index.snapshots
        await index.snapshots.take(index.position)
    await connection.jetstream().delete_stream(component.stream)
    await ensure_stream(connection.jetstream(), component)
    for source in sources:
        await source.stored(tokens(6, seed=50), 5000).publish(connection.jetstream())
    async with indexing(connection, component, home=home(etcd_endpoint)) as index:
        await until(lambda: index.ready)
        for source in sources:
            await follows(index, source)
        assert await overlaps(index, tokens(6, seed=50)) == {(1, 0): 6, (2, 0): 6, (3, 0): 6}
        assert max((await overlaps(index, tokens(6, seed=0))).values()) == 6, "the snapshot's blocks are kept"


async def test_messages_purged_before_a_replica_read_them_come_from_the_newer_snapshot(
    connection: Client, component: ComponentName, etcd_endpoint: str
) -> None:
    sources = await fill(connection, component)
    async with (
        indexing(connection, component, home=home(etcd_endpoint)) as index,
        indexing(connection, component, "slow", home=home(etcd_endpoint, "slow")) as slow,
    ):
        await until(lambda: index.ready and slow.ready)
        await asyncio.gather(*(follows(slow, source) for source in sources))
        assert index.snapshots
        assert slow.ingest
        consumer = slow.ingest.consumer
        fetch, paused, resume = consumer.fetch, asyncio.Event(), asyncio.Event()

        async def fetch_between_pauses(wait_seconds: float, at_once: Callable[[Delivery], bool]) -> Delivery | None:
            delivery = await fetch(min(wait_seconds, 0.1), at_once)
            if delivery is None and not resume.is_set():
                paused.set()
                await resume.wait()
            return delivery

        consumer.fetch = fetch_between_pauses  # type: ignore[method-assign]
        await paused.wait()
        await more(connection, sources, 5, 8)
        await asyncio.gather(*(follows(index, source) for source in sources))
        ref, _ = await index.snapshots.take(index.position)
        await connection.jetstream().purge_stream(component.stream, seq=ref.stream_sequence + 1)
        await more(connection, sources, 8, 10)
        resume.set()
        await asyncio.gather(*(follows(each, source) for each in (index, slow) for source in sources))
        assert await answers(slow, 10) == await answers(index, 10)
        assert slow.state.events.tally.gaps == 0


async def test_the_stream_is_purged_one_behind_and_never_beyond_a_live_replica(
    connection: Client, component: ComponentName, etcd_endpoint: str
) -> None:
    js = connection.jetstream()
    sources = await fill(connection, component)
    async with (
        connect(etcd_endpoint) as client,
        indexing(connection, component, home=home(etcd_endpoint)) as index,
    ):

        async def first_after_next_snapshot(count: int) -> int:
            await more(connection, sources, count, count + 1)
            for source in sources:
                await follows(index, source)
            assert index.snapshots
            await index.snapshots.take(index.position)
            return (await js.stream_info(component.stream)).state.first_seq

        await until(lambda: index.ready)
        assert await first_after_next_snapshot(5) == 1, "there is none behind the first"
        position = index.position()
        assert isinstance(position, Position)
        slow = AppliedRecord(
            stream=component.stream, stream_created_unix_ns=position.identity.created_unix_ns, stream_sequence=4
        )
        key = component.applied_key("slow").encode()
        await client.put(key, slow.SerializeToString())
        assert await first_after_next_snapshot(6) == 5
        await client.delete(key)
        assert await first_after_next_snapshot(7) == 22
        store = await js.object_store(component.snapshot_bucket)
        assert len(await store.list(ignore_deletes=True)) == 2


async def test_a_replica_whose_clock_is_behind_deletes_the_older_ones_too(
    connection: Client, component: ComponentName, etcd_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects are deleted by their names, which must rise whoever gives them."""
    await fill(connection, component)
    async with indexing(connection, component, home=home(etcd_endpoint)) as index:
        await until(lambda: index.ready)
        assert index.snapshots
        await index.snapshots.take(index.position)
        now = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() - 3600 * 10**9)
        for _ in range(2):
            await index.snapshots.take(index.position)
        monkeypatch.undo()
        pointer = (await pointer_of(etcd_endpoint, component)).value
        store = await connection.jetstream().object_store(component.snapshot_bucket)
        names = sorted(str(info.name) for info in await store.list(ignore_deletes=True))
        assert names == [pointer.previous.object_name, pointer.current.object_name]


async def test_a_holder_that_lost_the_lock_moves_nothing(component: ComponentName, etcd_endpoint: str) -> None:
    async with acquired(etcd_endpoint, component, "one", 10, Quarantine()) as lock:
        with pytest.raises(LockLost):
            async with acquired(etcd_endpoint, component, "two", 10, Quarantine()):
                pytest.fail("two replicas hold the lock")
        before = await pointer_of(etcd_endpoint, component)
        async with connect(etcd_endpoint) as client:
            await client.delete(component.snapshot_lock_key.encode())
        async with acquired(etcd_endpoint, component, "two", 10, Quarantine()) as other:
            with pytest.raises(LockLost):
                await lock.move(before, SnapshotPointer())
            with pytest.raises(LockLost):
                await lock.check()
            await other.check()
            await other.move(before, SnapshotPointer())
            with pytest.raises(LockLost):
                await other.move(before, SnapshotPointer())


async def test_a_reset_drops_everything_but_not_while_others_live(
    connection: Client, component: ComponentName, etcd_endpoint: str
) -> None:
    sources = await fill(connection, component)
    async with (
        connect(etcd_endpoint) as client,
        indexing(connection, component, home=home(etcd_endpoint)) as index,
    ):
        await until(lambda: index.ready)
        assert index.snapshots
        await index.snapshots.take(index.position)
        await client.put(component.applied_key("other").encode(), AppliedRecord().SerializeToString())
        with pytest.raises(OthersLive, match="other"):
            await index.reset(even_if_others_live=False)
        assert await overlaps(index, PROMPT) != {}
        assert await index.reset(even_if_others_live=True) == (15, 1)
        assert await overlaps(index, PROMPT) == {}
        assert not (await pointer_of(etcd_endpoint, component)).value.HasField("current")
        sources[0].incarnation, sources[0].next_event_id = 2, 0
        await sources[0].stored(PROMPT, 7000).publish(connection.jetstream())
        await follows(index, sources[0])
        assert await overlaps(index, PROMPT) == {(1, 0): 6}


async def test_a_stream_that_is_first_needed_later_is_not_reset(
    connection: Client, component: ComponentName, etcd_endpoint: str
) -> None:
    """An Indexer of Core NATS workers, started with ``--reset-states`` before, discovers a worker with JetStream."""
    sources = await fill(connection, component)
    descriptor = ComponentDescriptor(block_size=BLOCK_SIZE, default_transport=Transport.TRANSPORT_CORE_NATS)
    options = SnapshotOptions(check_seconds=0.05, reset=True)
    consumer = DurableConsumer(connection, component, "replica")
    index = ComponentIndex(
        component,
        descriptor,
        consumer.connection,
        consumer,
        Limits(),
        home=SnapshotHome(etcd_endpoint, "replica", options),
    )
    running = asyncio.create_task(index.run())
    await until(lambda: index.ready)
    durable = WorkerRegistration(publishes_events=True, transport=Transport.TRANSPORT_DURABLE)
    async with connect(etcd_endpoint) as client:
        await client.put(component.applied_key("other").encode(), AppliedRecord().SerializeToString())
    index.update_workers({sources[0].worker_id: durable})
    for source in sources:
        await follows(index, source)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()


async def test_events_go_on_while_a_snapshot_is_taken(
    connection: Client, component: ComponentName, etcd_endpoint: str
) -> None:
    sources = await fill(connection, component, 40)
    async with indexing(connection, component, home=home(etcd_endpoint)) as index:
        await until(lambda: index.ready)
        assert index.snapshots
        taking = asyncio.create_task(index.snapshots.take(index.position))
        await more(connection, sources, 40, 60)
        await taking
        for source in sources:
            await follows(index, source)
        expected = await answers(index, 60)
    async with indexing(connection, component, home=home(etcd_endpoint)) as index:
        await until(lambda: index.ready)
        assert await answers(index, 60) == expected


@pytest.mark.parametrize("value", [None, b"\xff"])
async def test_a_pointer_that_is_lost_comes_back_with_the_next_snapshot(
    connection: Client, component: ComponentName, etcd_endpoint: str, value: bytes | None
) -> None:
    await fill(connection, component)
    async with indexing(connection, component, home=home(etcd_endpoint)) as index:
        await until(lambda: index.ready)
        assert index.snapshots
        ref, _ = await index.snapshots.take(index.position)
        async with connect(etcd_endpoint) as client:
            if value is None:
                await client.delete(component.snapshot_key.encode())
            else:
                await client.put(component.snapshot_key.encode(), value)
        await until(lambda: index.snapshots.taken == 2)
        pointer = (await pointer_of(etcd_endpoint, component)).value
        assert pointer.current.stream_sequence == ref.stream_sequence
        assert pointer.current.object_name > ref.object_name


async def test_a_pointer_read_before_a_snapshot_does_not_hide_it(
    connection: Client, component: ComponentName, etcd_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(connection, component)
    async with indexing(connection, component, home=home(etcd_endpoint)) as index:
        await until(lambda: index.ready)
        snapshots = index.snapshots
        assert snapshots
        read, has_read, taken = snapshots._read_pointer, asyncio.Event(), asyncio.Event()

        async def read_late() -> SnapshotPointer:
            pointer = await read()
            has_read.set()
            await taken.wait()
            return pointer

        monkeypatch.setattr(snapshots, "_read_pointer", read_late)
        due = asyncio.create_task(snapshots._due())
        await has_read.wait()
        ref, _ = await snapshots.take(index.position)
        taken.set()
        assert not await due
        assert snapshots.current == ref


async def test_a_lock_that_nobody_holds_stops_no_snapshot(
    connection: Client, component: ComponentName, etcd_endpoint: str
) -> None:
    await fill(connection, component)
    async with connect(etcd_endpoint) as client:
        await client.put(component.snapshot_lock_key.encode(), b"\xff")
        await client.put(component.applied_key("x").encode() + b"\xff", b"\xff")
        await client.put(component.applied_key("nobody").encode(), b"\xff")
        async with indexing(connection, component, home=home(etcd_endpoint)) as index:
            await until(lambda: index.ready)
            assert index.snapshots
            for _ in range(2):
                ref, _ = await index.snapshots.take(index.position)
            stream = await connection.jetstream().stream_info(component.stream)
            assert stream.state.first_seq == ref.stream_sequence + 1, "nothing holds the purge back"
