"""Whole runs: what must hold for any policy, and what each disturbance does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from kvrouter.mocker.engine import implementation as engine_choice
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.simulator.engines import fleet
from kvrouter.simulator.results.outcome import Outcome, RunStatistics, run_statistics, spread
from kvrouter.simulator.simulation import Setting, simulate
from kvrouter.simulator.workloads.generators import generate
from kvrouter.simulator.workloads.workload import Prompts, Request, Workload

ENGINES = [EngineConfig(num_blocks=600, hash_seed=number, max_sequences=64) for number in range(4)]
# Nine conversations of fifteen turns, each bringing what was said before.
WORKLOAD = Workload(
    "turns",
    [
        Request(turn + talk / 11, 64 * (turn + 4), 20 + 3 * talk, (0, *range(100 * talk + 1, 100 * talk + turn + 4)))
        for turn in range(15)
        for talk in range(9)
    ],
    64,
)
PROMPTS = Prompts(WORKLOAD, 16)
MODES = [mode for mode, policy in POLICIES.items() if not policy.needs_worker]


def run(mode: str, load: float = 1.0, **changes: object) -> Outcome:
    setting = Setting(ENGINES, RoutingOptions(mode))
    return simulate(WORKLOAD.faster(load), replace(setting, **changes), PROMPTS)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
def test_the_events_of_every_request_are_in_order(mode: str) -> None:
    outcome = run(mode, load=6.0)
    assert len(outcome.served) == len(WORKLOAD.requests)
    for served, request in zip(outcome.served, WORKLOAD.faster(6.0).requests, strict=True):
        assert request.arrives_s == served.arrived_at <= served.sent_at < served.first_at <= served.ended_at
        assert served.cached_tokens < served.prompt_tokens
        assert served.regret_ms >= 0
    gaps = sum(request.output_tokens - 1 for request in WORKLOAD.requests)
    assert len(outcome.gaps_s) == gaps


@pytest.mark.parametrize("mode", ["kv", "forecast", "random"])
def test_equal_seeds_give_equal_runs_and_others_do_not(mode: str) -> None:
    assert run(mode, seed=3) == run(mode, seed=3)
    assert run(mode, seed=3).served != run(mode, seed=4).served


@pytest.mark.skipif(engine_choice.IMPLEMENTATION != "native", reason="the engine in Rust is not built")
@pytest.mark.parametrize("mode", ["round-robin", "kv", "forecast"])
def test_the_plain_engines_give_the_same_run(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    native = run(mode, load=6.0)
    monkeypatch.setattr(fleet, "IMPLEMENTATION", "reference")
    assert run(mode, load=6.0) == native


@pytest.mark.skipif(engine_choice.IMPLEMENTATION != "native", reason="the engine in Rust is not built")
@settings(max_examples=8)
@given(
    speeds=st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.0]), min_size=4, max_size=4), load=st.sampled_from([3.0, 9.0])
)
def test_the_plain_engines_teach_the_same_speeds(speeds: list[float], load: float) -> None:
    engines = [replace(engine, speed=speed) for engine, speed in zip(ENGINES, speeds, strict=True)]
    native = run("forecast", load=load, engines=engines)
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(fleet, "IMPLEMENTATION", "reference")
        assert run("forecast", load=load, engines=engines) == native


def test_round_robin_takes_ranks_in_turn() -> None:
    assert [served.engine for served in run("round-robin").served[:6]] == [0, 1, 2, 3, 0, 1]


def test_routing_by_cache_reuses_more() -> None:
    reuse = {mode: summed(run(mode)).reuse for mode in ("round-robin", "kv", "forecast")}
    assert reuse["round-robin"] < reuse["kv"]
    assert reuse["round-robin"] < reuse["forecast"]


def test_an_index_that_lags_knows_less() -> None:
    assert summed(run("kv", event_lag_s=1e6)).reuse < summed(run("kv")).reuse


def test_a_full_fleet_holds_requests_and_serves_them() -> None:
    small = [replace(config, num_blocks=120) for config in ENGINES]
    assert summed(run("forecast", load=40.0, engines=small)).queued > 0
    assert summed(run("kv", load=40.0, engines=small)).queued == 0


def test_a_restart_loses_sent_output_and_resends_other_requests() -> None:
    requests = [Request(0.0, 4000, 400, (1,)), Request(1.0, 4000, 400, (2,)), Request(9.0, 4000, 4, (1,))]
    workload = Workload("w", requests, 4096)
    setting = Setting(ENGINES[:1], RoutingOptions("kv"), restarts=[(1.02, 0)])
    outcome = simulate(workload, setting, Prompts(workload, 16))
    first, second, third = outcome.served
    assert first.failed
    assert not second.failed
    assert second.attempts == 2
    assert second.first_at > 1.02
    assert third.cached_tokens == 0, "its beginning went with the cache"
    counts = summed(outcome)
    assert (counts.requests, counts.failed, counts.retried) == (2, 1, 1)


def test_statistics_add_up() -> None:
    outcome = run("kv")
    summary = summed(outcome)
    assert summary.requests == len(outcome.served)
    assert summary.reuse == sum(r.cached_tokens for r in outcome.served) / sum(r.prompt_tokens for r in outcome.served)
    assert summary.readmitted_reuse >= summary.reuse
    assert summary.imbalance >= 1
    assert summary.ttft_ms.p50 <= summary.ttft_ms.p90 <= summary.ttft_ms.p99
    assert run_statistics(outcome, slo_ttft_s=0, slo_itl_s=1).within_slo == 0
    assert run_statistics(outcome, slo_ttft_s=1e9, slo_itl_s=1e9).within_slo == len(outcome.served)


def test_regret_is_not_computed_if_it_is_not_requested() -> None:
    assert math.isnan(summed(run("kv", regret=False)).regret_ms)


def test_quantiles_are_interpolated() -> None:
    values = spread([1.0, 2.0, 3.0, 4.0], 10)
    assert (values.p50, values.mean) == (25, 25)
    assert values.p90 == pytest.approx(37)


def summed(outcome: Outcome) -> RunStatistics:
    return run_statistics(outcome, slo_ttft_s=2.0, slo_itl_s=0.05)


def test_conversations_with_one_system_prompt_spread_over_all_caches() -> None:
    engines = [EngineConfig(num_blocks=6000, hash_seed=number) for number in range(4)]
    workload = generate("agents", 600).faster(0.02)
    outcome = simulate(workload, Setting(engines, RoutingOptions("forecast"), regret=False), Prompts(workload, 16))
    served = [sum(request.engine == engine for request in outcome.served) for engine in range(4)]
    cached = sum(request.cached_tokens for request in outcome.served)
    assert min(served) > 600 / 8, "without a price of evictions, one of them serves no request"
    assert cached > 0.5 * sum(request.prompt_tokens for request in outcome.served), "without it, 38%"
