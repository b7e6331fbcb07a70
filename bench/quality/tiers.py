"""Routing with a host tier of four times the device cache, against device-only routing and Dynamo's factors.

    .venv/bin/python bench/quality/tiers.py [--seeds 3] [--requests 8000] [--workloads agents,chat] [--loads 0.2,1]

Prints the numbers of bench/tiers.md. Device caches hold 0.3 of the distinct blocks of the prompts, host memory is read
at 20 GB/s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from kvrouter.mocker.engine.config import EngineConfig, TierConfig
from kvrouter.simulator.plan import routing_options
from kvrouter.simulator.results.outcome import RunStatistics, run_statistics
from kvrouter.simulator.simulation import Setting, simulate
from kvrouter.simulator.workloads.generators import generate
from kvrouter.simulator.workloads.workload import Prompts, Workload
from pools import workload_of

ENGINES, BLOCK = 16, EngineConfig().block_size
DEVICE_SHARE, HOST_FACTOR, GB_PER_SECOND = 0.3, 4, 20.0
LOADS = {"agents": (0.05, 0.2, 1), "chat": (0.2, 1), "trace": (2, 4)}
SLO_TTFT_S, SLO_ITL_S = 2.0, 0.05


class Routing(NamedTuple):
    """A policy, and whether it counts blocks in host memory."""

    title: str
    policy: str
    sees_tiers: bool


ROUTINGS = (
    Routing("forecast", "forecast", True),
    Routing("forecast, device only", "forecast", False),
    Routing("kv, Dynamo's factors", "kv", True),
    Routing("kv, device only", "kv", False),
)
DEVICE_ONLY = ROUTINGS[1]
"""Each routing is compared with it, seed by seed: workloads of different seeds differ more than routings do."""


def fleet(workload: Workload, prompts: Prompts) -> list[EngineConfig]:
    """Returns the engines. Each device cache holds the longest request."""
    distinct: set[int] = set()
    for number in range(len(workload.requests)):
        distinct.update(memoryview(prompts.hashed(number).sequence_hashes).cast("Q"))
    longest = max(request.prompt_tokens + request.output_tokens for request in workload.requests)
    blocks = max(-(-longest // BLOCK) + 1, round(DEVICE_SHARE * len(distinct) / ENGINES))
    host = TierConfig(HOST_FACTOR * blocks, GB_PER_SECOND)
    return [EngineConfig(num_blocks=blocks, host=host, hash_seed=number) for number in range(ENGINES)]


def measured(
    names: Sequence[str], requests: int, seeds: int, loads: Sequence[float]
) -> Iterator[tuple[str, float, Routing, RunStatistics]]:
    """Yields the statistics of each run as it ends; ``loads`` are those of the workload if empty."""
    for name in names:
        for seed in range(1 if name == "trace" else seeds):
            workload = workload_of(name, requests) if name == "trace" else generate(name, requests, seed)
            prompts = Prompts(workload, BLOCK)
            engines = fleet(workload, prompts)
            for load in loads or LOADS[name]:
                for routing in ROUTINGS:
                    options = routing_options(routing.policy)
                    setting = Setting(engines, options, seed, regret=False, sees_tiers=routing.sees_tiers)
                    outcome = simulate(workload.faster(load), setting, prompts)
                    yield name, load, routing, run_statistics(outcome, slo_ttft_s=SLO_TTFT_S, slo_itl_s=SLO_ITL_S)


def main() -> None:
    """Prints a row for each cell: medians over seeds, with the range of the mean time to first token."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--workloads", default=",".join(LOADS))
    parser.add_argument("--loads", default="")
    options = parser.parse_args()
    loads = [float(load) for load in options.loads.split(",") if load]
    began = time.perf_counter()
    runs: dict[tuple[str, float, Routing], list[RunStatistics]] = {}
    names = options.workloads.split(",")
    for name, load, routing, statistics in measured(names, options.requests, options.seeds, loads):
        runs.setdefault((name, load, routing), []).append(statistics)
    print(
        "| workload, load | routing | found in a cache | of it in host memory | mean TTFT, ms | of device only | p99 |"
        " within SLO |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (name, load, routing), group in runs.items():
        means = sorted(run.ttft_ms.mean for run in group)
        spread = f" ({means[0]:,.0f} to {means[-1]:,.0f})" if len(means) > 1 else ""
        pairs = zip(group, runs[name, load, DEVICE_ONLY], strict=True)
        ratios = sorted(run.ttft_ms.mean / device.ttft_ms.mean for run, device in pairs)
        print(
            f"| {name} {load:g} | {routing.title} | {median(run.reuse for run in group):.1%} | "
            f"{median(run.host_reuse for run in group):.1%} | {median(means):,.0f}{spread} | "
            f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) | "
            f"{median(run.ttft_ms.p99 for run in group):,.0f} | {median(run.within_slo for run in group):,.0f} |",
            flush=True,
        )
    print(f"\n{options.requests:,} requests, {options.seeds} seeds, {time.perf_counter() - began:,.0f} s")


if __name__ == "__main__":
    main()
