"""Compares several deciding Schedulers with one in the simulator.

    .venv/bin/python bench/replicas/simulated.py [--seeds 3] [--only bursts,batches]

Time is virtual: results depend on the seed, not on the machine. They are medians over the seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from statistics import median

from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.simulator.results.outcome import RunStatistics, run_statistics
from kvrouter.simulator.routing.replicas import Sync
from kvrouter.simulator.simulation import Setting, simulate
from kvrouter.simulator.workloads import traces
from kvrouter.simulator.workloads.generators import generate
from kvrouter.simulator.workloads.workload import Prompts, Workload

BLOCK_SIZE = 16
ENGINES = [EngineConfig(block_size=BLOCK_SIZE, hash_seed=number) for number in range(8)]
POLICIES = ("kv", "forecast")
SLO_TTFT_S, SLO_ITL_S = 2.0, 0.05
LAG = Sync(lag_s=0.002)
LOSSY = Sync(lag_s=0.002, loss=0.05, repair_s=0.02)
FAR = Sync(lag_s=0.05)


@dataclass(frozen=True, slots=True)
class Case:
    """How many Schedulers decide, and what they know of each other."""

    schedulers: int
    sync: Sync | None = None
    sharded: bool = False

    @property
    def words(self) -> str:
        """Name of the case in the table."""
        if self.schedulers == 1:
            return "1"
        known = "no sync" if self.sync is None else f"sync {self.sync.lag_s * 1e3:g} ms late"
        if self.sync is not None and self.sync.loss:
            known += f", {self.sync.loss:.0%} lost and repaired {self.sync.repair_s * 1e3:g} ms after"
        return f"{self.schedulers}, {known}{', sharded by prefix' if self.sharded else ''}"


CASES: Sequence[Case] = (
    Case(1),
    Case(2),
    Case(2, LAG),
    Case(4),
    Case(4, LAG),
    Case(4, LOSSY),
    Case(4, FAR),
    Case(4, sharded=True),
    Case(4, LAG, sharded=True),
)


def workload(name: str) -> Workload:
    """Returns ``bursts``: each request at its own time, or ``batches``: some nine at the same moment, every 3 s."""
    if name == "bursts":
        return generate("bursts", 2400).faster(1.0)
    with as_file(files("kvrouter.devtools.traces") / "data" / "conversation_trace.jsonl.gz") as path:
        return traces.read(path).faster(2.0)


def run(load: Workload, prompts: Prompts, policy: str, case: Case, seed: int) -> RunStatistics:
    """Runs one simulation."""
    setting = Setting(
        ENGINES,
        RoutingOptions(policy),
        seed,
        event_lag_s=0.05,
        schedulers=case.schedulers,
        sync=case.sync,
        sharded=case.sharded,
        regret=False,
    )
    return run_statistics(simulate(load, setting, prompts), slo_ttft_s=SLO_TTFT_S, slo_itl_s=SLO_ITL_S)


def table(runs: Mapping[tuple[str, Case], Sequence[RunStatistics]]) -> str:
    """Returns Markdown: a row for each case, with each policy's results."""
    lines = [
        "| deciding Schedulers |" + "".join(f" {name}: fullest / mean | queue | TTFT mean | p99 |" for name in POLICIES)
    ]
    lines.append("|---|" + "---|" * 4 * len(POLICIES))
    for case in dict.fromkeys(case for _, case in runs):
        cells = [case.words]
        for policy in POLICIES:
            found = runs[policy, case]
            cells += [
                f"{median(each.block_peak for each in found):.2f}",
                f"{median(each.longest_prefill_tokens for each in found):,.0f}",
                f"{median(each.ttft_ms.mean for each in found):,.0f}",
                f"{median(each.ttft_ms.p99 for each in found):,.0f}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Runs everything and prints a table for each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="bursts,batches")
    options = parser.parse_args()
    for name in options.only.split(","):
        load = workload(name)
        prompts = Prompts(load, BLOCK_SIZE)
        runs = {
            (policy, case): [run(load, prompts, policy, case, seed) for seed in range(options.seeds)]
            for policy in POLICIES
            for case in CASES
        }
        print(f"\n{name}, medians of {options.seeds} seeds\n\n{table(runs)}", flush=True)


if __name__ == "__main__":
    main()
