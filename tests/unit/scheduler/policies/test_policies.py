"""What each policy chooses, and how it says why."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given, strategies as st
from kvrouter.scheduler.policies.cache_aware import softmax_weights
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.policies.interface import Choice, rank_label

from ..context_maker import context

LOADS = st.lists(
    st.tuples(st.integers(0, 100_000), st.integers(0, 100_000), st.integers(0, 5_000)), min_size=1, max_size=20
)


def test_every_mode_is_there() -> None:
    assert list(POLICIES) == [
        "direct",
        "forecast",
        "kv",
        "power-of-two",
        "product",
        "random",
        "round-robin",
        "sticky",
    ]
    assert {name for name, policy in POLICIES.items() if policy.uses_overlap} == {"forecast", "kv", "product", "sticky"}
    assert {name for name, policy in POLICIES.items() if policy.needs_worker} == {"direct"}


@given(LOADS, st.sampled_from([0.0, 0.25, 1.0, 3.0, 64.0]), st.sampled_from([1, 16, 512]))
def test_kv_takes_the_lowest_exact_cost(loads: list[tuple[int, int, int]], weight: float, block_size: int) -> None:
    given_context = context(
        len(loads),
        block_size=block_size,
        overlap_score_weight=weight,
        prefill_tokens=[booked for booked, _, _ in loads],
        new_prefill_tokens=[new for _, new, _ in loads],
        active_blocks=[active for _, _, active in loads],
    )
    choice = POLICIES["kv"].decide(given_context, Random(1))
    # Block sizes are powers of two and loads far below 2^53, so that floats are exact and so is this.
    exact = [Fraction(weight) * Fraction(booked + new, block_size) + active for booked, new, active in loads]
    assert exact[choice.index] == min(exact)
    assert [Fraction(cost) for cost in choice.explanation.costs] == exact


def test_kv_weighs_the_example_of_the_guide() -> None:
    guide = context(3, block_size=1, new_prefill_tokens=[8, 5, 2], active_blocks=[10, 5, 9])
    choice = POLICIES["kv"].decide(guide, Random(1))
    assert list(choice.explanation.costs) == [18, 10, 11]
    assert guide.ranks[choice.index] == (2, 0)


def test_kv_explains_as_the_guide_shows() -> None:
    given_context = context(
        2,
        block_size=2,
        new_prefill_tokens=[201, 0],
        active_blocks=[25, 0],
        overlap_blocks=[15, 0],
        ranks=[(1, 0), (7, 2)],
    )
    explanation = POLICIES["kv"].decide(given_context, Random(1)).explanation
    assert explanation.formula(0) == "Formula for worker_1: 125.5 = 1.0 * 100.5 + 25.0 (cached_blocks: 15)"
    assert explanation.formula(1) == "Formula for worker_7_dp2: 0.0 = 1.0 * 0.0 + 0.0 (cached_blocks: 0)"
    assert {name: list(column) for name, column in explanation.terms.items()} == {
        "prefill_blocks": [100.5, 0.0],
        "decode_blocks": [25, 0],
    }


@pytest.mark.parametrize("mode", ["kv", "direct", "power-of-two"])
def test_ties_fall_at_random(mode: str) -> None:
    rng = Random(7)
    chosen = Counter(POLICIES[mode].decide(context(4), rng).index for _ in range(4000))
    assert set(chosen) == {0, 1, 2, 3}
    # 1,000 each, with a standard deviation of 27.
    assert all(850 < count < 1150 for count in chosen.values())


def test_temperature_draws_by_cost() -> None:
    costs = [10, 12, 20]
    rng = Random(11)
    drawn = Counter(
        POLICIES["kv"].decide(context(3, active_blocks=costs, temperature=0.5), rng).index for _ in range(20_000)
    )
    weights = [math.exp(-(cost - 10) / (10 * 0.5)) for cost in costs]
    for index, weight in enumerate(weights):
        share = weight / sum(weights)
        deviation = math.sqrt(20_000 * share * (1 - share))
        assert abs(drawn[index] - 20_000 * share) < 5 * deviation


def test_equal_costs_are_drawn_uniformly_at_any_temperature() -> None:
    assert softmax_weights(np.array([3.0, 3.0, 3.0]), 1e-9).tolist() == [1, 1, 1]


@given(
    st.lists(st.floats(0, 1e15), min_size=1, max_size=10),
    st.floats(min_value=0, exclude_min=True, allow_infinity=False),
)
def test_weights_are_probabilities_for_any_costs(costs: list[float], temperature: float) -> None:
    weights = softmax_weights(np.array(costs), temperature).tolist()
    assert max(weights) == 1
    assert all(0 <= weight <= 1 for weight in weights)
    assert weights[costs.index(min(costs))] == 1
    # Dearer is never likelier.
    ordered = [weight for _, weight in sorted(zip(costs, weights, strict=True))]
    assert ordered == sorted(ordered, reverse=True)


def test_round_robin_goes_on_from_the_rank_chosen_last() -> None:
    policy = POLICIES["round-robin"]
    ranks = [(1, 0), (1, 1), (4, 0)]

    def turn(previous: tuple[int, int] | None) -> tuple[int, int]:
        return ranks[policy.decide(context(3, ranks=ranks, previous=previous), Random(1)).index]

    assert turn(None) == (1, 0)
    assert turn((1, 0)) == (1, 1)
    assert turn((1, 1)) == (4, 0)
    assert turn((4, 0)) == (1, 0)
    # One that is gone keeps its place in the order.
    assert turn((2, 0)) == (4, 0)
    assert turn((9, 0)) == (1, 0)


def test_random_gives_each_the_same_chance() -> None:
    rng = Random(3)
    drawn = Counter(POLICIES["random"].decide(context(4), rng).index for _ in range(4000))
    assert all(850 < drawn[index] < 1150 for index in range(4))


def test_power_of_two_never_takes_the_fullest() -> None:
    rng = Random(5)
    busiest = context(5, active_requests=[1, 2, 9, 3, 4])
    chosen = Counter(POLICIES["power-of-two"].decide(busiest, rng).index for _ in range(1000))
    assert chosen[2] == 0
    # The emptiest is drawn in 4 of 10 pairs, and wins each of them.
    assert 320 < chosen[0] < 480


def test_power_of_two_says_whom_it_drew() -> None:
    choice = POLICIES["power-of-two"].decide(context(5, active_requests=[1, 2, 9, 3, 4]), Random(5))
    assert sum(cost < math.inf for cost in choice.explanation.costs) == 2
    assert sum("was not drawn" in choice.explanation.formula(index) for index in range(5)) == 3


@pytest.mark.parametrize("mode", list(POLICIES))
@pytest.mark.parametrize("count", [1, 2, 9])
def test_every_policy_names_a_candidate(mode: str, count: int) -> None:
    for seed in range(20):
        choice = POLICIES[mode].decide(context(count, active_blocks=list(range(count))), Random(seed))
        assert isinstance(choice, Choice)
        assert 0 <= choice.index < count
        assert choice.explanation.reason


def test_labels_of_ranks() -> None:
    assert (rank_label((12, 0)), rank_label((12, 3))) == ("worker_12", "worker_12_dp3")
