from __future__ import annotations

import asyncio
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given, settings, strategies as st
from kvrouter.core import IMPLEMENTATION, EventBatch, PrefixIndex, sequence_hashes
from kvrouter.indexer.index.incarnations import NewIncarnation
from kvrouter.indexer.index.messages import StreamMessage
from kvrouter.indexer.index.state import IndexState, RankDump, StaleDump
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import RankState, Tier
from kvrouter.v1.errors import DeadlineExceeded
from kvrouter.v1.events_pb2 import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEventBatch
from kvrouter.v1.indexer_pb2 import FindMatchesResponse
from kvrouter.v1.names import ComponentName

from tests.unit.indexer.index.policy import Policy

COMPONENT = ComponentName("ns", "decode")
RANK = (1, 0)


def state(policy: Policy | None = None) -> IndexState:
    return IndexState(str(COMPONENT), 4, PrefixIndex(), policy or Policy())


def stored(event_id: int, engine: Sequence[int], local: Sequence[int], parent: int | None = None) -> KvEvent:
    change = BlocksStored(engine_hashes=engine, local_hashes=local)
    if parent is not None:
        change.parent_engine_hash = parent
    return KvEvent(event_id=event_id, tier=Tier.TIER_DEVICE, stored=change)


def removed(event_id: int, *engine: int) -> KvEvent:
    return KvEvent(event_id=event_id, tier=Tier.TIER_DEVICE, removed=BlocksRemoved(engine_hashes=engine))


def cleared(event_id: int) -> KvEvent:
    return KvEvent(event_id=event_id, cleared=BlocksCleared())


def message(
    *events: KvEvent, next_event_id: int | None = None, incarnation: int = 1, digest: int | None = None
) -> StreamMessage:
    following = events[-1].event_id + 1 if next_event_id is None else next_event_id
    batch = KvEventBatch(
        worker_id=1, incarnation=incarnation, block_size=4, events=events, next_event_id=following, digest=digest
    )
    return StreamMessage(COMPONENT.events_subject(1, 0), 1, batch.SerializeToString())


async def held(index: IndexState) -> set[int]:
    """Engine hashes of the rank."""
    chunks = [RankState.FromString(chunk) async for chunk in index.shared.dump_rank(RANK, 64)]
    return {block.engine_hash for chunk in chunks for block in chunk.blocks}


async def test_a_gap_inside_a_batch_keeps_only_later_events() -> None:
    index = state()
    index.events.apply([message(stored(0, [1, 2], [11, 12]), stored(3, [5], [15]), stored(4, [6], [16]))])
    assert await held(index) == {5, 6}
    assert (
        index.events.tally.gaps,
        index.events.tally.repairs,
        index.events.tally.applied,
        index.events.tally.duplicates,
    ) == (1, 1, 3, 0)
    assert await index.shared.read(lambda core: core.cursor(RANK)) == (1, 5)


async def test_a_batch_with_several_gaps() -> None:
    index = state()
    index.events.apply([message(stored(2, [1], [11]), stored(5, [2], [12]), stored(7, [3], [13]), next_event_id=9)])
    assert await held(index) == set()
    assert index.events.tally.gaps == 4
    assert await index.shared.read(lambda core: core.cursor(RANK)) == (1, 9)


async def test_an_incarnation_that_begins_with_a_gap() -> None:
    index = state()
    index.events.apply([message(stored(0, [1], [11]))])
    index.events.incarnations.register({RANK: 2})
    index.events.apply([message(stored(4, [2], [12]), incarnation=2)])
    assert await held(index) == {2}
    assert await index.shared.read(lambda core: core.cursor(RANK)) == (2, 5)
    assert (await index.shared.ranks())[0].partial


async def test_a_cleared_cache_lacks_nothing_so_that_an_unknown_parent_counts_again() -> None:
    index = state()
    index.events.apply([message(stored(3, [1], [11])), message(cleared(4)), message(stored(5, [2], [12]))])
    assert not (await index.shared.ranks())[0].partial
    index.events.apply([message(stored(6, [3], [13], parent=99))])
    assert await held(index) == set()
    assert index.events.tally.repairs == 2


async def test_a_cleared_event_of_the_past_changes_nothing() -> None:
    index = state()
    index.events.apply([message(cleared(0)), message(stored(3, [1], [11])), message(cleared(0))])
    index.events.apply([message(stored(4, [3], [13], parent=99))])
    assert await held(index) == {1}


