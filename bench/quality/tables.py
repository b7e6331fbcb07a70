"""Runs every policy on every workload, below, near and past the knee and under disturbances; prints Markdown tables.

    .venv/bin/python bench/quality/tables.py [--minutes 4] [--only chat,half-speed] [--fresh]

Runs what the results lack, one line of JSON for each run, and prints the tables of bench/routing.md. A later call
continues with the missing runs, so that it can be given minutes at a time. A run depends on its key and on the code:
use --fresh after a change of the code. Runs proceed seed by seed, so that tables are complete early; further seeds turn
values into medians with their range.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.simulator.plan import routing_options
from kvrouter.simulator.results.outcome import run_statistics
from kvrouter.simulator.simulation import Setting, simulate
from kvrouter.simulator.workloads import traces
from kvrouter.simulator.workloads.generators import generate
from kvrouter.simulator.workloads.workload import Prompts, Workload

ROOT = Path(__file__).parents[2]
SHARED_TRACE = ROOT.parent / "shared" / "traces" / "conversation_trace.jsonl"
SEEDS, MOST_SEEDS = 5, 10
WEIGHTS = ("kv:1", "kv:4", "kv:64")
OTHERS = ("product", "sticky", "power-of-two", "round-robin", "random")
READ_CACHES = ("forecast", *WEIGHTS, "product", "sticky")
"""Policies that a late index can affect."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """A workload, its engines, and its loads below, near and past the knee."""

    requests: int | None
    engines: int
    loads: Sequence[float]
    disturbed: Sequence[float]
    """Loads at which disturbances are run as well."""
    seeds: int = SEEDS


TRAFFIC: Mapping[str, Traffic] = {
    "prompts": Traffic(3000, 8, (2, 3, 4), (3,)),
    "chat": Traffic(3000, 8, (3, 5, 7), (5,)),
    "documents": Traffic(1500, 8, (1.5, 2, 3), (2,)),
    # The whole trace takes as long as ten other runs, and its seeds differ in random draws only.
    "trace": Traffic(None, 16, (2, 4, 5, 6), (), seeds=1),
}


@dataclass(frozen=True, slots=True)
class Condition:
    """A disturbance, and the policies that it affects."""

    title: str
    policies: Sequence[str]
    event_lag_s: float = 0.0
    every_other_speed: float = 1.0
    calibration_error: float = 1.0
    """Expected duration of steps in the policy's time model over their real duration."""
    seeds: int | None = None
    """Seeds of its runs; None for those of the workload."""

    def setting(self, engines: int) -> Setting:
        """Returns the settings of the simulation."""
        fleet = [EngineConfig(hash_seed=n, speed=self.every_other_speed if n % 2 else 1.0) for n in range(engines)]
        return Setting(fleet, event_lag_s=self.event_lag_s, calibration_error=self.calibration_error, regret=False)


