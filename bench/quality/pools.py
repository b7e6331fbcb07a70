"""Compares prefill and decode pools with the same number of undivided engines, in the simulator.

    python bench/quality/pools.py [REQUESTS] [SEEDS]

Prints the rows of bench/disaggregation.md.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.resources import as_file, files
from statistics import median

from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.simulator.results.outcome import RunStatistics, run_statistics
from kvrouter.simulator.simulation import simulate
from kvrouter.simulator.tuning.candidates import Candidate
from kvrouter.simulator.workloads import traces
from kvrouter.simulator.workloads.generators import generate
from kvrouter.simulator.workloads.workload import Prompts, Workload

ENGINES = [EngineConfig(hash_seed=number) for number in range(16)]
PREFILL = (0, 2, 4, 6, 8)
WORKLOADS = (("trace", 2.0), ("trace", 5.0), ("documents", 2.0), ("documents", 4.0), ("chat", 3.0), ("agents", 2.0))
MIN_TOKENS = 2048


def workload_of(name: str, requests: int) -> Workload:
    """Returns a generated workload, or the first requests of the shipped trace."""
    if name != "trace":
        return generate(name, requests)
    with as_file(files("kvrouter.devtools.traces") / "data" / "conversation_trace.jsonl.gz") as path:
        return traces.read(path, requests)


def row(name: str, load: float, prefill: int, results: list[RunStatistics]) -> str:
    """Returns a row with the medians over the seeds."""

    def middle(*values: float) -> float:
        return median(values)

    shares = middle(*(result.good_share for result in results))
    ttft = [middle(*(getattr(result.ttft_ms, part) for result in results)) for part in ("p50", "p99", "mean")]
    itl = [middle(*(getattr(result.itl_ms, part) for result in results)) for part in ("p50", "p99")]
    remote = middle(*(result.prefilled_remotely / result.requests for result in results))
    fleet = f"{prefill} + {len(ENGINES) - prefill}" if prefill else f"{len(ENGINES)} undivided"
    return (
        f"| {name} {load:g} | {fleet} | {remote:.0%} | {ttft[0]:,.0f} | {ttft[1]:,.0f} | {ttft[2]:,.0f} |"
        f" {itl[0]:.1f} | {itl[1]:.1f} | {shares:.1%} |"
    )


def main(requests: int = 1000, seeds: int = 2) -> None:
    """Prints the rows."""
    options = RoutingOptions("forecast")
    options = replace(options, remote_prefill=replace(options.remote_prefill, min_tokens=MIN_TOKENS))
    for name, load in WORKLOADS:
        workload = workload_of(name, requests)
        prompts = Prompts(workload, ENGINES[0].block_size)
        for prefill in PREFILL:
            outcomes = [
                simulate(workload.faster(load), Candidate(options, prefill).setting(ENGINES, seed), prompts)
                for seed in range(seeds)
            ]
            results = [run_statistics(outcome, slo_ttft_s=2.0, slo_itl_s=0.05) for outcome in outcomes]
            print(row(name, load, prefill, results), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