async def test_a_heartbeat_whose_digest_differs_drops_the_rank_once() -> None:
    index = state()
    index.events.apply([message(stored(0, [1], [11]))])
    digest = await index.shared.read(lambda core: core.digest(RANK))
    assert digest is not None
    index.events.apply([message(next_event_id=1, digest=digest)])
    assert await held(index) == {1}
    index.events.apply([message(next_event_id=1, digest=digest ^ 1), message(next_event_id=1, digest=digest ^ 1)])
    assert await held(index) == set()
    assert (index.known.view(RANK).drifts, index.known.view(RANK).resync_reason, index.events.tally.repairs) == (
        1,
        "drift",
        1,
    )


async def test_events_that_break_the_contract_are_skipped_and_counted() -> None:
    index = state()
    index.events.apply(
        [message(stored(0, [1], [11]), stored(1, [2], [12, 13]), KvEvent(event_id=2), stored(3, [4], [14]))]
    )
    assert await held(index) == set(), "a removal may have been among the refused"
    assert (index.events.tally.rejected, index.events.tally.repairs) == (2, 1)
    assert index.events.tally.event_counts().rejected == 2


def test_what_was_quarantined_is_bounded() -> None:
    index = state()
    index.events.apply([StreamMessage(COMPONENT.events_subject(1, 0), n, b"\xff" * 100_000) for n in range(200)])
    assert len(index.events.quarantined) == 64
    assert index.events.quarantined[-1].sequence == 199
    assert max(len(item.data) for item in index.events.quarantined) == 4096
    assert index.events.tally.unparsable == 200


async def test_a_new_incarnation_is_never_taken_back() -> None:
    index = state()
    index.events.apply([message(stored(0, [1], [11]), incarnation=5)])
    await index.repair.begin_incarnations([NewIncarnation(RANK, 4), NewIncarnation(RANK, 5)])
    assert await held(index) == {1}
    await index.repair.begin_incarnations([NewIncarnation(RANK, 6)])
    assert await held(index) == set()


async def test_a_dump_that_is_behind_the_index_is_refused() -> None:
    index = state()
    index.events.apply([message(stored(0, [1], [11]))])
    chunks = [chunk async for chunk in index.shared.dump_rank(RANK, 64)]
    assert await index.repair.load_rank(RankDump(RANK, (1, 1), False, chunks)) == 1
    index.events.apply([message(removed(1, 1))])
    with pytest.raises(StaleDump):
        await index.repair.load_rank(RankDump(RANK, (1, 1), False, chunks))
    assert await held(index) == set()


async def test_a_resumed_rank_goes_back_in_its_incarnation_only() -> None:
    index = state()
    index.events.apply([message(stored(0, [1], [11]))])
    chunks = [chunk async for chunk in index.shared.dump_rank(RANK, 64)]
    dump = RankDump(RANK, (1, 1), False, chunks)
    await index.repair.begin_repair(RANK)
    index.events.apply([message(stored(5, [2], [12]))])  # after events that were dropped before the repair
    assert await index.repair.load_rank(dump, goes_back=True) == 1
    assert (await held(index), await index.shared.cursor(RANK)) == ({1}, (1, 1))
    await index.repair.begin_incarnations([NewIncarnation(RANK, 6)])
    with pytest.raises(StaleDump):
        await index.repair.load_rank(dump, goes_back=True)


native = pytest.mark.skipif(IMPLEMENTATION != "native", reason="the Python core applies nothing at once")


@native
async def test_small_batches_are_applied_at_once() -> None:
    index = state()
    batches = [message(stored(0, [1], [11])), message(stored(1, [2], [12], parent=1)), message(removed(2, 1))]
    assert index.events.apply_at_once(batches) == 3
    assert await index.shared.cursor(RANK) == (1, 3)
    assert index.events.tally.applied == 3


@native
async def test_nothing_is_applied_at_once_while_a_change_runs() -> None:
    index = state()
    began, go_on = threading.Event(), threading.Event()

    def change(_: object) -> None:
        began.set()
        assert go_on.wait(30)

    changing = asyncio.create_task(index.shared.change(change))
    await asyncio.to_thread(began.wait, 30)
    assert index.events.apply_at_once([message(stored(0, [1], [11]))]) == 0
    go_on.set()
    await changing
    assert index.events.apply_at_once([message(stored(0, [1], [11]))]) == 1


