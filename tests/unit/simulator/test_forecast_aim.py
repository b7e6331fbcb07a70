"""What mode forecast is for: no worse than kv with the best weight in hindsight, and far better past the knee.

Runs are exact: equal seeds give equal figures, so that the margins are room for changes of the policy, not for chance.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.engine.implementation import IMPLEMENTATION
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.simulator.results.outcome import RunStatistics, run_statistics
from kvrouter.simulator.simulation import Setting, simulate
from kvrouter.simulator.workloads.generators import generate
from kvrouter.simulator.workloads.workload import Prompts

ENGINES = [EngineConfig(num_blocks=8192, hash_seed=number) for number in range(4)]


@pytest.mark.skipif(IMPLEMENTATION != "native", reason="the engine in Rust is not built: minutes in plain Python")
@pytest.mark.parametrize(
    ("traffic", "load", "most"),
    [("chat", 1.5, 1.0), ("prompts", 0.4, 0.4), ("prompts", 0.5, 0.4)],
    ids=["below the knee", "at the knee", "past the knee"],
)
def test_forecast_needs_no_weight_to_beat_the_best(traffic: str, load: float, most: float) -> None:
    workload = generate(traffic, 1400)
    prompts = Prompts(workload, 16)

    def run(options: RoutingOptions) -> RunStatistics:
        setting = Setting(ENGINES, options, regret=False)
        return run_statistics(simulate(workload.faster(load), setting, prompts), slo_ttft_s=2.0, slo_itl_s=0.05)

    ours = run(RoutingOptions("forecast"))
    weighted = [run(RoutingOptions("kv", overlap_score_weight=weight)) for weight in (1.0, 4.0, 64.0)]
    assert ours.ttft_ms.mean <= most * min(theirs.ttft_ms.mean for theirs in weighted)
    assert ours.ttft_ms.p99 <= 1.03 * min(theirs.ttft_ms.p99 for theirs in weighted)
    assert ours.within_slo >= max(theirs.within_slo for theirs in weighted)


@pytest.mark.skipif(IMPLEMENTATION != "native", reason="the engine in Rust is not built: minutes in plain Python")
@pytest.mark.parametrize("load", [1.5, 2.5])
def test_forecast_learns_which_engines_are_slow(load: float) -> None:
    workload = generate("chat", 900)
    prompts = Prompts(workload, 16)
    engines = [replace(engine, speed=0.5 if number % 2 else 1.0) for number, engine in enumerate(ENGINES)]

    def run(options: RoutingOptions) -> RunStatistics:
        setting = Setting(engines, options, regret=False)
        return run_statistics(simulate(workload.faster(load), setting, prompts), slo_ttft_s=2.0, slo_itl_s=0.05)

    ours = run(RoutingOptions("forecast"))
    weighted = [run(RoutingOptions("kv", overlap_score_weight=weight)) for weight in (1.0, 4.0, 64.0)]
    others = [run(RoutingOptions("product")), *weighted]
    assert ours.ttft_ms.mean <= 0.95 * min(theirs.ttft_ms.mean for theirs in others)
    assert ours.within_slo >= 1.1 * max(theirs.within_slo for theirs in others)