CONDITIONS: Mapping[str, Condition] = {
    "plain": Condition("Nothing wrong", ("forecast", *WEIGHTS, *OTHERS)),
    "event-lag": Condition("Index 50 ms late", READ_CACHES, event_lag_s=0.05),
    "half-speed": Condition(
        "Every other worker at half speed",
        (*READ_CACHES, "power-of-two", "round-robin"),
        every_other_speed=0.5,
        seeds=10,
    ),
    "slow-model": Condition("Forecast times three times too long", ("forecast",), calibration_error=3.0),
    "fast-model": Condition("Forecast times a third of the real ones", ("forecast",), calibration_error=1 / 3),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    traffic: str
    seed: int
    condition: str
    load: float
    policy: str

    @property
    def key(self) -> str:
        """Name of the run in the results."""
        return f"{self.traffic}/{self.seed}/{self.condition}/{self.load:g}/{self.policy}"


def cells() -> Iterator[Cell]:
    """Yields all runs, those of one workload together so that its prompts are hashed once."""
    for seed in range(MOST_SEEDS):
        for traffic, spec in TRAFFIC.items():
            for name, condition in CONDITIONS.items():
                if seed < (condition.seeds or spec.seeds):
                    loads = spec.loads if name == "plain" else spec.disturbed
                    yield from (
                        Cell(traffic, seed, name, load, policy) for load in loads for policy in condition.policies
                    )


def workload_of(traffic: str, seed: int, trace: Path) -> Workload:
    """Returns a workload: the trace, or a generated one."""
    requests = TRAFFIC[traffic].requests
    return traces.read(trace) if requests is None else generate(traffic, requests, seed)


def measure(cell: Cell, workload: Workload, prompts: Prompts) -> dict[str, Any]:
    """Runs one cell. Returns its result."""
    started = time.process_time()
    setting = CONDITIONS[cell.condition].setting(TRAFFIC[cell.traffic].engines)
    setting = replace(setting, options=routing_options(cell.policy), seed=cell.seed)
    summed = run_statistics(simulate(workload.faster(cell.load), setting, prompts), slo_ttft_s=2.0, slo_itl_s=0.05)
    return {
        "key": cell.key,
        "mean": summed.ttft_ms.mean,
        "p99": summed.ttft_ms.p99,
        "slo": summed.good_share,
        "reuse": summed.reuse,
        "itl": summed.itl_ms.p99,
        "cpu_s": time.process_time() - started,
    }


def results_by_key(results: Path, *, fresh: bool) -> dict[str, Any]:
    """Reads the results of earlier runs, by key. Deletes them first if ``fresh`` is set."""
    results.parent.mkdir(parents=True, exist_ok=True)
    if fresh:
        results.unlink(missing_ok=True)
    if not results.exists():
        return {}
    return {row["key"]: row for row in map(json.loads, results.read_text("utf-8").splitlines())}


def run_missing(results: Path, known: dict[str, Any], only: Sequence[str], until: float, trace: Path) -> int:
    """Runs missing cells until a time. Returns how many are still missing."""
    wanted = [cell for cell in cells() if not only or any(word in cell.key.split("/") for word in only)]
    missing = [cell for cell in wanted if cell.key not in known]
    left = len(missing)
    with results.open("a", encoding="utf-8") as lines:
        for (traffic, seed), group in groupby(missing, lambda cell: (cell.traffic, cell.seed)):
            workload = workload_of(traffic, seed, trace)
            prompts = Prompts(workload, EngineConfig().block_size)
            for cell in group:
                if time.monotonic() > until:
                    return left
                row = known[cell.key] = measure(cell, workload, prompts)
                left -= 1
                lines.write(json.dumps(row) + "\n")
                lines.flush()
                print(f"{cell.key}: {row['mean']:.0f} ms, {row['cpu_s']:.1f} s", file=sys.stderr, flush=True)
    return left


@dataclass(frozen=True, slots=True)
class Entry:
    """One policy at one load, with a row for each seed."""

    rows: Sequence[Mapping[str, float]]

    def middle(self, statistic: str) -> float:
        """Returns the median of a statistic."""
        return median(row[statistic] for row in self.rows)

    def ends(self, statistic: str) -> tuple[float, float]:
        """Returns the lowest and the highest value of a statistic."""
        values = [row[statistic] for row in self.rows]
        return min(values), max(values)


def entries(known: Mapping[str, Any], traffic: str, condition: str, load: float) -> dict[str, Entry]:
    """Returns the results so far, by policy."""
    found = {}
    for policy in CONDITIONS[condition].policies:
        keys = [Cell(traffic, seed, condition, load, policy).key for seed in range(MOST_SEEDS)]
        rows = [known[key] for key in keys if key in known]
        if rows:
            found[policy] = Entry(rows)
    return found


def best_weight(found: Mapping[str, Entry]) -> str | None:
    """Returns the weight with the lowest mean, which is known only afterwards."""
    return min((name for name in WEIGHTS if name in found), key=lambda name: found[name].middle("mean"), default=None)


def table(known: Mapping[str, Any], condition: str, columns: Mapping[str, tuple[str, float]]) -> list[str]:
    """Returns a row for each policy and a column for each (workload, load), with the best weight in bold."""
    found = [entries(known, traffic, condition, load) for traffic, load in columns.values()]
    policies = [policy for policy in CONDITIONS[condition].policies if any(policy in column for column in found)]
    if not policies:
        return []
    lines = ["| policy | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for policy in policies:
        texts = [
            cell_text(column[policy], best_weight(column) == policy) if policy in column else "" for column in found
        ]
        lines.append(f"| {policy} | " + " | ".join(texts) + " |")
    return lines


def cell_text(entry: Entry, best: bool) -> str:
    """Returns mean (lowest to highest) / p99 / within objectives / reuse."""
    low, high = entry.ends("mean")
    spread = f" ({low:,.0f} to {high:,.0f})" if round(low) != round(high) else ""
    mean = f"{entry.middle('mean'):,.0f}"
    return (
        f"{f'**{mean}**' if best else mean}{spread} / {entry.middle('p99'):,.0f} / {entry.middle('slo'):.1%} / "
        f"{entry.middle('reuse'):.1%}"
    )


def tables(known: Mapping[str, Any]) -> Iterator[str]:
    """Yields every table with its heading: one for each workload, then one for each disturbance."""
    for traffic, spec in TRAFFIC.items():
        lines = table(known, "plain", {f"load {load:g}": (traffic, load) for load in spec.loads})
        requests = "All" if spec.requests is None else f"{spec.requests:,}"
        about = f"{requests} requests on {spec.engines} engines."
        yield "\n".join([f"### {traffic.capitalize()}", "", about, "", *lines])
    at = {f"{traffic}, load {load:g}": (traffic, load) for traffic, spec in TRAFFIC.items() for load in spec.disturbed}
    for name, condition in CONDITIONS.items():
        if name != "plain":
            yield "\n".join([f"### {condition.title}", "", *table(known, name, at)])


def show(known: Mapping[str, Any]) -> None:
    """Prints all tables."""
    print("Mean time to first token, ms (lowest to highest seed) / its p99 / share within objectives / reuse\n")
    print("\n\n".join(tables(known)))


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "quality.jsonl")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop after this time, in minutes; the next call continues"
    )
    parser.add_argument("--only", default="", help="run only keys with one of these words, separated by commas")
    parser.add_argument("--trace", type=Path, default=SHARED_TRACE, help="whole trace; the shipped one is its start")
    parser.add_argument("--fresh", action="store_true", help="delete earlier results, because the code has changed")
    options = parser.parse_args()
    known = results_by_key(options.results, fresh=options.fresh)
    until = time.monotonic() + options.minutes * 60
    only = [word for word in options.only.split(",") if word]
    left = run_missing(options.results, known, only, until, options.trace)
    show(known)
    if left:
        print(f"\n{left} runs are missing", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
