"""Who computes a prompt: a prefill worker, or the decode worker itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvrouter.runtime.kv_transfer import KvTransfer
from kvrouter.scheduler.request.remote_prefill import (
    MODELS,
    FirstPrefill,
    PrefillFactors,
    RemotePrefillOptions,
    prefill_places,
)
from kvrouter.v1.common_pb2 import PrefillDecision

OPTIONS = RemotePrefillOptions(
    min_tokens=100,
    prefill_us_per_token=10.0,
    transfer=KvTransfer(1_000_000, gigabytes_per_second=200.0, latency_ms=2.0),
)
"""10 us to compute a token, 5 us to transfer its blocks."""


def decide_prefill(
    uncached_tokens: int, options: RemotePrefillOptions, factors: PrefillFactors = MODELS, **conditions: Any
) -> PrefillDecision:
    decision = prefill_places(np.array([uncached_tokens]), options, factors, **conditions).decision(0)
    assert decision is not None
    return decision


@pytest.mark.parametrize(
    ("uncached", "is_remote", "reason"),
    [
        (0, False, "lacks only 0 tokens"),
        (99, False, "lacks only 99 tokens, fewer than 100"),
        (100, False, "no less than to compute them"),
        (400, False, "no less than to compute them"),
        (401, True, "takes 4.0 ms, to compute them 4.0 ms"),
        (10_000, True, "to transfer 10000 tokens takes 52.0 ms, to compute them 100.0 ms"),
    ],
)
def test_a_prefill_worker_computes_what_is_long_and_faster_to_transfer(
    uncached: int, is_remote: bool, reason: str
) -> None:
    decision = decide_prefill(uncached, OPTIONS)
    assert (decision.remote, decision.uncached_tokens) == (is_remote, uncached)
    assert reason in decision.reason


def test_a_slow_link_keeps_every_prompt_at_its_decode_worker() -> None:
    slow = RemotePrefillOptions(0, 16.0, KvTransfer(gigabytes_per_second=1.0))
    assert not any(decide_prefill(tokens, slow).remote for tokens in (0, 1, 1_000, 1_000_000))


def test_without_a_time_to_compute_there_is_no_detour() -> None:
    free = RemotePrefillOptions(prefill_us_per_token=0.0, transfer=KvTransfer(0, latency_ms=0.0))
    assert not decide_prefill(10_000, free).remote


def test_the_columns_agree_with_the_single_decision() -> None:
    uncached = np.array([0, 99, 100, 400, 401, 10_000])
    places = prefill_places(uncached, OPTIONS)
    assert places.is_remote.tolist() == [decide_prefill(int(tokens), OPTIONS).remote for tokens in uncached]


def test_a_prompt_stays_where_it_need_not_wait() -> None:
    # 52 ms to transfer, 100 ms to compute.
    assert decide_prefill(10_000, OPTIONS, first=FirstPrefill(47.0, 10_000, 100.0)).remote
    queue_there = decide_prefill(10_000, OPTIONS, first=FirstPrefill(49.0, 10_000, 100.0))
    assert not queue_there.remote
    assert "takes 52.0 ms after a wait of 49.0 ms, no less than to compute them (100.0 ms)" in queue_there.reason
    queue_at_both = decide_prefill(10_000, OPTIONS, first=FirstPrefill(49.0, 10_000, 100.0), wait_ms=2.0)
    assert queue_at_both.remote
    assert "to compute them 100.0 ms after a wait of 2.0 ms" in queue_at_both.reason
    assert (queue_at_both.wait_ms, queue_at_both.prefill_wait_ms) == (2.0, 49.0)


def test_a_slow_decode_worker_leaves_more_to_prefill_workers() -> None:
    learned = RemotePrefillOptions(min_tokens=0)
    compute = decide_prefill(2_000, learned).compute_ms
    first = FirstPrefill(0.8 * compute, 2_000, compute)
    assert not decide_prefill(2_000, learned, first=first).remote
    slow = decide_prefill(2_000, learned, first=first, relative_latency=2.0)
    assert slow.remote
    assert slow.compute_ms == pytest.approx(2 * decide_prefill(2_000, learned).compute_ms)


def test_what_is_transferred_weighs_less_than_what_is_computed() -> None:
    weighed = prefill_places(np.array([50, 400, 1_000, 10_000]), OPTIONS).weighed_tokens.tolist()
    assert weighed == [50, 400, 700, 5_200]


def test_measured_times_decide_unless_the_time_to_compute_is_given() -> None:
    learned = RemotePrefillOptions(min_tokens=0)
    fast_engines, slow_link = PrefillFactors(compute=0.05), PrefillFactors(transfer=10.0)
    assert decide_prefill(2_000, learned).remote
    for factors in (fast_engines, slow_link):
        decision = decide_prefill(2_000, learned, factors)
        assert (decision.remote, decision.compute_factor, decision.transfer_factor) == (False, *factors)
    given = RemotePrefillOptions(min_tokens=0, prefill_us_per_token=16.0)
    decision = decide_prefill(2_000, given, fast_engines)
    assert decision.remote
    assert decision.compute_factor == 1.0


def test_the_model_counts_the_fixed_part_of_each_step() -> None:
    learned = RemotePrefillOptions(min_tokens=0)
    one, two = (decide_prefill(tokens, learned).compute_ms for tokens in (8_192, 16_384))
    assert two == pytest.approx(2 * one)
    assert decide_prefill(1, learned).compute_ms > 16
    assert decide_prefill(0, learned).compute_ms == 0


@pytest.mark.parametrize(
    ("there", "is_remote", "reason"),
    [
        (FirstPrefill(0.0, 10_000, 147.0), True, "a prefill worker computes 10000 tokens in 47.0 ms more"),
        (FirstPrefill(0.0, 14_900, 149.0), False, "a prefill worker computes 14900 tokens in 49.0 ms more"),
        (FirstPrefill(140.0, 1_000, 7.0), True, "a prefill worker computes 1000 tokens in 93.0 ms less"),
        (FirstPrefill(140.0, 1_000, 9.0), False, "a prefill worker computes 1000 tokens in 91.0 ms less"),
    ],
)
def test_the_speed_of_prefill_workers_and_what_they_hold_decide(
    there: FirstPrefill, is_remote: bool, reason: str
) -> None:
    # 52 ms to transfer, 100 ms to compute.
    decision = decide_prefill(10_000, OPTIONS, first=there)
    assert decision.remote is is_remote
    assert reason in decision.reason
    assert (decision.prefill_wait_ms, decision.prefill_uncached_tokens, decision.prefill_compute_ms) == there
