"""Random use of the approximate mode's index: the native one answers every call as the reference does."""

from __future__ import annotations

import math

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kvrouter.core import reference

from ..conftest import implementation
from .chains import packed

RANKS = st.sampled_from([(1, 0), (1, 1), (2, 0), (2**64 - 1, 2**32 - 1)])
PROMPTS = st.one_of(
    st.lists(st.integers(1, 3), max_size=6),
    st.builds(lambda length: list(range(1, length + 1)), st.integers(0, 40)),
)
TIMES = st.one_of(st.just(0.0), st.floats(0.0, 8.0), st.sampled_from([-3.0, -math.inf, math.nan]))
"""Seconds since the last call: none, often; backwards, sometimes; and what is no time at all."""


class Histories(RuleBasedStateMachine):
    """Every call goes to both; answers are equal, and so are sizes after each."""

    @initialize(
        ttl=st.sampled_from([10.0, 1e-9, float("inf")]),
        max_blocks=st.integers(1, 60),
        ratio=st.sampled_from([0.0, 0.29, 0.5, 0.8, 1.0]),
    )
    def make(self, ttl: float, max_blocks: int, ratio: float) -> None:
        self.native = implementation("native", "PredictedIndex").PredictedIndex(ttl, max_blocks, ratio)
        self.reference = reference.PredictedIndex(ttl, max_blocks, ratio)
        self.now = 100.0

    def later(self, seconds: float) -> float:
        if math.isfinite(seconds):
            self.now += seconds
            return self.now
        return seconds

    @rule(rank=RANKS, prompt=PROMPTS, seconds=TIMES)
    def record(self, rank: tuple[int, int], prompt: list[int], seconds: float) -> None:
        now = self.later(seconds)
        self.native.record(rank, packed(prompt), now)
        self.reference.record(rank, packed(prompt), now)

    @rule(prompt=PROMPTS, seconds=TIMES)
    def overlaps(self, prompt: list[int], seconds: float) -> None:
        now = self.later(seconds)
        assert self.native.overlaps(packed(prompt), now) == self.reference.overlaps(packed(prompt), now)

    @rule(rank=RANKS, prompt=PROMPTS, seconds=TIMES, forgets=st.booleans())
    def last_use(self, rank: tuple[int, int], prompt: list[int], seconds: float, forgets: bool) -> None:
        now = self.later(seconds)
        at = self.native.last_use(rank, packed(prompt), now)
        assert at == self.reference.last_use(rank, packed(prompt), now)
        if at is not None and forgets:
            assert self.native.forget_until(rank, at) == self.reference.forget_until(rank, at)

    @rule(rank=RANKS, blocks=st.integers(0, 12))
    def keep_newest(self, rank: tuple[int, int], blocks: int) -> None:
        assert self.native.keep_newest(rank, blocks) == self.reference.keep_newest(rank, blocks)
        assert self.native.blocks_of(rank) == self.reference.blocks_of(rank)

    @rule(rank=RANKS)
    def remove_rank(self, rank: tuple[int, int]) -> None:
        assert self.native.remove_rank(rank) == self.reference.remove_rank(rank)

    @rule(seconds=TIMES)
    def expire(self, seconds: float) -> None:
        now = self.later(seconds)
        assert self.native.expire(now) == self.reference.expire(now)

    @invariant()
    def equal_sizes(self) -> None:
        if hasattr(self, "native"):
            assert len(self.native) == len(self.reference)

    def teardown(self) -> None:
        if hasattr(self, "native"):
            assert self.native.expire(math.inf) == self.reference.expire(math.inf)
            assert len(self.native) == 0


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=30)
