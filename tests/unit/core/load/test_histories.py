"""Random histories of bookings: the native active sequences answer every call as the reference does."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kvrouter.core import reference
from kvrouter.core.reference.hashing import chain

from ..batches import load_rows, packed
from ..conftest import implementation

RANKS = st.sampled_from([(1, 0), (1, 1), (2, 0), (2**64 - 1, 2**32 - 1)])
KEYS = st.tuples(st.sampled_from(["", "a", "b", "é" * 40]), st.integers(0, 2), st.integers(0, 1))
SECONDS = st.floats(0, 100)
TOKENS = st.one_of(st.integers(0, 100), st.integers(0, 2**64 - 1))

_LONG = list(range(1000, 1040))
PROMPTS = st.one_of(
    st.lists(st.integers(1, 6), max_size=5),
    st.builds(lambda length: _LONG[:length], st.integers(0, 40)),
    st.builds(lambda length, tail: _LONG[:length] + tail, st.integers(0, 40), st.lists(st.integers(1, 6), max_size=3)),
    st.builds(lambda start, step: _LONG[start::step], st.integers(0, 39), st.sampled_from([-2, -1, 1, 2, 7])),
).map(lambda blocks: list(chain(None, blocks)))
"""Few stems that are left at any depth, so that groups of blocks are cut again and again."""


class Histories(RuleBasedStateMachine):
    """Every call goes to both; answers and errors are equal, and so are the loads after each."""

    @initialize(
        block_size=st.sampled_from([1, 16, 2**64 - 1]), max_bookings=st.integers(0, 8), tombstones=st.integers(0, 4)
    )
    def make(self, block_size: int, max_bookings: int, tombstones: int) -> None:
        native = implementation("native", "ActiveSequences").ActiveSequences
        self.both = [one(block_size, max_bookings, tombstones) for one in (native, reference.ActiveSequences)]
        for rank in ((1, 0), (1, 1)):
            self.ask("add_rank", rank)

    def ask(self, name: str, *arguments: Any) -> Any:
        native, expected = (_answer(getattr(one, name), *arguments) for one in self.both)
        assert native == expected, (name, arguments)
        return native

    @rule(
        key=KEYS,
        rank=RANKS,
        prompt=PROMPTS,
        tokens=TOKENS,
        prefill=TOKENS,
        track=st.booleans(),
        unique=st.booleans(),
        sequences=st.integers(1, 1024),
        now=SECONDS,
    )
    def book(
        self,
        key: tuple[str, int, int],
        rank: tuple[int, int],
        prompt: list[int],
        tokens: int,
        prefill: int,
        track: bool,
        unique: bool,
        sequences: int,
        now: float,
    ) -> None:
        self.ask("book", key, rank, packed(prompt), tokens, prefill, track, unique, sequences, now)

    @rule(key=KEYS, rank=RANKS, prompt=PROMPTS)
    def book_as_most_do(self, key: tuple[str, int, int], rank: tuple[int, int], prompt: list[int]) -> None:
        self.ask("book", key, rank, packed(prompt), 16 * len(prompt) + 3, 16 * len(prompt))

    @rule(key=KEYS, tokens=st.one_of(TOKENS, st.integers(-5, 0)))
    def output_tokens(self, key: tuple[str, int, int], tokens: int) -> None:
        self.ask("output_tokens", key, tokens)

    @rule(key=KEYS, now=SECONDS)
    def prefill_complete(self, key: tuple[str, int, int], now: float) -> None:
        self.ask("prefill_complete", key, now)

    @rule(key=KEYS, now=SECONDS)
    def free(self, key: tuple[str, int, int], now: float) -> None:
        self.ask("free", key, now)

    @rule(key=KEYS)
    def rank(self, key: tuple[str, int, int]) -> None:
        self.ask("rank", key)

    @rule(rank=RANKS)
    def sequences(self, rank: tuple[int, int]) -> None:
        self.ask("sequences", rank)

    @rule(rank=RANKS)
    def most_sequences(self, rank: tuple[int, int]) -> None:
        self.ask("most_sequences", rank)

    @rule(rank=RANKS)
    def add_rank(self, rank: tuple[int, int]) -> None:
        self.ask("add_rank", rank)

    @rule(rank=RANKS)
    def remove_rank(self, rank: tuple[int, int]) -> None:
        self.ask("remove_rank", rank)

    @rule(prompt=PROMPTS, tokens=TOKENS)
    def loads(self, prompt: list[int], tokens: int) -> None:
        self.ask("loads", packed(prompt), tokens)

    @rule(length=st.integers(1, 7))
    def broken_bytes(self, length: int) -> None:
        self.ask("loads", b"x" * length)
        self.ask("book", ("broken", 0, 0), (1, 0), b"x" * length, 0, 0)

    @rule(tokens=st.integers(-(2**70), -1))
    def negative_tokens(self, tokens: int) -> None:
        self.ask("book", ("negative", 0, 0), (1, 0), b"", tokens, 0)
        self.ask("book", ("negative", 0, 0), (1, 0), b"", 0, tokens)

    @invariant()
    def equal_loads(self) -> None:
        self.ask("loads")
        self.ask("__len__")
        native, expected = (one.seconds_in_flight for one in self.both)
        assert native == expected

    def teardown(self) -> None:
        if not hasattr(self, "both"):
            return
        for rank in self.ask("loads")[0]:
            self.ask("remove_rank", rank)
        assert self.ask("__len__") == 0
        self.ask("add_rank", (1, 0))
        assert load_rows(self.ask("loads")) == [((1, 0), 0, 0, 0, 0)]


def _answer(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except (KeyError, OverflowError, ValueError) as error:
        return type(error)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40)


def test_threads_read_what_is_booked() -> None:
    """Long prompts are looked up without the GIL, so that readings overtake each other; none mixes up two."""
    sequences = implementation("native", "ActiveSequences").ActiveSequences(16)
    for worker in range(20):
        sequences.add_rank((worker, 0))
    prompt = packed(range(1, 5001))

    def use(worker: int) -> None:
        for number in range(60):
            key = (f"{worker} {number}", 0, 1)
            assert sequences.book(key, (worker, 0), prompt, 80_000, number) is not None
            assert ((worker, 0), 5000, number, 1, 5000) in load_rows(sequences.loads(prompt, 80_000))
            if number % 10 == 0:
                sequences.remove_rank((worker, 0))
                sequences.add_rank((worker, 0))
            else:
                assert sequences.free(key)
            assert ((worker, 0), 0, 0, 0, 0) in load_rows(sequences.loads())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    assert len(sequences) == 0


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(1, 200))
def test_many_ranks_that_leave_a_prompt_at_many_depths(seed: int, ranks: int) -> None:
    """Sets of many ranks are kept and compared in another way than those of few."""
    rng = random.Random(seed)
    native = implementation("native", "ActiveSequences").ActiveSequences(16)
    both = (native, reference.ActiveSequences(16))
    for worker in range(ranks):
        for one in both:
            one.add_rank((worker, 0))
    live = []
    for number in range(3 * ranks):
        start, end = sorted(rng.choices(range(41), k=2)) if rng.random() < 0.2 else (0, rng.randrange(41))
        blocks = [*_LONG[start:end], *([rng.randrange(1, 100)] if rng.random() < 0.5 else [])]
        hashes = list(chain(None, blocks))
        live.append((str(number), 0, 1))
        rank = rng.randrange(ranks), 0
        for one in both:
            one.book(live[-1], rank, packed(hashes), 16 * len(hashes), 0)
        if rng.random() < 0.3:
            key = live.pop(rng.randrange(len(live)))
            for one in both:
                one.free(key)
    rng.shuffle(live)
    for asked in (_LONG, _LONG[10:], [*_LONG[:5], 7, *_LONG[5:]], _LONG[::-1]):
        prompt = packed(list(chain(None, asked)))
        assert both[0].loads(prompt, 16 * len(asked)) == both[1].loads(prompt, 16 * len(asked))
    for number, key in enumerate(live):
        for one in both:
            assert one.free(key)
        if number % 50 == 0:
            prompt = packed(list(chain(None, _LONG)))
            assert both[0].loads(prompt, 640) == both[1].loads(prompt, 640)
    assert {active_blocks for _, active_blocks, *_ in load_rows(both[0].loads())} == {0}