@native
async def test_what_takes_long_is_left_to_a_thread_with_all_that_follows() -> None:
    index, many = state(), 20_000
    index.events.apply([message(stored(0, range(1, many), range(1, many)))])
    following = [message(stored(1, [many], [7])), message(cleared(2)), message(stored(3, [1], [11]))]
    assert index.events.apply_at_once(following) == 1
    index.events.apply(following[1:])
    assert await held(index) == {1}


@native
async def test_the_caller_limits_how_long_a_message_takes() -> None:
    index, many = state(), 4_000
    index.events.apply([message(stored(0, range(1, many), range(1, many)))])
    assert index.events.apply_at_once([message(cleared(1))], 25_000) == 0
    assert index.events.apply_at_once([message(cleared(1))]) == 1


@native
async def test_what_takes_long_together_is_left_to_a_thread() -> None:
    index, many = state(), 8_000
    index.events.apply([message(stored(0, range(1, many), range(1, many)))])
    digest = await index.shared.read(lambda core: core.digest(RANK))
    numbers = range(1, 10)
    messages = [
        each for n in numbers for each in (message(removed(n, many)), message(next_event_id=n + 1, digest=digest))
    ]
    assert 2 <= index.events.apply_at_once(messages) < len(messages)


@native
async def test_an_invalid_message_is_left_to_the_thread_that_reports_it() -> None:
    index = state()
    messages = [message(stored(0, [1], [11])), StreamMessage(COMPONENT.events_subject(1, 0), 2, b"garbage")]
    assert index.events.apply_at_once(messages) == 1
    assert not index.events.quarantined


@native
async def test_a_long_delivery_is_left_to_the_thread() -> None:
    assert (
        state().events.apply_at_once([message(stored(number, [number + 1], [number + 1])) for number in range(33)]) == 0
    )


class ChangingIndex:
    """Is being changed until it is let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def try_find_matches(self, _local_hashes: bytes) -> bytes | None:
        return None

    def find_matches(self, _local_hashes: bytes) -> bytes:
        assert self.go_on.wait(30)
        return b"answer"


async def test_a_query_waits_for_a_change_without_holding_up_the_loop() -> None:
    changing = ChangingIndex()
    index = IndexState("c", 4, cast(PrefixIndex, changing), Policy())
    query = asyncio.create_task(index.shared.find_matches(b""))
    for _ in range(10):
        await asyncio.sleep(0)  # the loop turns although the index is taken
    assert not query.done()
    changing.go_on.set()
    assert await query == b"answer"


async def test_a_query_that_waits_for_a_change_ends_at_its_deadline() -> None:
    changing = ChangingIndex()
    index = IndexState("c", 4, cast(PrefixIndex, changing), Policy())
    with pytest.raises(DeadlineExceeded):
        await index.shared.find_matches(b"", Deadline.after(0))
    changing.go_on.set()


async def test_queries_wait_neither_for_reads_nor_for_the_work_around_a_change() -> None:
    index = state()
    index.events.apply([message(stored(0, [1], [11]))])
    began, go_on = threading.Event(), threading.Event()

    def change(_: object) -> None:
        began.set()
        assert go_on.wait(30)

    changes = [asyncio.create_task(index.shared.change(change)) for _ in range(50)]
    await asyncio.to_thread(began.wait, 30)
    answer = FindMatchesResponse.FromString(await index.shared.find_matches(struct.pack("<Q", 11)))
    assert list(answer.device_blocks) == [1]
    assert await index.shared.cursor(RANK) == (1, 1)
    assert (await index.shared.size()).blocks == 1
    assert await held(index) == {1}
    assert not any(task.done() for task in changes)
    go_on.set()
    await asyncio.gather(*changes)


class Engine:
    """What a rank really holds: engine hash → (path of local hashes, copies)."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[tuple[int, ...], int]] = {}
        self.next_event_id = 0

    def step(self, draw: st.DataObject) -> KvEvent:
        number = self.next_event_id
        self.next_event_id += 1
        kind = draw.draw(st.sampled_from(["store", "store", "store", "remove", "clear"]))
        if kind == "clear" and draw.draw(st.integers(0, 4)) == 0:
            self.blocks.clear()
            return cleared(number)
        if kind == "remove" and self.blocks:
            gone = draw.draw(st.lists(st.sampled_from(sorted(self.blocks)), min_size=1, max_size=3, unique=True))
            for engine in gone:
                path, copies = self.blocks.pop(engine)
                if copies > 1:
                    self.blocks[engine] = (path, copies - 1)
            return removed(number, *gone)
        return self._store(number, draw)

    def _store(self, number: int, draw: st.DataObject) -> KvEvent:
        # The engine hash of a block is made of its place, as engines do it, so that a block never moves.
        parent = draw.draw(st.sampled_from([None, *sorted(self.blocks)]))
        path = () if parent is None else self.blocks[parent][0]
        locals_ = draw.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        engines = []
        for local in locals_:
            path = (*path, local)
            engines.append(place_of(path) ^ 0xABC)
            _, copies = self.blocks.get(engines[-1], (path, 0))
            self.blocks[engines[-1]] = (path, copies + 1)
        return stored(number, engines, locals_, parent)


