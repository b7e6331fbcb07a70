"""Dumping and loading ranks, for every implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvrouter.core import InvalidDump
from kvrouter.v1.common_pb2 import BlockRecord, Cursor, Rank, RankState, TierCopies

from ..batches import (
    COUNTED,
    DEVICE,
    DISK,
    HOST,
    LAST_ID,
    RANK,
    SET,
    batch,
    device_overlap,
    digest_of,
    dumped,
    entries,
    matches,
    places,
    removed,
    stored,
)

U32 = (1 << 32) - 1


def sample(index_class: type) -> Any:
    """An index with chains that share a prefix, copies, tiers, an orphan and two engine hashes at one place."""
    index = index_class()
    index.apply(
        batch(
            0,
            stored([101, 102, 103], [1, 2, 3]),
            stored([102], [2], parent=101),
            stored([102], [2], parent=101, tier=HOST),
            stored([201], [1]),
            stored([304], [4], parent=102, tier=DISK),
            stored([401, 402, 403], [7, 8, 9]),
            removed(401),
            incarnation=LAST_ID,
        )
    )
    return index


def state_of(index: Any) -> object:
    return (
        index.cursor(RANK),
        index.digest(RANK),
        entries(dumped(index)),
        [(info.blocks, info.partial) for info in index.ranks()],
        [matches(index, prompt) for prompt in ([1, 2, 3], [1, 2, 4], [7, 8, 9], [8, 9], [9])],
    )


def test_a_dump_says_all_there_is(index_class: type) -> None:
    (state,) = dumped(sample(index_class))
    first, second, third = places([1, 2, 3])
    assert state.rank == Rank(worker_id=RANK[0], dp_rank=RANK[1])
    assert state.cursor == Cursor(incarnation=LAST_ID, next_event_id=7)
    assert (state.last, state.partial, state.copy_counting) == (True, False, COUNTED)
    assert entries([state]) == {
        101: (1, first, 0, {DEVICE: 1}),
        201: (1, first, 0, {DEVICE: 1}),
        102: (2, second, 1, {DEVICE: 2, HOST: 1}),
        103: (3, third, 2, {DEVICE: 1}),
        304: (4, places([1, 2, 4])[2], 2, {DISK: 1}),
        402: (8, places([7, 8])[1], 1, {DEVICE: 1}),
        403: (9, places([7, 8, 9])[2], 2, {DEVICE: 1}),
    }
    assert state.digest == digest_of(
        *(
            (engine, seq, tier, n)
            for engine, (_, seq, _, copies) in entries([state]).items()
            for tier, n in copies.items()
        )
    )


@pytest.mark.parametrize("chunk_blocks", [1, 2, 7, 8, 1000])
def test_chunks(index_class: type, chunk_blocks: int) -> None:
    index = sample(index_class)
    states = dumped(index, RANK, chunk_blocks)
    assert len(states) == -(-7 // chunk_blocks)
    assert [state.last for state in states] == [False] * (len(states) - 1) + [True]
    assert all(len(state.blocks) <= chunk_blocks for state in states)
    assert {(state.digest, state.cursor.next_event_id) for state in states} == {(index.digest(RANK), 7)}
    assert entries(states) == entries(dumped(index))
    seen: dict[int, BlockRecord] = {}
    for block in (block for state in states for block in state.blocks):
        if block.HasField("parent_engine_hash"):
            parent = seen[block.parent_engine_hash]
            assert places([parent.sequence_hash, block.local_hash])[1] == block.sequence_hash
            assert block.depth == parent.depth + 1
        seen[block.engine_hash] = block
    parentless = {block.engine_hash for block in seen.values() if not block.HasField("parent_engine_hash")}
    assert parentless == {101, 201, 402}


@pytest.mark.parametrize("chunk_blocks", [0, -1])
def test_chunks_hold_something(index_class: type, chunk_blocks: int) -> None:
    with pytest.raises((ValueError, OverflowError)):
        sample(index_class).dump_rank(RANK, chunk_blocks)


def test_an_empty_rank_is_one_chunk(index_class: type) -> None:
    index = index_class()
    index.reset_rank(RANK, 3, 4)
    (state,) = dumped(index)
    assert (len(state.blocks), state.last, state.digest, state.partial) == (0, True, 0, True)
    loaded = index_class()
    assert loaded.load_rank(index.dump_rank(RANK)) == 0
    assert loaded.cursor(RANK) == (3, 4)
    assert loaded.ranks()[0].partial


def test_a_dump_is_of_the_moment_of_the_call(index_class: type) -> None:
    index = sample(index_class)
    before = entries(dumped(index))
    chunks = index.dump_rank(RANK, 1)
    states = [RankState.FromString(next(chunks))]
    index.apply(batch(7, removed(103), stored([102], [5]), stored([999], [9]), incarnation=LAST_ID))
    index.reset_rank(RANK, LAST_ID, 77)
    index.remove_rank(RANK)
    states += [RankState.FromString(chunk) for chunk in chunks]
    assert entries(states) == before
    assert states[-1].cursor.next_event_id == 7
    assert states[-1].last


@pytest.mark.parametrize("chunk_blocks", [1, 3, 4096])
def test_loading_a_dump_gives_the_same_rank(index_class: type, chunk_blocks: int) -> None:
    source = sample(index_class)
    loaded = index_class()
    loaded.apply(batch(0, stored([5], [5])))
    assert loaded.load_rank(source.dump_rank(RANK, chunk_blocks)) == 8
    assert state_of(loaded) == state_of(source)
    later = batch(
        7,
        stored([401], [7]),
        removed(102, tier=HOST),
        removed(102),
        stored([500], [5], parent=403),
        stored([501], [6], parent=201),
        incarnation=LAST_ID,
    )
    for index in (source, loaded):
        assert index.apply(later).applied == 5
    assert state_of(loaded) == state_of(source)
    assert device_overlap(loaded, 7, 8, 9, 5) == 4
    assert device_overlap(loaded, 1, 6) == 2


def test_counting_goes_along(index_class: type) -> None:
    source = index_class()
    source.apply(batch(0, stored([101], [1]), counting=SET))
    assert dumped(source)[0].copy_counting == SET
    loaded = index_class()
    loaded.load_rank(source.dump_rank(RANK))
    assert dumped(loaded)[0].copy_counting == SET


def test_other_ranks_are_left_alone(index_class: type) -> None:
    index = sample(index_class)
    index.apply(batch(0, stored([101], [1]), rank=(1, 1)))
    index.load_rank(sample(index_class).dump_rank(RANK))
    assert matches(index, [1, 2, 3]) == {RANK: (3,) * 4, (1, 1): (1,) * 4}


def test_a_block_without_parent_is_where_its_sequence_hash_says(index_class: type) -> None:
    """As in the dump of a worker that dropped the parents long ago."""
    second = places([1, 2])[1]
    record = BlockRecord(
        engine_hash=102, local_hash=2, sequence_hash=second, depth=1, copies=[TierCopies(tier=0, copies=1)]
    )
    state = RankState(rank=Rank(worker_id=7), cursor=Cursor(), blocks=[record], last=True)
    state.digest = digest_of((102, second, DEVICE, 1))
    index = index_class()
    assert index.load_rank([state.SerializeToString()]) == 1
    assert device_overlap(index, 1, 2) == 0
    index.apply(batch(0, stored([101], [1]), stored([103], [3], parent=102), incarnation=0))
    assert device_overlap(index, 1, 2, 3) == 3
    assert index.digest(RANK) == digest_of(
        (101, 1, DEVICE, 1), (102, second, DEVICE, 1), (103, places([1, 2, 3])[2], DEVICE, 1)
    )


def test_no_chain_is_deeper_than_u32(index_class: type) -> None:
    record = BlockRecord(
        engine_hash=5, local_hash=5, sequence_hash=55, depth=U32 - 2, copies=[TierCopies(tier=DEVICE, copies=1)]
    )
    state = RankState(rank=Rank(worker_id=7), cursor=Cursor(), blocks=[record], last=True)
    state.digest = digest_of((5, 55, DEVICE, 1))
    index = index_class()
    index.load_rank([state.SerializeToString()])
    summary = index.apply(batch(0, stored([6, 7, 8], [6, 7, 8], parent=5), incarnation=0))
    assert (len(summary.rejected), summary.applied, summary.next_event_id) == (1, 0, 1)
    assert index.ranks()[0].partial
    assert index.apply(batch(1, stored([6, 7], [6, 7], parent=5), incarnation=0)).applied == 1
    assert max(depth for _, _, depth, _ in entries(dumped(index)).values()) == U32


def edited(edit: Callable[[list[RankState]], object]) -> Callable[[type], list[bytes]]:
    """A dump of ``sample`` in chunks of 2, changed; the digest is made right again unless the change is to it."""

    def chunks(index_class: type) -> list[bytes]:
        states = dumped(sample(index_class), RANK, 2)
        before = [state.digest for state in states]
        edit(states)
        if [state.digest for state in states] == before[: len(states)] and states:
            terms = [
                (block.engine_hash, block.sequence_hash, one.tier or 1, one.copies)
                for state in states
                for block in state.blocks
                for one in block.copies
                if one.copies and one.tier >= 0
            ]
            states[-1].digest = digest_of(*terms)
        return [state.SerializeToString() for state in states]

    return chunks


def chunks_of(index_class: type, drop: int | None = None) -> list[bytes]:
    """A dump of ``sample`` in chunks of 2, perhaps without one of them."""
    chunks = list(sample(index_class).dump_rank(RANK, 2))
    return [chunk for number, chunk in enumerate(chunks) if number != drop]


def repeated(index_class: type) -> list[bytes]:
    """A dump whose first block comes once more, and counts once in the digest."""
    first, *others = dumped(sample(index_class), RANK, 2)
    others[-1].blocks.add().CopyFrom(first.blocks[0])
    return [state.SerializeToString() for state in (first, *others)]


def block_of(states: list[RankState], engine_hash: int) -> BlockRecord:
    return next(block for state in states for block in state.blocks if block.engine_hash == engine_hash)


def twice(states: list[RankState]) -> None:
    states[-1].blocks.add().CopyFrom(block_of(states, 101))


INVALID: dict[str, Callable[[type], list[bytes]]] = {
    "nothing": edited(lambda states: states.clear()),
    "not protobuf": lambda _: [b"\xff"],
    "broken chunk": lambda index_class: [*chunks_of(index_class)[:-1], b"\x22\x05\x08"],
    "no last": edited(lambda states: states.pop()),
    "goes on after the last": edited(lambda states: setattr(states[0], "last", True)),
    "another rank": edited(lambda states: setattr(states[1].rank, "dp_rank", 3)),
    "another worker": edited(lambda states: setattr(states[1].rank, "worker_id", 3)),
    "another incarnation": edited(lambda states: setattr(states[1].cursor, "incarnation", 3)),
    "another moment": edited(lambda states: setattr(states[1].cursor, "next_event_id", 3)),
    "no rank": edited(lambda states: [state.ClearField("rank") for state in states]),
    "no cursor": edited(lambda states: [state.ClearField("cursor") for state in states]),
    "wrong digest": edited(lambda states: setattr(states[-1], "digest", 5)),
    "a chunk missing": lambda index_class: chunks_of(index_class, drop=1),
    "parents after children": edited(lambda states: states.insert(0, states.pop(1))),
    "a block twice": edited(twice),
    "a block twice, in the digest once": repeated,
    "unknown parent": edited(lambda states: setattr(block_of(states, 103), "parent_engine_hash", 999)),
    "own parent": edited(lambda states: setattr(block_of(states, 103), "parent_engine_hash", 103)),
    "another parent": edited(lambda states: setattr(block_of(states, 103), "parent_engine_hash", 402)),
    "another sequence hash": edited(lambda states: setattr(block_of(states, 103), "sequence_hash", 5)),
    "another local hash": edited(lambda states: setattr(block_of(states, 103), "local_hash", 5)),
    "another local hash at the root": edited(lambda states: setattr(block_of(states, 101), "local_hash", 5)),
    "another depth": edited(lambda states: setattr(block_of(states, 103), "depth", 5)),
    "depth 0 below a parent": edited(lambda states: setattr(block_of(states, 102), "depth", 0)),
    "no copies": edited(lambda states: block_of(states, 103).ClearField("copies")),
    "0 copies": edited(lambda states: setattr(block_of(states, 103).copies[0], "copies", 0)),
    "unknown tier": edited(lambda states: setattr(block_of(states, 103).copies[0], "tier", 6)),
    "negative tier": edited(lambda states: setattr(block_of(states, 103).copies[0], "tier", -1)),
    "a tier twice": edited(lambda states: block_of(states, 103).copies.add(tier=DEVICE, copies=1)),
    "a tier twice, once as unspecified": edited(lambda states: block_of(states, 103).copies.add(tier=0, copies=1)),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_dump_changes_nothing(index_class: type, name: str) -> None:
    index = sample(index_class)
    before = state_of(index)
    with pytest.raises(InvalidDump):
        index.load_rank(INVALID[name](index_class))
    assert state_of(index) == before


def test_an_edit_that_changes_nothing_is_valid(index_class: type) -> None:
    """So what the invalid dumps are refused for is what was changed in them."""
    assert index_class().load_rank(edited(lambda _: None)(index_class)) == 8


def test_a_source_that_fails_changes_nothing(index_class: type) -> None:
    index = sample(index_class)
    before = state_of(index)
    source = sample(index_class)
    source.apply(batch(7, removed(103), incarnation=LAST_ID))

    def failing() -> Any:
        yield next(source.dump_rank(RANK, 2))
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        index.load_rank(failing())
    assert state_of(index) == before
