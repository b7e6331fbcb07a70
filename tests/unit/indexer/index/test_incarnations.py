from __future__ import annotations

from hypothesis import given, strategies as st
from kvrouter.core import PrefixIndex
from kvrouter.indexer.index.incarnations import Incarnations, Verdict
from kvrouter.indexer.index.state import IndexState

from tests.unit.indexer.index.policy import Policy

RANK = (1, 0)
LARGEST = (1 << 64) - 1
numbers = st.one_of(st.integers(1, 6), st.just(LARGEST))


def test_a_batch_alone_does_not_end_an_incarnation() -> None:
    known = Incarnations()
    assert known.judge(RANK, 5, None) == Verdict.APPLY
    assert known.judge(RANK, 5, 5) == Verdict.APPLY
    assert known.judge(RANK, 4, 5) == Verdict.FENCED
    assert known.judge(RANK, 6, 5) == Verdict.UNCONFIRMED


def test_a_registration_confirms_an_incarnation_and_fences_earlier_ones() -> None:
    known = Incarnations()
    known.register({RANK: 6})
    assert known.judge(RANK, 6, 5) == Verdict.APPLY
    assert known.judge(RANK, 5, 5) == Verdict.FENCED
    assert known.judge(RANK, LARGEST, 5) == Verdict.UNCONFIRMED


def test_the_workers_answer_overrides_its_registration_until_the_next_one() -> None:
    known = Incarnations()
    known.register({RANK: LARGEST})
    known.confirm(RANK, 7, [])
    assert known.current(RANK) == 7
    assert known.judge(RANK, 7, LARGEST) == Verdict.APPLY
    known.register({RANK: 8})
    assert known.current(RANK) == 8


def test_a_claim_that_arrived_during_the_call_is_not_refuted_by_the_answer() -> None:
    known = Incarnations()
    known.register({RANK: 5})
    known.claim(RANK, 9)
    requested = known.claims(RANK)
    known.claim(RANK, 10)
    assert known.confirm(RANK, 5, requested) == [9]
    assert known.judge(RANK, 9, 5) == Verdict.REFUTED
    assert known.judge(RANK, 10, 5) == Verdict.UNCONFIRMED


def test_a_refuted_incarnation_counts_once_the_worker_registers_with_it() -> None:
    known = Incarnations()
    known.register({RANK: 5})
    known.claim(RANK, 9)
    known.confirm(RANK, 5, [9])
    known.register({RANK: 9})
    assert known.judge(RANK, 9, 5) == Verdict.APPLY


@given(st.lists(st.tuples(st.sampled_from(["register", "batch", "ask"]), numbers), max_size=40))
def test_only_the_registration_or_the_worker_changes_the_incarnation(
    steps: list[tuple[str, int]],
) -> None:
    known = Incarnations()
    registered: int | None = None
    answered: int | None = None
    indexed: int | None = None
    for what, number in steps:
        if what == "register":
            if number != registered:
                answered = None
            registered = number
            known.register({RANK: number})
        elif what == "ask":
            known.confirm(RANK, number, known.claims(RANK))
            indexed = answered = number
        else:
            verdict = known.judge(RANK, number, indexed)
            if verdict == Verdict.UNCONFIRMED:
                known.claim(RANK, number)
            if verdict == Verdict.APPLY:
                assert number == known.current(RANK) or (known.current(RANK) is None and indexed in (None, number))
                indexed = number
        if registered is not None:
            assert known.current(RANK) == (answered if answered is not None else registered)
            assert known.judge(RANK, known.current(RANK) or 0, indexed) == Verdict.APPLY, "the worker is never fenced"
        assert len(known.claims(RANK)) <= 16


async def test_a_registered_rank_begins_when_its_worker_is_asked() -> None:
    index = IndexState("ns/decode", 4, PrefixIndex(), Policy())
    assert (await index.repair.begin_repair(RANK)).cursor is None
    index.events.incarnations.register({RANK: 5})
    start = await index.repair.begin_repair(RANK)
    assert (start.cursor, start.is_partial) == ((5, 0), False)
    assert not index.known.view(RANK).verified
