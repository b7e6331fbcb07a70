"""Load of requests in flight, for every implementation."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from kvrouter.core.interface import Rank
from kvrouter.core.interface.load import MEAN_BOOKINGS, MEAN_STEP
from kvrouter.core.reference.hashing import chain

from ..batches import BookingRequest, load_rows, packed

BLOCK = 16
ONE, TWO, THREE = (1, 0), (1, 1), (2, 0)


def booking(
    name: str,
    hashes: list[int],
    tokens: int | None = None,
    *,
    rank: Rank = ONE,
    prefill: int | None = None,
    attempt: int = 0,
    stage: int = 1,
    track: bool = True,
    unique: bool = False,
) -> BookingRequest:
    tokens = BLOCK * len(hashes) if tokens is None else tokens
    return BookingRequest(
        (name, attempt, stage), rank, packed(hashes), tokens, tokens if prefill is None else prefill, track, unique
    )


def with_ranks(sequences_class: type, *ranks: Rank, **options: int) -> Any:
    sequences = sequences_class(BLOCK, **options)
    for rank in ranks or (ONE,):
        sequences.add_rank(rank)
    return sequences


def load(sequences: Any, rank: Rank = ONE) -> tuple[int, int, int]:
    """(active blocks, prefill tokens, requests)"""
    rows = load_rows(sequences.loads())
    return next((blocks, tokens, requests) for each, blocks, tokens, requests, _ in rows if each == rank)


def test_ranks_begin_without_load_and_come_in_order(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class, THREE, TWO, ONE)
    sequences.add_rank(ONE)
    rows = load_rows(sequences.loads(packed([1, 2]), 40))
    assert rows == [(ONE, 3, 0, 0, 0), (TWO, 3, 0, 0, 0), (THREE, 3, 0, 0, 0)]


def test_a_booking_counts_until_it_is_freed(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class)
    one = booking("a", [1, 2], 40, prefill=24)
    assert sequences.book(*one)
    assert load(sequences) == (3, 24, 1)
    assert (len(sequences), sequences.rank(one.key)) == (1, ONE)
    assert sequences.prefill_complete(one.key)
    assert load(sequences) == (3, 0, 1)
    assert sequences.free(one.key)
    assert load(sequences) == (0, 0, 0)
    assert (len(sequences), sequences.rank(one.key)) == (0, None)


def test_shared_blocks_count_once_on_a_rank(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class, ONE, TWO)
    sequences.book(*booking("a", [1, 2, 3]))
    sequences.book(*booking("b", [1, 2, 9]))
    sequences.book(*booking("c", [1, 2, 9], rank=TWO))
    assert (load(sequences)[0], load(sequences, TWO)[0]) == (4, 3)
    sequences.free(("a", 0, 1))
    assert load(sequences)[0] == 3
    sequences.free(("b", 0, 1))
    assert (load(sequences)[0], load(sequences, TWO)[0]) == (0, 3)


def test_a_partial_tail_is_private(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class)
    sequences.book(*booking("a", [1], 17))
    sequences.book(*booking("b", [1], 17))
    assert load(sequences)[0] == 3


def test_output_fills_blocks(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class)
    sequences.book(*booking("a", [1, 2]))
    key = ("a", 0, 1)
    grown = []
    for tokens in (0, 1, 16, 17, 5):
        assert sequences.output_tokens(key, tokens)
        grown.append(load(sequences)[0])
    assert grown == [2, 3, 3, 4, 4]
    assert not sequences.output_tokens(("other", 0, 1), 5)


def test_untracked_bookings_have_no_blocks(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class)
    sequences.book(*booking("a", [1, 2], 40, track=False))
    sequences.output_tokens(("a", 0, 1), 100)
    assert load(sequences) == (0, 40, 1)
    assert load_rows(sequences.loads(packed([1]), 16)) == [(ONE, 1, 40, 1, 0)]


def test_unique_blocks_are_shared_with_no_one(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class)
    sequences.book(*booking("a", [1, 2]))
    sequences.book(*booking("b", [1, 2], 40, unique=True))
    assert load(sequences)[0] == 5
    sequences.free(("a", 0, 1))
    assert load(sequences)[0] == 3
    assert load_rows(sequences.loads(packed([1, 2]), 32)) == [(ONE, 5, 40, 1, 0)]


def test_a_prompt_is_added_to_each_rank(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class, ONE, TWO)
    sequences.book(*booking("a", [1, 2, 3], 48, prefill=7))
    assert load_rows(sequences.loads(packed([1, 2, 9, 8]), 70)) == [(ONE, 3 + 2 + 1, 7, 1, 2), (TWO, 4 + 1, 0, 0, 0)]
    assert load(sequences)[0] == 3, "asking books nothing"


def test_blocks_that_a_prompt_repeats_count_once(sequences_class: type) -> None:
    """Local hashes can be made up so that sequence hashes repeat."""
    sequences = with_ranks(sequences_class)
    assert sequences.book(*booking("a", [1, 2, 1, 2]))
    assert load(sequences)[0] == 2
    assert sequences.free(("a", 0, 1))
    assert load(sequences) == (0, 0, 0)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([ONE, TWO]), st.lists(st.integers(1, 12), max_size=14)),
        max_size=40,
    ),
    st.randoms(use_true_random=False),
)
@settings(max_examples=200)
def test_nothing_is_left_of_prompts_with_hashes_that_are_not_chained(
    sequences_class: type, calls: list[tuple[int, Rank, list[int]]], rng: random.Random
) -> None:
    sequences = with_ranks(sequences_class, ONE, TWO)
    live: dict[int, BookingRequest] = {}
    for number, (place, rank, hashes) in enumerate(calls):
        if place in live:
            assert sequences.free(live.pop(place).key)
        else:
            live[place] = booking("a", hashes, rank=rank, attempt=number)
            assert sequences.book(*live[place]) is not None
        prompt = rng.choices(range(1, 13), k=len(hashes))
        for _, active, _, _, leading in load_rows(sequences.loads(packed(prompt), BLOCK * len(prompt))):
            assert active >= 0
            assert 0 <= leading <= len(prompt)
    for place in rng.sample(sorted(live), len(live)):
        assert sequences.free(live[place].key)
    assert load_rows(sequences.loads()) == [(ONE, 0, 0, 0, 0), (TWO, 0, 0, 0, 0)]


def test_keys_are_requests_attempts_and_stages(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class)
    assert sequences.book(*booking("a", [1]))
    assert sequences.book(*booking("a", [1], attempt=1))
    assert sequences.book(*booking("a", [1], stage=2))
    assert not sequences.book(*booking("a", [5, 6]))
    assert (len(sequences), load(sequences)[0]) == (3, 1)
    assert sequences.rank(("a", 0, 1)) == ONE


def test_states_merge_by_maximum(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class)
    key = ("a", 0, 1)
    assert not sequences.prefill_complete(key)
    assert not sequences.output_tokens(key, 100)
    assert sequences.book(*booking("a", [1]))
    assert load(sequences) == (1, 16, 1), "only frees are remembered"
    assert sequences.free(key)
    assert not sequences.free(key)
    assert not sequences.book(*booking("a", [1]))
    assert not sequences.prefill_complete(key)
    assert not sequences.output_tokens(key, 5)
    assert load(sequences) == (0, 0, 0)


def test_a_free_may_come_before_its_booking(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class)
    assert not sequences.free(("a", 0, 1))
    assert not sequences.book(*booking("a", [1]))
    assert sequences.book(*booking("a", [1], attempt=1))


def test_tombstones_are_bounded(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class, tombstones=2)
    for name in "abc":
        sequences.free((name, 0, 1))
    assert sequences.book(*booking("a", [1]))
    assert not sequences.book(*booking("b", [1]))
    sequences.free(("b", 0, 1))
    sequences.free(("d", 0, 1))
    assert not sequences.book(*booking("b", [1])), "freed again, it is newer than c"
    assert sequences.book(*booking("c", [1]))


def test_without_tombstones_nothing_is_remembered(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class, tombstones=0)
    assert sequences.book(*booking("a", [1]))
    assert sequences.free(("a", 0, 1))
    assert sequences.book(*booking("a", [1]))


def test_bookings_are_bounded(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class, max_bookings=2)
    sequences.book(*booking("a", [1]))
    sequences.book(*booking("b", [2]))
    with pytest.raises(OverflowError):
        sequences.book(*booking("c", [3]))
    assert not sequences.book(*booking("a", [1])), "a retry is no booking"
    assert load(sequences) == (2, 32, 2)
    sequences.free(("a", 0, 1))
    assert sequences.book(*booking("c", [3]))


def test_unknown_ranks_cannot_be_booked(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class)
    with pytest.raises(KeyError):
        sequences.book(*booking("a", [1], rank=TWO))
    assert len(sequences) == 0
    assert sequences.book(*booking("a", [1]))


def test_a_rank_that_goes_frees_its_bookings(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class, ONE, TWO)
    sequences.book(*booking("b", [1]))
    sequences.book(*booking("c", [1], rank=TWO))
    sequences.book(*booking("a", [2]))
    assert list(sequences.remove_rank(ONE)) == [("b", 0, 1), ("a", 0, 1)]
    assert list(sequences.remove_rank(ONE)) == []
    assert sequences.loads()[0] == (TWO,)
    assert len(sequences) == 1
    assert not sequences.book(*booking("a", [2])), "freed, though its rank is unknown"
    sequences.add_rank(ONE)
    assert load(sequences) == (0, 0, 0)
    assert not sequences.book(*booking("a", [2]))


@pytest.mark.parametrize(
    "bad",
    [
        BookingRequest(("a", 0, 1), ONE, b"1234567", 16, 16),
        BookingRequest(("a", 0, 1), ONE, b"", -1, 0),
        BookingRequest(("a", 0, 1), ONE, b"", 0, -1),
    ],
    ids=["hashes", "prompt", "prefill"],
)
def test_bookings_make_sense(sequences_class: type, bad: BookingRequest) -> None:
    sequences = with_ranks(sequences_class)
    with pytest.raises((ValueError, OverflowError)):
        sequences.book(*bad)
    assert len(sequences) == 0


def test_prompts_are_whole_hashes(sequences_class: type) -> None:
    with pytest.raises(ValueError):
        with_ranks(sequences_class).loads(b"1234567")


@pytest.mark.parametrize("block_size", [0, -1])
def test_blocks_hold_tokens(sequences_class: type, block_size: int) -> None:
    with pytest.raises((ValueError, OverflowError)):
        sequences_class(block_size)


@dataclass
class Model:
    """Bookings and what became of them; loads are computed from scratch."""

    ranks: set[Rank] = field(default_factory=set)
    live: dict[tuple[str, int, int], list[Any]] = field(default_factory=dict)
    """key → [booking, hashes, whether prefilled, output tokens]"""
    freed: set[tuple[str, int, int]] = field(default_factory=set)

    def loads(self, prompt: list[int], tokens: int) -> list[tuple[Rank, int, int, int, int]]:
        rows = []
        for rank in sorted(self.ranks):
            mine = [entry for entry in self.live.values() if entry[0].rank == rank]
            tracked = [entry for entry in mine if entry[0].track_blocks]
            shared = {one for entry in tracked if not entry[0].unique_blocks for one in entry[1]}
            private = tokens // BLOCK * BLOCK < tokens
            for entry in tracked:
                total = -(-(entry[0].prompt_tokens + entry[3]) // BLOCK)
                private += total - (0 if entry[0].unique_blocks else entry[0].prompt_tokens // BLOCK)
            leading = 0
            while leading < len(prompt) and prompt[leading] in shared:
                leading += 1
            prefill = sum(entry[0].prefill_tokens for entry in mine if not entry[2])
            rows.append((rank, len(shared) + len(prompt) - leading + private, prefill, len(mine), leading))
        return rows


_calls = st.lists(
    st.tuples(
        st.sampled_from(["book"] * 6 + ["prefilled", "output", "free", "free", "add", "remove"]),
        st.sampled_from("abcd"),
        st.integers(0, 1),
        st.sampled_from([ONE, TWO, THREE]),
        st.lists(st.integers(1, 6), max_size=4),
        st.integers(0, 40),
        st.sampled_from([(True, False)] * 4 + [(False, False), (True, True), (False, True)]),
    ),
    max_size=40,
)


@given(_calls)
@settings(max_examples=100)
def test_loads_equal_what_a_count_from_scratch_says(sequences_class: type, calls: list[Any]) -> None:
    sequences, model = sequences_class(BLOCK), Model()
    for rank in (ONE, TWO):
        sequences.add_rank(rank)
        model.ranks.add(rank)
    for kind, name, attempt, rank, blocks, tokens, (track, unique) in calls:
        hashes = list(chain(None, blocks))
        key = (name, attempt, 1)
        entry = model.live.get(key)
        if kind == "book":
            prompt_tokens = BLOCK * len(hashes) + tokens % BLOCK
            one = BookingRequest(key, rank, packed(hashes), prompt_tokens, tokens, track, unique)
            if entry is not None or key in model.freed:
                assert not sequences.book(*one)
            elif rank not in model.ranks:
                with pytest.raises(KeyError):
                    sequences.book(*one)
            else:
                assert sequences.book(*one) is not None
                model.live[key] = [one, hashes, False, 0]
        elif kind == "prefilled":
            assert sequences.prefill_complete(key) == (entry is not None)
            if entry is not None:
                entry[2] = True
        elif kind == "output":
            assert sequences.output_tokens(key, tokens) == (entry is not None)
            if entry is not None:
                entry[3] = max(entry[3], tokens)
        elif kind == "free":
            assert sequences.free(key) == (None if entry is None else entry[0].rank)
            model.live.pop(key, None)
            model.freed.add(key)
        elif kind == "add":
            sequences.add_rank(rank)
            model.ranks.add(rank)
        else:
            gone = [key for key, entry in model.live.items() if entry[0].rank == rank]
            assert list(sequences.remove_rank(rank)) == gone
            model.ranks.discard(rank)
            model.freed.update(gone)
            model.live = {key: entry for key, entry in model.live.items() if key not in gone}
        assert len(sequences) == len(model.live)
        prompt = list(chain(None, blocks[::-1]))
        for hashes_asked, tokens_asked in (([], 0), (prompt, BLOCK * len(prompt) + tokens % BLOCK)):
            assert load_rows(sequences.loads(packed(hashes_asked), tokens_asked)) == model.loads(
                hashes_asked, tokens_asked
            )


@given(st.integers(0, 1 << 32), st.integers(1, 4))
@settings(max_examples=100)
def test_the_order_in_which_news_arrives_does_not_matter(sequences_class: type, seed: int, copies: int) -> None:
    """Replicas that hear of bookings and frees in different orders, some twice, come to the same loads."""
    rng = random.Random(seed)
    bookings = [booking(name, [1, ord(name)], rank=rng.choice([ONE, TWO])) for name in "abcdef"]
    freed = [one.key for one in bookings if rng.random() < 0.5]
    news = [("book", one) for one in bookings] + [("free", (key,)) for key in freed]
    loads = []
    for _ in range(2):
        sequences = with_ranks(sequences_class, ONE, TWO)
        order = news * copies
        rng.shuffle(order)
        for kind, what in order:
            getattr(sequences, kind)(*what)
        loads.append(load_rows(sequences.loads()))
        assert len(sequences) == len(bookings) - len(freed)
    assert loads[0] == loads[1]


def ended(sequences: Any, seconds: float, count: int, now: float = 0.0) -> float:
    """Books and frees so many requests, one after the other, and returns when the last one has ended."""
    for _ in range(count):
        sequences.book(*booking("a", [1]), now=now)
        now += seconds
        sequences.free(("a", 0, 1), now)
    return now


def test_the_mean_time_in_flight_is_known_after_some_requests(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class, tombstones=0)
    now = ended(sequences, 0.5, MEAN_STEP - 1)
    assert sequences.seconds_in_flight == math.inf
    ended(sequences, 0.5, 1, now + 1.0)
    assert sequences.seconds_in_flight == 0.5


def test_requests_at_the_same_time_count_each(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class, ONE, TWO)
    for number in range(MEAN_STEP):
        sequences.book(*booking(str(number), [1]), now=1.0)
    for number in range(MEAN_STEP):
        sequences.free((str(number), 0, 1), 4.0)
    assert sequences.seconds_in_flight == 3.0


def test_the_mean_time_in_flight_follows_a_change(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class, tombstones=0)
    ended(sequences, 1.0, 4 * MEAN_BOOKINGS, ended(sequences, 0.1, 4 * MEAN_BOOKINGS))
    assert 0.9 < sequences.seconds_in_flight <= 1.0


def test_the_most_sequences_are_those_since_the_call_before_the_last(sequences_class: type) -> None:
    sequences = with_ranks(sequences_class)
    for name in "abcde":
        sequences.book(*booking(name, [1]))
    for name in "abc":
        sequences.free((name, 0, 1))
    assert [sequences.most_sequences(ONE) for _ in range(3)] == [5, 5, 2]
    sequences.remove_rank(ONE)
    assert sequences.most_sequences(ONE) == 0