def place_of(path: tuple[int, ...]) -> int:
    """Sequence hash of the last block of a path of local hashes."""
    return int.from_bytes(sequence_hashes(struct.pack(f"<{len(path)}Q", *path))[-8:], "little")


@settings(max_examples=150)
@given(st.data())
def test_with_lost_and_repeated_messages_the_index_claims_no_missing_block(data: st.DataObject) -> None:
    index, engine = state(), Engine()
    sent: list[StreamMessage] = []
    for _ in range(data.draw(st.integers(1, 25))):
        events = [engine.step(data) for _ in range(data.draw(st.integers(0, 3)))]
        sent.append(message(*events, next_event_id=engine.next_event_id))
        fate = data.draw(st.sampled_from(["arrives", "arrives", "arrives", "lost", "twice", "again from before"]))
        if fate == "lost":
            continue
        if fate == "again from before":
            index.events.apply(sent[data.draw(st.integers(0, len(sent) - 1)) :])
        index.events.apply([sent[-1]] * (2 if fate == "twice" else 1))
        claimed = Counter[tuple[int, int]]()
        for chunk in index.shared._index.dump_rank(RANK):
            for block in RankState.FromString(chunk).blocks:
                claimed[block.engine_hash, block.sequence_hash] += sum(tier.copies for tier in block.copies)
        there = Counter({(one, place_of(path)): copies for one, (path, copies) in engine.blocks.items()})
        assert claimed <= there
        if not index.events.tally.gaps:
            assert claimed == there
    assert index.events.tally.unknown_parents == 0 or index.events.tally.gaps


async def test_a_batch_that_claims_a_later_incarnation_empties_no_rank() -> None:
    policy = Policy()
    index = state(policy)
    index.events.incarnations.register({RANK: 5})
    index.events.apply([message(stored(0, [1], [11]), incarnation=5)])
    index.events.apply([message(next_event_id=0, incarnation=(1 << 64) - 1)])
    assert await held(index) == {1}
    assert (policy.reasons, index.events.tally.unconfirmed) == (["incarnation"], 1)
    start = await index.repair.begin_repair(RANK)
    assert await index.repair.confirm_rank(RANK, 5, "incarnation", start.claims) == 1
    index.events.apply([message(stored(1, [2], [12]), incarnation=5)])
    assert await held(index) == {1, 2}
    assert index.known.view(RANK).verified


async def test_the_workers_state_replaces_a_rank_of_a_later_incarnation() -> None:
    index, worker = state(), state()
    index.events.apply([message(stored(0, [1], [11]), incarnation=(1 << 64) - 1)])
    worker.events.apply([message(stored(0, [2], [12]), incarnation=5)])
    index.events.incarnations.register({RANK: 5})
    dump = await worker.repair.whole_rank(RANK)
    assert dump is not None
    await index.repair.begin_repair(RANK)
    await index.repair.replace_rank(dump, "incarnation")
    assert await held(index) == {2}
    index.events.apply(
        [message(stored(7, [9], [19]), incarnation=(1 << 64) - 1), message(stored(0, [8], [18]), incarnation=4)]
    )
    assert await held(index) == {2}
    assert (index.events.tally.unconfirmed, index.events.tally.fenced) == (1, 1)


