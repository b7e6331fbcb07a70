"""The floor: one cache for all, and no request waits for another."""

from __future__ import annotations

import pytest
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.engine.time_model import TimeModel
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.simulator.floor import floor
from kvrouter.simulator.results.outcome import run_statistics
from kvrouter.simulator.simulation import Setting, simulate
from kvrouter.simulator.workloads.generators import generate
from kvrouter.simulator.workloads.workload import Prompts, Request, Workload

TIMES = TimeModel(prefill_n2_ms=0.0, prefill_n1_ms=1.0, prefill_n0_ms=10.0)


def outcome(requests: list[Request], *blocks: int, **config: float) -> list[tuple[int, float]]:
    """(cached tokens, ms to the first token) of each request, on engines of so many blocks."""
    workload = Workload("made", requests, 16)
    engines = [EngineConfig(num_blocks=each, time_model=TIMES, **config) for each in blocks]  # type: ignore[arg-type]
    served = floor(workload, engines, Prompts(workload, 16)).served
    return [(request.cached_tokens, round(request.ttft_s * 1e3, 6)) for request in served]


def test_prompts_are_found_in_the_cache_whichever_engine_computed_them() -> None:
    requests = [
        Request(0.0, 64, 3, (1, 2, 3, 4)),
        Request(0.0, 70, 1, (1, 2, 9, 9, 9)),
        Request(1.0, 64, 1, (1, 2, 3, 4)),
    ]
    assert outcome(requests, 4, 6) == [(0, 74.0), (32, 48.0), (48, 26.0)]


def test_the_least_recently_used_blocks_are_evicted_the_last_of_a_prompt_first() -> None:
    requests = [
        Request(0.0, 65, 1, (1, 2, 3, 4, 5)),
        Request(1.0, 33, 1, (6, 7, 8)),
        Request(2.0, 65, 1, (1, 2, 3, 4, 5)),
    ]
    assert [cached for cached, _ in outcome(requests, 2, 3)] == [0, 0, 48]


def test_long_prompts_take_several_steps_and_fast_engines_less_time() -> None:
    request = [Request(0.0, 300, 1, tuple(range(19)))]
    assert outcome(request, 100, max_batched_tokens=256) == [(0, 320.0)]
    assert outcome(request, 100, max_batched_tokens=256, speed=2.0) == [(0, 160.0)]


def test_no_policy_is_below_the_floor() -> None:
    workload = generate("chat", 200)
    prompts, engines = Prompts(workload, 16), [EngineConfig(num_blocks=2000)] * 3
    limits = {"slo_ttft_s": 2.0, "slo_itl_s": 0.05}
    least = run_statistics(floor(workload, engines, prompts), **limits)
    for mode in ("forecast", "kv", "round-robin"):
        reached = run_statistics(simulate(workload, Setting(engines, RoutingOptions(mode)), prompts), **limits)
        assert reached.ttft_ms.mean > least.ttft_ms.mean
        assert reached.itl_ms.mean > 0.9 * least.itl_ms.mean
        assert reached.reuse == pytest.approx(least.reuse, abs=0.2)
        assert reached.reuse < least.reuse
