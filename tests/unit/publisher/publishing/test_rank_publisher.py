"""Recording from any thread, and sending one batch at a time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from kvrouter.core import Scope, local_hashes
from kvrouter.core.interface import MAX_BATCH_BYTES
from kvrouter.indexer.index.known_ranks import silence_limit
from kvrouter.publisher.errors import EventsGone, InvalidEvent
from kvrouter.publisher.publishing.batch_sender import BatchSender
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.publisher.publishing.transport import MessageRefused, TransportAway
from kvrouter.v1.common_pb2 import Cursor
from kvrouter.v1.events_pb2 import KvEventBatch

BLOCK = 4


class Outbox:
    """A transport that keeps what it is handed; it can hold every send, fail some, and count those under way."""

    def __init__(self) -> None:
        self.batches: list[KvEventBatch] = []
        self.message_ids: list[str | None] = []
        self.open = asyncio.Event()
        self.open.set()
        self.failures: list[Exception] = []
        self.under_way = 0
        self.most_under_way = 0
        self.arrived = asyncio.Condition()

    async def send(self, subject: str, payload: bytes, message_id: str | None) -> None:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self.open.wait()
            self.message_ids.append(message_id)
            if self.failures:
                raise self.failures.pop(0)
            assert len(payload) < 512 << 10
            async with self.arrived:
                self.batches.append(KvEventBatch.FromString(payload))
                self.arrived.notify_all()
        finally:
            self.under_way -= 1

    async def until(self, count: int) -> None:
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.batches) >= count)


def publisher(**options: Any) -> RankPublisher:
    return RankPublisher(subject="s", worker_id=3, dp_rank=1, incarnation=9, block_size=BLOCK, **options)


def store(rank: RankPublisher, first: int, count: int = 1) -> None:
    tokens = [token for number in range(first, first + count) for token in [number] * BLOCK]
    rank.stored(token_ids=tokens, engine_hashes=range(first, first + count))


@asynccontextmanager
async def sending(rank: RankPublisher, outbox: Outbox, heartbeat: float = 60) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(rank.run(outbox, heartbeat_seconds=heartbeat))
        yield
        task.cancel()


async def test_what_is_recorded_while_a_batch_is_under_way_makes_up_the_next() -> None:
    rank, outbox = publisher(), Outbox()
    outbox.open.clear()
    async with sending(rank, outbox):
        store(rank, 1)
        while not outbox.under_way:
            await asyncio.sleep(0)
        for number in range(2, 50):
            store(rank, number)
        outbox.open.set()
        await rank.flush()
    assert outbox.most_under_way == 1
    assert [[event.event_id for event in batch.events] for batch in outbox.batches] == [[0], list(range(1, 49))]
    assert [batch.next_event_id for batch in outbox.batches] == [1, 49]
    assert outbox.batches[-1].digest == rank.stats().digest
    (secret, first), (again, second) = (str(each).split(".") for each in outbox.message_ids)
    assert (first, second) == ("0-0", "1-48")
    assert secret == again


async def test_a_batch_is_sent_again_until_it_is_safe_under_the_same_id() -> None:
    rank, outbox = publisher(), Outbox()
    outbox.failures = [TransportAway("away"), TransportAway("away")]
    store(rank, 1)
    async with sending(rank, outbox):
        await rank.flush()
    assert len(outbox.message_ids) == 3
    assert len(set(outbox.message_ids)) == 1
    assert len(outbox.batches) == 1
    assert rank.stats().retries == 2


async def test_a_batch_that_cannot_be_sent_says_for_how_long_and_why() -> None:
    rank, outbox = publisher(), Outbox()
    outbox.failures = [TransportAway("stream s takes no messages: no space left on device")] * 2
    store(rank, 1)
    async with sending(rank, outbox):
        while not rank.stats().waiting_reason:
            await asyncio.sleep(0)
        assert rank.stats().waiting_reason == "stream s takes no messages: no space left on device"
        assert rank.stats().waiting_seconds > 0
        await rank.flush()
    assert (rank.stats().waiting_reason, rank.stats().waiting_seconds) == ("", 0.0)


async def test_a_batch_that_is_refused_is_counted_and_leaves_a_gap() -> None:
    rank, outbox = publisher(), Outbox()
    outbox.failures = [MessageRefused("no")]
    store(rank, 1)
    async with sending(rank, outbox):
        await rank.flush()
        store(rank, 2)
        await rank.flush()
    assert [event.event_id for batch in outbox.batches for event in batch.events] == [1]
    assert rank.stats().events_dropped == 1


async def test_an_idle_rank_tells_cursor_and_digest() -> None:
    rank, outbox = publisher(), Outbox()
    async with sending(rank, outbox, heartbeat=0.01):
        await outbox.until(1)
        assert outbox.batches[0].next_event_id == 0
        store(rank, 1)
        await rank.flush()
        count = len(outbox.batches)
        await outbox.until(count + 2)
    last = outbox.batches[-1]
    assert (len(last.events), last.next_event_id, last.digest) == (0, 1, rank.stats().digest)
    assert (last.worker_id, last.dp_rank, last.incarnation, last.block_size) == (3, 1, 9, BLOCK)
    assert None in outbox.message_ids


async def test_a_repeated_heartbeat_is_rarer_but_never_as_rare_as_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, outbox = publisher(), Outbox()
    waits: list[float] = []

    async def wait(_self: BatchSender, seconds: float) -> bool:
        waits.append(seconds)
        await asyncio.sleep(0)
        return len(waits) == 1

    monkeypatch.setattr(BatchSender, "_recorded_within", wait)
    store(rank, 1)
    async with sending(rank, outbox, heartbeat=5.0):
        await outbox.until(50)
    assert waits[0] == 5.0, "the first heartbeat after events confirms that none is missing"
    assert all(8.49 <= each <= 10.01 for each in waits[2:])
    assert len(set(waits[2:])) > 10, "ranks that started together do not report together"
    assert max(waits) < silence_limit(5000) - 5.0 + 0.1


async def test_threads_record_while_the_loop_sends() -> None:
    rank, outbox = publisher(), Outbox()

    def engine(first: int) -> None:
        for number in range(first, first + 500):
            store(rank, number)
            if number % 3 == 0:
                rank.removed([number])

    async with sending(rank, outbox):
        threads = [threading.Thread(target=engine, args=(1000 * part,)) for part in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        await rank.flush()
    stats = rank.stats()
    sent = [event.event_id for batch in outbox.batches for event in batch.events]
    assert sent == list(range(stats.next_event_id))
    assert stats.blocks == 4 * 500 - sum(
        number % 3 == 0 for part in range(1, 5) for number in range(1000 * part, 1000 * part + 500)
    )
    assert outbox.batches[-1].digest == stats.digest


async def test_batches_stay_below_the_limit() -> None:
    rank, outbox = publisher(), Outbox()
    for part in range(8):
        store(rank, 100_000 * part, 8000)
    async with sending(rank, outbox):
        await rank.flush()
    assert len(outbox.batches) >= 2
    assert max(batch.ByteSize() for batch in outbox.batches) < 512 << 10


async def test_a_full_buffer_drops_the_oldest_and_the_state_stays_right() -> None:
    rank, outbox = publisher(buffer_events=10), Outbox()
    for number in range(1, 31):
        store(rank, number)
    async with sending(rank, outbox):
        await rank.flush()
    assert [event.event_id for batch in outbox.batches for event in batch.events] == list(range(20, 30))
    assert rank.stats().events_dropped == 20
    (chunk,) = rank.state_chunks()
    assert len(chunk.blocks) == 30
    assert chunk.cursor == Cursor(incarnation=9, next_event_id=30)
    assert chunk.last
    assert chunk.digest == outbox.batches[-1].digest


def test_state_is_that_of_one_moment() -> None:
    rank = publisher()
    store(rank, 1, 10)
    chunks = rank.state_chunks(chunk_blocks=4)
    rank.cleared()
    parts = list(chunks)
    assert [len(part.blocks) for part in parts] == [4, 4, 2]
    assert [part.last for part in parts] == [False, False, True]
    assert {part.cursor.next_event_id for part in parts} == {1}


def test_events_are_served_from_a_cursor() -> None:
    rank = publisher(buffer_events=3)
    for number in range(1, 6):
        store(rank, number)
    (batch,) = rank.events(Cursor(incarnation=9, next_event_id=2))
    assert [event.event_id for event in batch.events] == [2, 3, 4]
    assert batch.digest == rank.stats().digest
    end = Cursor(incarnation=9, next_event_id=5)
    assert list(rank.events(end)) == []
    assert rank.is_current(end)
    for gone in (Cursor(incarnation=9, next_event_id=1), Cursor(incarnation=9, next_event_id=6), Cursor(incarnation=8)):
        with pytest.raises(EventsGone):
            rank.events(gone)


def test_scope_takes_part_in_the_hash() -> None:
    rank = publisher()
    rank.stored(token_ids=[1] * BLOCK, engine_hashes=[1])
    rank.stored(token_ids=[1] * BLOCK, engine_hashes=[2], scope=Scope(cache_salt="mine"))
    (chunk,) = rank.state_chunks()
    plain, salted = (record.local_hash for record in chunk.blocks)
    assert plain != salted
    assert plain == int.from_bytes(local_hashes([1] * BLOCK, BLOCK), "little")


@pytest.mark.parametrize("tokens", [[1] * (BLOCK + 1), [1] * (BLOCK - 1), [], [-1] * BLOCK, [1 << 32] * BLOCK])
def test_tokens_that_do_not_make_the_blocks_are_refused(tokens: list[int]) -> None:
    rank = publisher()
    with pytest.raises(InvalidEvent):
        rank.stored(token_ids=tokens, engine_hashes=[1])
    assert rank.stats().next_event_id == 0


def test_signed_and_unsigned_hashes_are_one() -> None:
    rank = publisher()
    rank.stored(token_ids=[5] * BLOCK, engine_hashes=[-1])
    assert rank.is_resident((1 << 64) - 1)
    rank.removed([(1 << 64) - 1])
    assert rank.stats().blocks == 0


@pytest.mark.parametrize("pack", [list, tuple, partial(array, "Q")])
def test_hashes_come_in_any_sequence(pack: Callable[[list[int]], Sequence[int]]) -> None:
    rank = publisher()
    hashes = [1, (1 << 64) - 1]
    rank.stored_hashes(local_hashes=local_hashes(range(2 * BLOCK), BLOCK), engine_hashes=pack(hashes))
    assert all(map(rank.is_resident, hashes))
    rank.removed(pack(hashes[::-1]))
    assert rank.stats().blocks == 0


@pytest.mark.parametrize("engine_hash", [1 << 64, -(1 << 63) - 1])
def test_a_hash_beyond_64_bits_changes_nothing(engine_hash: int) -> None:
    rank = publisher()
    store(rank, 99)
    before = rank.stats()
    with pytest.raises(InvalidEvent):
        rank.stored(token_ids=[1] * BLOCK, engine_hashes=[engine_hash])
    assert rank.stats() == before


def test_the_limit_leaves_room_below_the_contract() -> None:
    assert MAX_BATCH_BYTES < 512 << 10


async def test_a_cancellation_that_the_transport_loses_ends_the_sender_all_the_same() -> None:
    class Losing(Outbox):
        """Returns normally when it is cancelled, as asyncio.wait_for can before Python 3.12."""

        async def send(self, subject: str, payload: bytes, message_id: str | None) -> None:
            self.under_way += 1
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    rank, outbox = publisher(), Losing()
    task = asyncio.ensure_future(rank.run(outbox, heartbeat_seconds=60))
    while not outbox.under_way:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