async def test_a_dump_of_an_incarnation_that_the_worker_is_not_in_is_refused() -> None:
    index, forged = state(), state()
    forged.events.apply([message(stored(0, [1], [11]), incarnation=(1 << 64) - 1)])
    dump = await forged.repair.whole_rank(RANK)
    assert dump is not None
    index.events.incarnations.register({RANK: 5})
    with pytest.raises(StaleDump):
        await index.repair.load_rank(dump)


async def test_event_ids_that_the_worker_has_not_reached_are_dropped_after_its_answer() -> None:
    policy = Policy(retains=True)
    index = state(policy)
    index.events.apply([message(stored(0, [1], [11])), message(stored(1000, [2], [12]))])
    start = await index.repair.begin_repair(RANK)
    index.events.apply([message(stored(1, [3], [13]))])
    assert await index.repair.confirm_rank(RANK, 1, "gap", start.claims) == 1
    assert await held(index) == {1, 3}
    assert policy.reasons == ["gap"], "the dropped batch raises no second alarm"
    assert await index.shared.read(lambda core: core.cursor(RANK)) == (1, 2)


async def test_while_gaps_were_false_of_late_events_that_follow_are_applied_at_once() -> None:
    index = state(Policy(retains=True, deferred=frozenset({"gap"})))
    index.events.apply([message(stored(0, [1], [11])), message(stored(1000, [2], [12])), message(stored(1, [3], [13]))])
    assert await held(index) == {1, 3}
    assert (index.events.tally.unconfirmed, index.events.tally.repairs) == (1, 0)


async def test_a_gap_during_the_call_to_the_worker_does_not_drop_the_rank() -> None:
    index = state()
    index.events.apply([message(stored(0, [1], [11]))])
    start = await index.repair.begin_repair(RANK)
    index.events.apply([message(stored(5, [2], [12]))])
    assert await held(index) == {1}
    await index.repair.confirm_rank(RANK, 1, "registered", start.claims)
    assert index.events.tally.repairs == 1, "nobody is there to fill the gap, which is no claim of before the question"


async def test_a_dump_that_lacks_blocks_gives_way_to_a_state_that_does_not() -> None:
    whole, lacking = state(), state()
    whole.events.apply([message(stored(0, [1], [11])), message(stored(1, [2], [12]))])
    lacking.events.apply([message(stored(1, [2], [12]))])
    dump = await lacking.repair.whole_rank(RANK)
    assert dump is not None
    assert dump.partial
    with pytest.raises(StaleDump):
        await whole.repair.load_rank(dump)
    assert await held(whole) == {1, 2}
    complete = await whole.repair.whole_rank(RANK)
    assert complete is not None
    await lacking.repair.load_rank(complete)
    assert await held(lacking) == {1, 2}
    assert not (await lacking.shared.ranks())[0].partial


async def test_a_later_partial_dump_is_loaded_and_requests_a_resync() -> None:
    policy = Policy()
    behind, lacking = state(policy), state()
    behind.events.apply([message(stored(0, [1], [11]))])
    lacking.events.apply([message(stored(1, [2], [12]))])
    dump = await lacking.repair.whole_rank(RANK)
    assert dump is not None
    await behind.repair.load_rank(dump)
    assert await held(behind) == {2}
    assert policy.requested == [(RANK, "partial")]


async def test_a_full_buffer_keeps_only_the_newest_batches_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrouter.indexer.index.pending_buffers.MAX_ALL_BYTES", 1)
    policy = Policy()
    index, worker = state(policy), state()
    batches = [message(stored(n, [n + 1], [n + 11])) for n in range(4)]
    index.events.apply(batches[:1])
    worker.events.apply(batches[:1])
    fetched = await worker.repair.whole_rank(RANK)
    assert fetched is not None
    await index.repair.begin_repair(RANK)
    index.events.apply(batches[1:])
    assert index.events.pending.bytes == EventBatch(batches[-1].data).memory_bytes
    await index.repair.replace_rank(fetched, "registered")
    assert index.events.pending.bytes == 0
    assert policy.reasons == ["gap"], "what was let go is asked for"
    await index.repair.begin_repair(RANK)
    index.events.apply(batches)
    await index.repair.forget([RANK])
    assert index.events.pending.bytes == 0
