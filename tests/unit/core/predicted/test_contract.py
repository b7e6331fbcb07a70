"""The approximate mode's index, for every implementation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from .chains import packed

ONE, TWO = (1, 0), (1, 1)


def overlap(index: Any, rank: tuple[int, int], *local: int, now: float) -> int:
    return index.overlaps(packed(local), now).get(rank, 0)


def test_what_was_sent_is_predicted(predicted_class: type) -> None:
    index = predicted_class()
    index.record(ONE, packed([1, 2, 3]), 0.0)
    index.record(TWO, packed([1, 5]), 0.0)
    assert index.overlaps(packed([1, 2, 3, 4]), 0.0) == {ONE: 3, TWO: 1}
    assert index.overlaps(packed([1, 5]), 0.0) == {ONE: 1, TWO: 2}
    assert index.overlaps(packed([2, 3]), 0.0) == {}
    assert index.overlaps(b"", 0.0) == {}
    assert len(index) == 5


def test_recording_nothing_changes_nothing(predicted_class: type) -> None:
    index = predicted_class()
    index.record(ONE, b"", 0.0)
    assert len(index) == 0
    assert index.remove_rank(ONE) == 0


def test_entries_live_for_their_time_from_their_last_record(predicted_class: type) -> None:
    index = predicted_class(ttl_seconds=10.0)
    index.record(ONE, packed([1, 2]), 100.0)
    index.record(ONE, packed([1]), 105.0)
    assert overlap(index, ONE, 1, 2, now=109.5) == 2
    assert overlap(index, ONE, 1, 2, now=110.0) == 1
    assert overlap(index, ONE, 1, 2, now=114.5) == 1
    assert index.overlaps(packed([1, 2]), 115.0) == {}


def test_a_query_does_not_count_as_use(predicted_class: type) -> None:
    index = predicted_class(ttl_seconds=10.0)
    index.record(ONE, packed([1]), 0.0)
    assert overlap(index, ONE, 1, now=9.0) == 1
    assert overlap(index, ONE, 1, now=11.0) == 0


def test_expire_drops_what_is_too_old(predicted_class: type) -> None:
    index = predicted_class(ttl_seconds=10.0)
    index.record(ONE, packed([1, 2]), 0.0)
    index.record(TWO, packed([1]), 5.0)
    assert index.expire(9.0) == 0
    assert index.expire(10.0) == 2
    assert len(index) == 1
    assert index.expire(10.0) == 0
    assert index.overlaps(packed([1]), 10.0) == {TWO: 1}


def test_what_was_used_again_hides_nothing_that_is_too_old(predicted_class: type) -> None:
    index = predicted_class(ttl_seconds=10.0)
    index.record(ONE, packed([1]), 0.0)
    index.record(TWO, packed([1]), 1.0)
    index.record(ONE, packed([1]), 5.0)
    assert index.expire(11.0) == 1
    assert index.overlaps(packed([1]), 11.0) == {ONE: 1}


def test_time_does_not_run_backwards(predicted_class: type) -> None:
    index = predicted_class(ttl_seconds=10.0)
    index.record(ONE, packed([1]), 100.0)
    index.record(TWO, packed([1]), 50.0)
    assert index.overlaps(packed([1]), 60.0) == {ONE: 1, TWO: 1}
    assert index.overlaps(packed([1]), 109.0) == {ONE: 1, TWO: 1}
    assert index.overlaps(packed([1]), 110.0) == {}
    assert index.overlaps(packed([1]), 105.0) == {}


def test_removing_a_rank(predicted_class: type) -> None:
    index = predicted_class()
    index.record(ONE, packed([1, 2]), 0.0)
    index.record(TWO, packed([1]), 0.0)
    assert index.remove_rank(ONE) == 2
    assert index.remove_rank(ONE) == 0
    assert index.overlaps(packed([1, 2]), 0.0) == {TWO: 1}


def test_what_was_last_used_until_a_time_is_forgotten(predicted_class: type) -> None:
    index = predicted_class(ttl_seconds=10.0)
    index.record(ONE, packed([1, 2]), 0.0)
    index.record(TWO, packed([1, 2]), 1.0)
    index.record(ONE, packed([1, 3]), 2.0)
    assert [index.last_use(ONE, packed(local), 2.0) for local in ([1, 2], [1], [1, 3], [3], [])] == [
        0.0,
        2.0,
        2.0,
        None,
        None,
    ]
    assert index.forget_until(ONE, 1.0) == 1
    assert index.overlaps(packed([1, 2]), 2.0) == {ONE: 1, TWO: 2}
    assert index.last_use(ONE, packed([1, 2]), 2.0) is None
    assert index.forget_until(ONE, 2.0) == 2
    assert index.forget_until(ONE, 9.0) == 0
    assert index.overlaps(packed([1, 2]), 2.0) == {TWO: 2}
    assert index.last_use(TWO, packed([1, 2]), 11.0) is None


def test_a_rank_keeps_what_it_used_last(predicted_class: type) -> None:
    index = predicted_class()
    index.record(ONE, packed([1, 2, 3]), 0.0)
    index.record(TWO, packed([1, 2]), 1.0)
    index.record(ONE, packed([1, 4]), 2.0)
    assert [index.blocks_of(rank) for rank in (ONE, TWO, (3, 0))] == [4, 2, 0]
    assert index.keep_newest(ONE, 4) == 0
    assert index.keep_newest(ONE, 3) == 1
    assert [overlap(index, ONE, *local, now=2.0) for local in ([1, 2, 3], [1, 4])] == [2, 2]
    assert index.keep_newest(ONE, 1) == 2
    assert [overlap(index, ONE, *local, now=2.0) for local in ([1, 2, 3], [1, 4])] == [1, 1]
    assert (index.keep_newest(ONE, 0), index.keep_newest(ONE, 0), index.blocks_of(ONE)) == (1, 0, 0)
    assert index.overlaps(packed([1, 2]), 2.0) == {TWO: 2}


def test_the_least_recently_used_go_first(predicted_class: type) -> None:
    index = predicted_class(max_blocks=10, prune_ratio=0.5)
    for number in range(5):
        index.record(ONE, packed([number, 100]), float(number))
    assert len(index) == 10
    index.record(ONE, packed([0, 100]), 5.0)
    assert len(index) == 10
    index.record(ONE, packed([9]), 6.0)
    assert len(index) == 5
    assert [overlap(index, ONE, number, 100, now=6.0) for number in range(5)] == [2, 0, 0, 0, 2]
    assert overlap(index, ONE, 9, now=6.0) == 1


def test_deeper_ones_go_first_among_equals(predicted_class: type) -> None:
    index = predicted_class(max_blocks=10, prune_ratio=0.45)
    index.record(ONE, packed(range(1, 9)), 0.0)
    index.record(TWO, packed([1, 2, 3]), 0.0)
    assert len(index) == 4
    assert overlap(index, ONE, *range(1, 9), now=0.0) == 2
    assert overlap(index, TWO, 1, 2, 3, now=0.0) == 2


def test_a_request_over_the_bound_leaves_its_head(predicted_class: type) -> None:
    index = predicted_class(max_blocks=10, prune_ratio=0.8)
    index.record(ONE, packed(range(100)), 0.0)
    assert len(index) == 8
    assert overlap(index, ONE, *range(100), now=0.0) == 8


def test_expired_entries_do_not_crowd_out_live_ones(predicted_class: type) -> None:
    index = predicted_class(ttl_seconds=10.0, max_blocks=4, prune_ratio=0.5)
    index.record(ONE, packed([1, 2]), 0.0)
    index.record(ONE, packed([3, 4]), 5.0)
    index.record(ONE, packed([5, 6]), 12.0)
    assert overlap(index, ONE, 3, 4, now=12.0) == 2
    assert overlap(index, ONE, 5, 6, now=12.0) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"ttl_seconds": 0.0},
        {"ttl_seconds": -1.0},
        {"ttl_seconds": float("nan")},
        {"max_blocks": 0},
        {"prune_ratio": -0.1},
        {"prune_ratio": 1.1},
        {"prune_ratio": float("nan")},
    ],
    ids=str,
)
def test_options_have_ranges(predicted_class: type, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        predicted_class(**options)


def test_hashes_are_whole(predicted_class: type) -> None:
    index = predicted_class()
    with pytest.raises(ValueError):
        index.record(ONE, b"1234567", 0.0)
    with pytest.raises(ValueError):
        index.overlaps(b"1234567", 0.0)


_steps = st.lists(
    st.tuples(
        st.sampled_from(["record"] * 6 + ["remove", "expire", "forget"]),
        st.sampled_from([ONE, TWO, (2, 0)]),
        st.lists(st.integers(1, 3), min_size=1, max_size=6),
        st.integers(1, 3),
    ),
    max_size=30,
)


@given(_steps, st.integers(1, 12), st.sampled_from([0.0, 0.5, 0.8, 1.0]))
@settings(max_examples=100)
def test_random_use(predicted_class: type, steps: list[Any], max_blocks: int, prune_ratio: float) -> None:
    """Against a dict of (rank, tuple of local hashes) → time, pruned by the words of the interface."""
    ttl, now = 10.0, 0.0
    index = predicted_class(ttl_seconds=ttl, max_blocks=max_blocks, prune_ratio=prune_ratio)
    used: dict[tuple[tuple[int, int], tuple[int, ...]], float] = {}
    for kind, rank, local, pause in steps:
        now += pause
        live = {key: at for key, at in used.items() if now - at < ttl}
        if kind == "record":
            index.record(rank, packed(local), now)
            live.update({(rank, tuple(local[: n + 1])): now for n in range(len(local))})
            if len(live) > max_blocks:
                newest = sorted(live, key=lambda key: (-live[key], len(key[1])))
                live = {key: live[key] for key in newest[: int(prune_ratio * max_blocks)]}
            assert len(index) == len(live)
        elif kind == "remove":
            index.expire(now)
            assert index.remove_rank(rank) == sum(1 for key in live if key[0] == rank)
            live = {key: at for key, at in live.items() if key[0] != rank}
        elif kind == "forget":
            until = live.get((rank, tuple(local)))
            assert index.last_use(rank, packed(local), now) == until
            if until is not None:
                gone = {key for key, at in live.items() if key[0] == rank and at <= until}
                index.expire(now)
                assert index.forget_until(rank, until) == len(gone)
                live = {key: at for key, at in live.items() if key not in gone}
        else:
            index.expire(now)
            assert len(index) == len(live)
        used = live
        expected = {}
        for one in (ONE, TWO, (2, 0)):
            overlap = next((n for n in range(len(local)) if (one, tuple(local[: n + 1])) not in live), len(local))
            if overlap:
                expected[one] = overlap
        assert index.overlaps(packed(local), now) == expected
