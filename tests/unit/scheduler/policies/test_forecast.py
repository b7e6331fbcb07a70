"""Mode forecast, product and sticky: what each weighs, and what they do where a signal is missing."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.policies.forecast.policy import (
    BASE,
    MAX_RECOMPUTATIONS,
    OUTPUT_TOKENS,
    PREFILL_N1_MS,
    decode_ms,
    prefill_ms,
)
from kvrouter.scheduler.policies.interface import Choice, Wait

from ..context_maker import context

# Two ranks of 1,000 blocks of 16 tokens; a prompt of 100 blocks, that both hold nothing of.
TWO: dict[str, Any] = {
    "prompt_tokens": 1600,
    "total_blocks": [1000, 1000],
    "max_batched_tokens": [8192, 8192],
    "active_blocks": [100, 100],
    "new_prefill_tokens": [1600, 1600],
}


def decide(mode: str, **changes: Any) -> Choice | Wait:
    return POLICIES[mode].decide(context(2, **(TWO | changes)), Random(7))


def test_prefill_time_is_a_full_step_for_each_budget_and_one_for_the_rest() -> None:
    assert prefill_ms(0, 8192, 5.0) == 0
    assert prefill_ms(16384, 8192, 5.0) == pytest.approx(2 * prefill_ms(8192, 8192, 5.0))
    assert prefill_ms(8193, 8192, 5.0) == pytest.approx(prefill_ms(8192, 8192, 5.0) + prefill_ms(1, 8192, 5.0))
    assert decode_ms(0.5) == pytest.approx(-25.74 / 4 + 54.01 / 2 + 5.74)


def test_of_equal_ranks_either_is_taken() -> None:
    taken = {POLICIES["forecast"].decide(context(2, **TWO), Random(seed)).index for seed in range(20)}
    assert taken == {0, 1}


@pytest.mark.parametrize(
    "worse",
    [
        {"prefill_tokens": [4000, 0], "head_prefill_tokens": [4000, 0]},
        {"active_requests": [30, 0], "active_blocks": [400, 100]},
        {"overlap_blocks": [0, 50]},
        {"leading_active_blocks": [0, 50], "active_requests": [1, 1]},
        {"active_blocks": [990, 900], "active_requests": [3, 3]},
        {"reuse_chance": [0.5, 0.4]},
        {"active_blocks": [7600, 1030], "active_requests": [25, 3], "prefill_tokens": [10_000, 0]},
    ],
    ids=[
        "a longer queue",
        "more to decode",
        "less cached",
        "less on its way into the cache",
        "short of blocks",
        "blocks that are likely to be used again",
        "seven times the bookings that it has blocks for",
    ],
)
def test_forecast_avoids_the_rank_with(worse: dict[str, Any]) -> None:
    assert decide("forecast", **worse).index == 1


def test_time_spent_on_the_prompt_under_way_counts() -> None:
    queue = {"prefill_tokens": [4000, 4000], "head_prefill_tokens": [4000, 4000], "prefill_requests": [1, 1]}
    assert decide("forecast", **queue, head_prefill_seconds=[0.01, 0.05]).index == 1


def test_a_prompt_that_would_be_computed_in_the_step_of_another_pays_for_its_waiting() -> None:
    short_waits = {"prefill_tokens": [200, 200], "head_prefill_tokens": [200, 200], "prefill_requests": [1, 1]}
    terms = decide("forecast", **short_waits, head_prefill_seconds=[0.0, 0.01]).explanation.terms
    joint = prefill_ms(1800, 8192, 0.0) - prefill_ms(200, 8192, 0.0)
    assert terms["batch_ms"] == pytest.approx([joint, 0.0])


def test_only_the_part_that_fits_into_the_step_is_counted() -> None:
    changes = {"prefill_tokens": [8000, 0], "head_prefill_tokens": [4000, 0], "prefill_requests": [2, 0]}
    terms = decide("forecast", **changes).explanation.terms
    assert terms["batch_ms"][0] == pytest.approx(2 * (prefill_ms(8192, 8192, 0.0) - prefill_ms(8000, 8192, 0.0)))


def test_no_more_time_counts_than_that_prompt_takes() -> None:
    queue = {"prefill_tokens": [3000, 2900], "head_prefill_tokens": [10, 10], "prefill_requests": [2, 2]}
    assert decide("forecast", **queue, head_prefill_seconds=[60.0, 0.03]).index == 1


def test_a_request_without_room_waits_for_its_cheapest_rank() -> None:
    queued = decide("forecast", active_blocks=[1001, 1300], overlap_blocks=[0, 0])
    assert isinstance(queued, Wait)
    assert queued.index == 0
    assert queued.prefill_ms == pytest.approx(prefill_ms(1600, 8192, 0.0))
    assert queued.room_tokens == 1600


def test_a_new_request_leaves_a_rank_that_queued_requests_wait_for() -> None:
    held = {"active_blocks": [900, 900], "overlap_blocks": [80, 0]}
    assert decide("forecast", **held).index == 0
    behind = decide("forecast", **held, queued_blocks=[500, 0])
    assert (type(behind), behind.index) == (Choice, 1)
    assert isinstance(decide("forecast", **held, queued_blocks=[500, 500]), Choice), "the rank has room for this one"


def test_blocks_of_requests_in_flight_need_no_further_room() -> None:
    queued = decide("forecast", active_blocks=[1001, 1300], leading_active_blocks=[60, 0], active_requests=[1, 1])
    assert isinstance(queued, Wait)
    assert queued.room_tokens == 1600 - 60 * 16


def test_a_rank_of_unknown_size_never_lacks_room() -> None:
    assert isinstance(decide("forecast", active_blocks=[5000, 9000], total_blocks=[0, 0]), Choice)


@pytest.mark.parametrize(("waiting", "price"), [((0, 0), 0), ((1, 0), 1), ((9, 0), 1), ((1, 1), BASE), ((5, 2), BASE)])
def test_busy_ranks_are_the_price_of_work_where_caches_are_of_unknown_size(
    waiting: tuple[int, int], price: float
) -> None:
    load = {"overlap_blocks": [60, 0], "active_blocks": [0, 0], "active_requests": [0, 0]}
    load |= {"prefill_requests": list(waiting), "prefill_tokens": [400 * each for each in waiting]}
    own = np.array([prefill_ms(640, 8192, 0.0), prefill_ms(1600, 8192, 0.0)])
    assert decide("forecast", **load, total_blocks=[0, 0]).explanation.terms["work_ms"] == pytest.approx(price * own)
    for known in ([1000, 1000], [1000, 0]):
        assert not decide("forecast", **load, total_blocks=known).explanation.terms["work_ms"].any()


def test_ranks_of_unknown_size_leave_the_price_of_work_as_it_is() -> None:
    load = {"overlap_blocks": [0, 0], "active_requests": [0, 0], "active_blocks": [950, 950]}
    known = decide("forecast", **load, total_blocks=[1000, 1000]).explanation.terms["work_ms"]
    mixed = decide("forecast", **load, total_blocks=[1000, 0]).explanation.terms["work_ms"]
    assert known[0] > 0
    assert mixed == pytest.approx(known)


def test_an_unknown_budget_is_taken_to_be_the_usual_one() -> None:
    known, unknown = decide("forecast"), decide("forecast", max_batched_tokens=[0, 0])
    assert list(known.explanation.costs) == list(unknown.explanation.costs)


def test_a_prompt_that_is_wholly_cached_computes_its_last_block() -> None:
    assert decide("forecast", overlap_blocks=[100, 100]).prefill_tokens == 16


def test_the_latency_calibration_scales_the_forecast() -> None:
    slow, usual = decide("forecast", latency_calibration=3.0), decide("forecast")
    assert slow.explanation.terms["forecast_ms"][0] == pytest.approx(3 * usual.explanation.terms["forecast_ms"][0])


def test_a_slow_rank_forecasts_its_own_time_and_pays_for_slower_output() -> None:
    terms = decide("forecast", relative_latency=[2.0, 1.0]).explanation.terms
    assert terms["forecast_ms"][0] == pytest.approx(2 * terms["forecast_ms"][1])
    assert terms["output_ms"] == pytest.approx([OUTPUT_TOKENS * decode_ms(0.0), 0.0])
    assert terms["work_ms"][0] == terms["work_ms"][1]


def test_a_prompt_goes_to_a_slow_rank_once_the_fast_one_is_behind() -> None:
    speeds = {"relative_latency": [2.0, 1.0], "head_prefill_tokens": [0, 4000], "prefill_requests": [0, 1]}
    assert decide("forecast", relative_latency=[2.0, 1.0]).index == 1
    assert decide("forecast", **speeds, prefill_tokens=[0, 4000]).index == 0


def test_with_no_block_left_anywhere_speed_counts_for_nothing() -> None:
    full = {"active_blocks": [1100, 1100], "active_requests": [9, 9]}
    slow, equal = decide("forecast", **full, relative_latency=[2.0, 1.0]), decide("forecast", **full)
    assert list(slow.explanation.costs) == list(equal.explanation.costs)


def test_the_calibration_gets_the_forecast_at_the_speed_of_the_component() -> None:
    slow, equal = decide("forecast", relative_latency=[2.0, 2.0]), decide("forecast")
    assert isinstance(slow, Choice)
    assert isinstance(equal, Choice)
    assert slow.explanation.terms["forecast_ms"][0] > 1.9 * equal.explanation.terms["forecast_ms"][0]
    assert slow.forecast_ms == pytest.approx(equal.forecast_ms)


def test_a_queued_request_expects_the_speed_of_its_rank() -> None:
    queued = decide("forecast", active_blocks=[1001, 1300], relative_latency=[1.5, 1.5])
    assert isinstance(queued, Wait)
    assert queued.prefill_ms == pytest.approx(1.5 * prefill_ms(1600, 8192, 0.0))


def test_a_forecast_behind_a_queue_is_no_calibration_sample() -> None:
    queue = {"prefill_tokens": [10, 10], "head_prefill_tokens": [10, 10]}
    alone, behind = decide("forecast"), decide("forecast", **queue)
    assert isinstance(alone, Choice)
    assert alone.forecast_ms is not None
    assert isinstance(behind, Choice)
    assert behind.forecast_ms is None


def test_forecast_explains_itself() -> None:
    decided = decide("forecast", overlap_blocks=[50, 0])
    assert decided.explanation.formula(0).startswith("Formula for worker_1: ")
    assert "(800 tokens to compute)" in decided.explanation.formula(0)


def test_product_weighs_tokens_by_requests() -> None:
    costs = decide("product", new_prefill_tokens=[800, 1600], active_requests=[1, 0]).explanation.costs
    assert list(costs) == [1600, 1600]
    assert decide("product", new_prefill_tokens=[799, 1600], active_requests=[1, 0]).index == 0
    assert decide("product", prefill_tokens=[10, 0]).index == 1


@pytest.mark.parametrize(
    ("changes", "index"),
    [
        ({"overlap_blocks": [9, 10], "active_requests": [0, 50]}, 1),
        ({"active_requests": [2, 1]}, 1),
        ({"overlap_blocks": [10, 9], "active_blocks": [951, 100]}, 1),
        ({"overlap_blocks": [10, 9], "prefill_tokens": [8193, 0]}, 1),
        ({"overlap_blocks": [10, 9], "prefill_tokens": [8193, 0], "max_batched_tokens": [0, 0]}, 0),
        ({"overlap_blocks": [10, 9], "active_blocks": [951, 100], "total_blocks": [0, 0]}, 0),
    ],
    ids=["reuse first", "then load", "full", "behind", "budget unknown", "size unknown"],
)
def test_sticky(changes: dict[str, Any], index: int) -> None:
    assert decide("sticky", **changes).index == index


def test_the_price_of_an_eviction_counts_the_computations_that_follow_it() -> None:
    choice = decide("forecast", reuse_chance=[0.25, 1.0], overlap_blocks=[40, 100], latency_calibration=2.0)
    assert list(choice.explanation.terms["eviction_ms"]) == pytest.approx(
        [60 * 16 * 2 * PREFILL_N1_MS / 3, 16 * 2 * PREFILL_N1_MS * MAX_RECOMPUTATIONS]
    )


def test_blocks_that_several_ranks_hold_cost_their_share_of_first_computations() -> None:
    held = {"overlap_blocks": [40, 40, 40, 10, 0], "leading_active_blocks": [0, 0, 0, 0, 4]}
    known = {name: [column[0]] * 5 for name, column in TWO.items() if isinstance(column, list)}
    choice = POLICIES["forecast"].decide(
        context(5, **(known | held | {"active_blocks": [800] * 5}), prompt_tokens=1600, latency_calibration=2.0),
        Random(7),
    )
    copied = [0.0, 0.0, 0.0, 30 * 2 / 3, 6 * 3 / 4 + 30 * 2 / 3]
    abundance = 1 - ((4 * 0.7 + 0.704) / 5) ** 4
    expected = [-blocks * 16 * 2 * PREFILL_N1_MS * abundance for blocks in copied]
    assert list(choice.explanation.terms["copies_ms"]) == pytest.approx(expected)


def test_a_popular_prefix_spreads_and_that_of_one_conversation_stays() -> None:
    changes: dict[str, Any] = {"total_blocks": [1000] * 4, "active_requests": [1, 1, 1, 0], "prompt_tokens": 1200}
    held = {"of all": [64, 64, 64, 0], "of one": [64, 0, 0, 0]}
    chosen = {
        whose: POLICIES["forecast"].decide(context(4, **changes, overlap_blocks=blocks), Random(7)).index
        for whose, blocks in held.items()
    }
    assert chosen == {"of all": 3, "of one": 0}


def test_reuse_is_left_for_a_cache_of_less_use() -> None:
    common = {"overlap_blocks": [50, 0]}
    assert decide("forecast", **common).index == 0
    assert decide("forecast", **common, reuse_chance=[0.4, 0.0]).index == 0, "half of the prompt is worth more"
    assert decide("forecast", **common, reuse_chance=[0.9, 0.0]).index == 1, "four recomputations cost more"
    nearly_none = {"overlap_blocks": [10, 0]}
    assert decide("forecast", **nearly_none, reuse_chance=[0.4, 0.0]).index == 1
