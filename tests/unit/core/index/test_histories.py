"""Random histories: every index against the oracle, and the native one against the reference."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings, strategies as st
from kvrouter.core import reference

from ..batches import RANK, batch, digest_of, dumped, entries, matches, packed, places, removed, stored
from ..conftest import implementation
from .histories import PROMPTS, Apply, Operation, Reload, Remove, Reset, histories, perform, view
from .oracle import Oracle, OracleRank


def mirror(oracle: Oracle, operation: Operation) -> None:
    """Does to the oracle what ``perform`` does to an index."""
    match operation:
        case Apply(data):
            oracle.apply(data)
        case Reset(rank, incarnation, next_event_id, partial):
            oracle.ranks[rank] = OracleRank(incarnation, next_event_id, partial)
        case Remove(rank):
            oracle.ranks.pop(rank, None)
        case Reload():
            pass


def check(index: Any, oracle: Oracle) -> None:
    infos = {tuple(info[:2]): info for info in index.ranks()}
    assert list(infos) == sorted(oracle.ranks)
    for rank, expected in oracle.ranks.items():
        assert index.cursor(rank) == (expected.incarnation, expected.next_event_id)
        assert index.digest(rank) == expected.digest()
        assert infos[rank].blocks == expected.entries
        assert infos[rank].partial == expected.partial
    assert index.stats().blocks == sum(one.entries for one in oracle.ranks.values())


def distinct_places(oracle: Oracle) -> int:
    return len({copy.place for one in oracle.ranks.values() for copy in one.copies})


@given(histories())
@settings(max_examples=100)
def test_an_index_holds_what_its_events_say(index_class: type, history: list[Operation]) -> None:
    index, oracle, reloaded = index_class(), Oracle(), False
    for operation in history:
        if isinstance(operation, Reload) and operation.spoil is not None:
            continue  # what a spoilt dump means is no business of the oracle's
        perform(index, operation)
        mirror(oracle, operation)
        check(index, oracle)
        reloaded = reloaded or isinstance(operation, Reload)
        assert reloaded or index.stats().distinct_blocks == distinct_places(oracle)
    for prompt in PROMPTS:
        assert matches(index, prompt) == {rank: one.overlaps(prompt) for rank, one in sorted(oracle.ranks.items())}


@given(histories(max_operations=40))
@settings(max_examples=200)
def test_the_native_index_agrees_with_the_reference(history: list[Operation]) -> None:
    native = implementation("native", "PrefixIndex").PrefixIndex
    indexes = [native(), reference.PrefixIndex()]
    for operation in history:
        one, other = (perform(index, operation) for index in indexes)
        assert one == other, operation
    assert view(indexes[0]) == view(indexes[1])


@given(histories(), st.integers(1, 6))
@settings(max_examples=60)
def test_a_dump_loads_into_an_equal_rank(index_class: type, history: list[Operation], chunk_blocks: int) -> None:
    index, copy = index_class(), index_class()
    for operation in history:
        perform(index, operation)
    for info in index.ranks():
        rank = tuple(info[:2])
        assert copy.load_rank(index.dump_rank(rank, chunk_blocks)) == info.blocks
    assert view(copy) == view(index)


@given(histories(), st.integers(1, 12))
@settings(max_examples=60)
def test_bounds_hold_whatever_comes(index_class: type, history: list[Operation], max_blocks: int) -> None:
    """Over bound there is less, and it is said; never more than without the bound, and never anything else."""
    bounded, free = index_class(max_blocks=max_blocks), index_class()
    for operation in history:
        if not isinstance(operation, Reload):  # which carries what is missing from a rank into the next bound
            perform(bounded, operation)
            perform(free, operation)
            assert bounded.stats().blocks <= max_blocks
    assert [info[:4] for info in bounded.ranks()] == [info[:4] for info in free.ranks()]
    whole = {tuple(info[:2]) for info in bounded.ranks() if not info.partial}
    for rank in whole:
        if not next(info for info in free.ranks() if tuple(info[:2]) == rank).partial:
            assert bounded.digest(rank) == free.digest(rank)


@given(st.data())
@settings(max_examples=100)
def test_blocks_may_go_in_any_order(index_class: type, data: st.DataObject) -> None:
    """A tree of blocks is removed in any order; each step leaves what brute force says."""
    parents = data.draw(st.lists(st.integers(-1, 9), min_size=1, max_size=10), label="parents")
    parents = [min(parent, number - 1) for number, parent in enumerate(parents)]
    local = data.draw(st.lists(st.integers(1, 3), min_size=len(parents), max_size=len(parents)), label="local")
    order = data.draw(st.permutations(range(len(parents))), label="order")
    index = index_class()
    path: dict[int, tuple[int, ...]] = {-1: ()}
    for number, parent in enumerate(parents):
        path[number] = (*path[parent], local[number])
        index.apply(batch(number, stored([100 + number], [local[number]], None if parent < 0 else 100 + parent)))
    resident = set(range(len(parents)))
    for step, number in enumerate(order):
        index.apply(batch(len(parents) + step, removed(100 + number)))
        resident.remove(number)
        assert index.digest(RANK) == digest_of(*((100 + one, places(path[one])[-1], 1, 1) for one in resident))
        there = {path[one] for one in resident}
        for prompt in path.values():
            expected = next((n for n in range(len(prompt)) if prompt[: n + 1] not in there), len(prompt))
            assert matches(index, prompt)[RANK][0] == expected
    assert (index.stats().blocks, index.stats().distinct_blocks) == (0, 0)
    assert entries(dumped(index)) == {}


@given(st.lists(st.binary(max_size=60), max_size=5), st.binary(max_size=40))
@settings(max_examples=100)
def test_no_bytes_whatever_raise_from_apply(index_class: type, noise: list[bytes], more: bytes) -> None:
    index = index_class()
    good = batch(0, stored([101, 102], [1, 2]))
    for data in [good, *noise, good + more, *(good[:cut] for cut in range(len(good)))]:
        index.apply(data)
    index.find_matches(packed([1, 2]))
