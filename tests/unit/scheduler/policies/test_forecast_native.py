"""The native core computes the cost terms of mode forecast as the policy does."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from kvrouter.scheduler.policies.forecast import policy
from kvrouter.scheduler.policies.interface import SchedulingContext
from kvrouter.scheduler.policies.loads import Loads
from msgspec.structs import replace

from ..context_maker import context

pytestmark = pytest.mark.skipif(policy.NATIVE is None, reason="the native core is not built")


@st.composite
def contexts(draw: st.DrawFn) -> SchedulingContext:
    count = draw(st.integers(1, 5))

    def column(*values: Any) -> list[Any]:
        return draw(st.lists(st.one_of(*values), min_size=count, max_size=count))

    heads = column(st.just(0), st.integers(1, 50_000))
    waiting = [max(1, more) if head else more for head, more in zip(heads, column(st.integers(0, 9)), strict=True)]
    ahead = [head + more for head, more in zip(heads, column(st.just(0), st.integers(0, 200_000)), strict=True)]
    seconds = [spent if head else 0.0 for head, spent in zip(heads, column(st.floats(0, 10)), strict=True)]
    return context(
        count,
        prompt_tokens=draw(st.integers(1, 100_000)),
        block_size=draw(st.sampled_from([1, 16, 64])),
        overlap_blocks=column(st.integers(0, 7000)),
        leading_active_blocks=column(st.integers(0, 7000)),
        active_blocks=column(st.integers(0, 20_000)),
        queued_blocks=column(st.just(0), st.integers(0, 20_000)),
        active_requests=column(st.integers(0, 300)),
        is_kept=column(st.just(False), st.booleans()),
        free_slots=column(st.just(math.inf), st.floats(-3, 3).map(round)),
        total_blocks=column(st.just(0), st.integers(1, 20_000)),
        max_batched_tokens=column(st.just(0), st.sampled_from([512, 8192]), st.integers(1, 100_000)),
        prefill_tokens=ahead,
        prefill_requests=waiting,
        head_prefill_tokens=heads,
        head_prefill_seconds=seconds,
        relative_latency=column(st.just(1.0), st.floats(0.1, 10)),
        reuse_chance=column(st.just(0.0), st.floats(0, 1)),
        latency_calibration=draw(st.floats(0.01, 100)),
    )


@settings(max_examples=500, deadline=None)
@given(contexts(), st.integers())
def test_native_costs_are_those_of_the_policy(given_context: SchedulingContext, seed: int) -> None:
    limits = given_context.request_limits
    place, open_ranks, *chosen, costs = policy.choose(given_context, limits, Random(seed))
    expected_place, expected_open_ranks, *expected_chosen, expected_costs = policy.choose_here(
        given_context, limits, Random(seed)
    )
    expected = np.frombuffer(expected_costs)
    np.testing.assert_allclose(np.frombuffer(costs), expected, rtol=1e-9, atol=1e-6)
    terms = policy.Weighing(given_context, np.frombuffer(costs)).terms()
    shown = sum(column for name, column in terms.items() if name.endswith("_ms"))
    np.testing.assert_allclose(shown, np.frombuffer(costs), rtol=1e-9, atol=1e-6)
    assert open_ranks == expected_open_ranks
    # Equal costs may differ in their last bits.
    lowest = expected[[place, expected_place]]
    np.testing.assert_allclose(lowest, lowest.min(), rtol=1e-9, atol=1e-6)
    if place == expected_place:
        assert [type(each) for each in chosen] == [type(each) for each in expected_chosen]
        assert chosen == pytest.approx(expected_chosen, rel=1e-9, abs=1e-6)


class Drawn(Random):
    """Keeps what was drawn from, and draws the last."""

    def choice(self, seq: Any) -> Any:
        self.among = list(seq)
        return seq[-1]


def test_all_candidates_of_the_lowest_cost_with_a_free_slot_are_the_cheapest() -> None:
    slots = np.array([0.0, 1.0, 2.0, math.inf])
    alike = context(4)
    dearer = replace(alike, overlap_blocks=np.array([9, 0, 2, 2]))
    for given_context, limits, open_ranks, cheapest in (
        (alike, slots, 3, [1, 2, 3]),
        (alike, slots[:1].repeat(4), 0, [0, 1, 2, 3]),
        (dearer, slots, 3, [2, 3]),
    ):
        for choose in (policy.choose, policy.choose_here):
            rng = Drawn()
            assert choose(given_context, limits, rng)[:2] == (3, open_ranks)
            assert rng.among == cheapest


@settings(max_examples=200, deadline=None)
@given(contexts(), st.integers())
def test_the_choice_is_the_same(given_context: SchedulingContext, seed: int) -> None:
    rule = policy.ForecastPolicy()
    natively = rule.decide(given_context, Random(seed))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(policy, "NATIVE", None)
        computed = rule.decide(given_context, Random(seed))
    is_open = (given_context.free_slots >= 1) & ~given_context.is_kept
    costs = np.where(is_open | ~is_open.any(), computed.explanation.costs, np.inf)
    assert costs[natively.index] == pytest.approx(costs.min(), rel=1e-9, abs=1e-6)
    if np.isclose(costs, costs.min()).sum() == 1:
        assert (type(natively), natively.index, natively.prefill_tokens) == (
            type(computed),
            computed.index,
            computed.prefill_tokens,
        )
        assert natively.explanation.formula(natively.index) == computed.explanation.formula(computed.index)


def test_columns_of_other_lengths_are_refused() -> None:
    given_context, limits, rng = context(2), np.ones(2), Random(1)
    with pytest.raises(ValueError, match="columns of 2 entries"):
        policy.choose(replace(given_context, overlap_blocks=np.zeros(3, np.int64)), limits, rng)
    with pytest.raises(ValueError, match="columns of 2 entries"):
        policy.choose(given_context, np.ones(3), rng)
    with pytest.raises(ValueError, match="7 packed columns"):
        policy.choose(replace(given_context, loads=Loads(bytes(8 * 15), 0.0)), limits, rng)
    with pytest.raises(ValueError, match="1 token or more"):
        policy.choose(replace(given_context, prompt_tokens=0), limits, rng)
