"""Runs one workload through Dynamo's offline simulation and through this simulator, side by side.

    PEERS_WORK=... .venv/bin/python bench/quality/run.py [TRACE|GENERATOR] [--loads 2,4,5,6] [--weights 1,4,64]

PEERS_WORK is the directory with Dynamo's built simulation. Exit status 1 if values that must agree do not: round-robin
compares the engines (prefix reuse within 0.5 points, median within 2%, p99 and mean within 3%), kv the routing (mean
within 3%, up to --agree-up-to: past the knee Dynamo itself varies by a fifth between runs).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.simulator.plan import Plan, run_plan
from kvrouter.simulator.results.report import Run
from kvrouter.simulator.simulation import Setting
from kvrouter.simulator.workloads import traces
from kvrouter.simulator.workloads.generators import GENERATORS, generate
from kvrouter.simulator.workloads.workload import Workload

HERE = Path(__file__).parent
SHARED_TRACE = HERE.parents[2] / "shared" / "traces" / "conversation_trace.jsonl"
COLUMNS = ("reuse", "p50", "p90", "p99", "mean", "within_slo")
BOUNDS = {
    "round-robin": {"reuse": 0.005, "p50": 0.02, "p99": 0.03, "mean": 0.03},
    "kv": {"mean": 0.03},
}


@dataclass(frozen=True)
class Row:
    load: float
    policy: str
    peer: Mapping[str, float] | None
    ours: Mapping[str, float]

    def disagreements(self, agree_up_to: float) -> list[str]:
        if self.peer is None or (self.policy != "round-robin" and self.load > agree_up_to):
            return []
        found = []
        for name, bound in BOUNDS.get(self.policy.partition(":")[0], {}).items():
            off = self.ours[name] - self.peer[name]
            off = abs(off if name == "reuse" else off / self.peer[name])
            if off > bound:
                found.append(f"x{self.load:g} {self.policy}: {name} is off by {off:.1%}, the bound is {bound:.1%}")
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default=str(SHARED_TRACE))
    parser.add_argument("--requests", type=int)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--loads", default="2,4,5,6")
    parser.add_argument("--weights", default="1,4,64")
    parser.add_argument("--also", default="forecast", help="our policies that the peer has not")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each of ours, and of the peer's kv; medians")
    parser.add_argument("--agree-up-to", type=float, default=5.0)
    parser.add_argument("--queue", action="store_true", help="the peer's optional queue too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    work = os.environ.get("PEERS_WORK")
    if not work:
        print(
            "PEERS_WORK is not set: run ../shared/peers/setup.sh, and name the folder that it filled", file=sys.stderr
        )
        return 2
    if options.workload in GENERATORS:
        workload = generate(options.workload, options.requests or 6000)
    else:
        workload = traces.read(Path(options.workload), options.requests)
    theirs = run_peer(Path(work), workload, options)
    ours = run_ours(workload, options)
    rows = side_by_side(theirs, ours)
    print(f"{workload.name}: {len(workload.requests):,} requests on {options.workers} workers; TTFT in ms")
    show(rows)
    wrong = [words for row in rows for words in row.disagreements(options.agree_up_to)]
    print("\n".join(wrong) or "all that must agree does")
    if options.json:
        document = [{"load": row.load, "policy": row.policy, "peer": row.peer, "ours": row.ours} for row in rows]
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if wrong else 0


def run_peer(work: Path, workload: Workload, options: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as trace:
        trace.writelines(traces.lines(workload))
        trace.flush()
        command = [str(work / "venv" / "bin" / "python"), str(HERE / "peer.py"), trace.name]
        command += ["--piece-tokens", str(workload.piece_tokens), "--workers", str(options.workers)]
        command += ["--loads", options.loads, "--weights", options.weights, "--repeats", str(options.seeds)]
        command += ["--queue"] if options.queue else []
        done = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, "DYN_LOG": "error"}, check=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def run_ours(workload: Workload, options: argparse.Namespace) -> list[Run]:
    drawn = [*(f"kv:{weight}" for weight in options.weights.split(",")), *filter(None, options.also.split(","))]
    runs = []
    for policies, seeds in ((["round-robin"], 1), (drawn, options.seeds)):
        plan = Plan(
            workload=workload,
            setting=Setting([EngineConfig(hash_seed=number) for number in range(options.workers)], regret=False),
            policies=policies,
            loads=[float(load) for load in options.loads.split(",")],
            seeds=range(seeds),
            slo_ttft_s=2.0,
            slo_itl_s=0.05,
        )
        runs += run_plan(plan)[0]
    return runs


def side_by_side(theirs: Sequence[Mapping[str, Any]], ours: Sequence[Run]) -> list[Row]:
    def middle(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {name: median(row[name] for row in rows) for name in COLUMNS}

    peer: dict[tuple[float, str], list[Mapping[str, float]]] = {}
    for row in theirs:
        peer.setdefault((row["load"], row["policy"]), []).append(row)
    own: dict[tuple[float, str], list[Mapping[str, float]]] = {}
    for run in ours:
        ttft = run.statistics.ttft_ms
        run_statistics = {
            "reuse": run.statistics.reuse,
            "p50": ttft.p50,
            "p90": ttft.p90,
            "p99": ttft.p99,
            "mean": ttft.mean,
        }
        own.setdefault((run.load, run.policy), []).append(run_statistics | {"within_slo": run.statistics.within_slo})
    rows = [
        Row(load, policy, middle(peer[load, policy]) if (load, policy) in peer else None, middle(run_statistics))
        for (load, policy), run_statistics in own.items()
    ]
    only_theirs = [
        Row(load, policy, middle(run_statistics), dict.fromkeys(COLUMNS, float("nan")))
        for (load, policy), run_statistics in peer.items()
        if (load, policy) not in own
    ]
    return sorted([*rows, *only_theirs], key=lambda row: row.load)


def show(rows: Sequence[Row]) -> None:
    print(f"{'load':5}{'policy':18}{'whose':7}" + "".join(f"{name:>11}" for name in COLUMNS))
    for row in rows:
        for whose, run_statistics in (("peer", row.peer), ("ours", row.ours)):
            if run_statistics is None or run_statistics["mean"] != run_statistics["mean"]:
                continue
            cells = [f"{run_statistics['reuse']:11.1%}", *(f"{run_statistics[name]:11,.0f}" for name in COLUMNS[1:])]
            print(f"x{row.load:<4g}{row.policy:18}{whose:7}" + "".join(cells))


if __name__ == "__main__":
    sys.exit(main())
