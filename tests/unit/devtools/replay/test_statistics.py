from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from kvrouter.devtools.replay.open_loop import ReplayResult
from kvrouter.devtools.replay.pacing import TimeScale
from kvrouter.devtools.replay.records import RequestRecord
from kvrouter.devtools.replay.statistics import (
    MAX_LATE_ENGINE_MS,
    MAX_STEP_LATE_MS,
    RunStatistics,
    SystemCounts,
    balance,
    expected_cached_tokens,
    hit_rate,
    quantiles,
    statistics_of_run,
)
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateResponse


def record(
    index: int, *, prompt: int = 100, cached: int | None = 32, worker: int = 1, **fields: object
) -> RequestRecord:
    made = RequestRecord(index, due_engine_s=index / 10, prompt_tokens=prompt, ended_engine_s=index / 10 + 1.0)
    made.cached_tokens = cached
    made.worker = (worker, 0)
    made.ttft_ms = 100.0 + index
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def run_statistics(
    records: list[RequestRecord], mode: str = "kv", step_late_p99_ms: float | None = None
) -> RunStatistics:
    result = ReplayResult(records, wall_seconds=5.0, times_limited=0)
    return statistics_of_run(
        result,
        mode=mode,
        workers=2,
        block_size=16,
        time_scale=TimeScale(2.0, 4.0),
        counts=SystemCounts(step_late_p99_ms=step_late_p99_ms),
    )


@given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=1))
def test_quantiles_are_samples_in_order(samples: list[float]) -> None:
    found = quantiles(samples)
    assert {found.p50, found.p90, found.p99, found.largest} <= set(samples)
    assert min(samples) <= found.p50 <= found.p90 <= found.p99 <= found.largest == max(samples)
    assert sum(sample <= found.p90 for sample in samples) >= 0.9 * len(samples) - 1e-9


def test_nearest_rank_on_a_hundred() -> None:
    found = quantiles(range(1, 101))
    assert (found.p50, found.p90, found.p99, found.mean) == (50, 90, 99, 50.5)


def test_no_samples_are_not_zero() -> None:
    assert math.isnan(quantiles([]).p50)
    assert math.isnan(hit_rate([]))


def test_the_hit_rate_weighs_tokens_not_requests() -> None:
    assert hit_rate([record(0, prompt=1000, cached=0), record(1, prompt=100, cached=96)]) == pytest.approx(96 / 1100)
    assert hit_rate([record(0, cached=None), record(1, prompt=100, cached=50)]) == 0.5


@pytest.mark.parametrize(
    ("overlap", "prompt", "cached"), [(0, 100, 0), (3, 100, 48), (6, 100, 96), (6, 96, 80), (1, 16, 0), (1, 17, 16)]
)
def test_an_engine_always_computes_the_last_token(overlap: int, prompt: int, cached: int) -> None:
    assert expected_cached_tokens(overlap, prompt, block_size=16) == cached


def test_idle_ranks_count_in_the_balance() -> None:
    uneven = balance([record(0, prompt=100, cached=0, worker=7)], workers=2)
    assert uneven.tokens_by_rank == {"7/0": 100}
    assert (uneven.variation, uneven.peak) == (1.0, 2.0)
    even = balance([record(0, worker=1), record(1, worker=2)], workers=2)
    assert (even.variation, even.peak) == (0.0, 1.0)


def test_records_take_pieces_as_they_come() -> None:
    taken = RequestRecord(0, 0.0, prompt_tokens=50, clock=2.0)
    first = FrontendServiceGenerateResponse()
    first.routing.rank.worker_id = 9
    first.routing.router_us = 4500
    first.routing.queued_us = 3000
    first.routing.predicted_overlap_blocks = 2
    first.output.token_ids.extend([1, 2])
    first.output.token_engine_ns.extend([30_000_000, 41_000_000])
    first.output.arrived_engine_ns = 10_000_000
    first.output.cached_tokens = 32
    first.output.lower_cached_tokens.host = 16
    second = FrontendServiceGenerateResponse()
    second.output.token_engine_ns.append(55_000_000)
    taken.take(first)
    taken.take(second)
    assert (taken.worker, taken.router_ms, taken.predicted_overlap_blocks) == ((9, 0), 1.5, 2)
    assert (taken.ttft_ms, taken.itl_ms, taken.output_tokens) == (26.0, [11.0, 14.0], 3)
    assert (taken.cached_tokens, taken.host_tokens, taken.shared_tokens) == (32, 16, 0)


def test_what_was_loaded_from_lower_tiers_is_a_share_of_the_prompts() -> None:
    run = run_statistics([record(0, host_tokens=16), record(1)])
    assert run.host_rate == 0.08
    assert math.isnan(run.shared_rate), "no row where there is no such tier"


def test_failed_requests_are_counted_by_code_and_nowhere_else() -> None:
    run = run_statistics([record(0), record(1, error="UNAVAILABLE", cached=None, ttft_ms=9e9)])
    assert run.errors == {"UNAVAILABLE": 1}
    assert (run.requests, run.completed) == (2, 1)
    assert run.ttft_ms.largest == 100.0
    assert run.hit_rate == 0.32


def test_rates_are_per_engine_second_and_per_wall_second() -> None:
    run = run_statistics([record(index) for index in range(11)])
    assert run.requests_per_engine_s == pytest.approx(11 / 2.0)
    assert run.requests_per_wall_s == pytest.approx(11 / 5.0)


def test_prediction_is_judged_only_in_modes_that_predict() -> None:
    records = [record(0, predicted_overlap_blocks=2), record(1, predicted_overlap_blocks=3)]
    assert run_statistics(records).prediction_exact == 0.5
    assert math.isnan(run_statistics(records, mode="round-robin").prediction_exact)


def test_a_late_run_is_invalid_and_says_why() -> None:
    on_time = [record(index) for index in range(100)]
    assert run_statistics(on_time).valid
    late_ms = MAX_LATE_ENGINE_MS / 4.0 + 1  # the bound is in engine time, at clock factor 4
    late = [replace(one, late_wall_ms=late_ms) if one.index < 2 else one for one in on_time]
    assert "sent late" in run_statistics(late).invalid[0]
    assert "steps ended late" in run_statistics(on_time, step_late_p99_ms=MAX_STEP_LATE_MS + 1).invalid[0]
    assert not run_statistics([]).valid
    limited = statistics_of_run(
        ReplayResult(on_time, 5.0, times_limited=3),
        mode="kv", workers=2, block_size=16, time_scale=TimeScale(1, 1), counts=SystemCounts(),
    )  # fmt: skip
    assert "too many were in flight" in limited.invalid[0]


def test_json_has_null_where_nothing_was_measured() -> None:
    written = json.loads(json.dumps(run_statistics([record(0)]).as_json(), allow_nan=False))
    assert written["itl_ms"]["p50"] is None
    assert written["valid"] is True
    assert written["counts"] == {"events_applied": None, "events_faulty": None, "step_late_p99_ms": None}
