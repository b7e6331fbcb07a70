"""Runs every policy on every workload, fleet and load, and under disturbances; prints Markdown tables.

    .venv/bin/python bench/quality/tables.py [--minutes 4] [--jobs 2] [--only chat,half-speed] [--fresh]

Runs what the results lack, one line of JSON for each run, and prints the tables of bench/routing.md and the entries in
which ``forecast`` loses: its median over the seeds is higher than another policy's, and their ranges do not overlap.
A later call continues with the missing runs, so that it can be given minutes at a time. A run depends on its key and on
the code: use --fresh after a change of the code. Runs proceed seed by seed, so that tables are complete early; further
seeds turn values into medians with their range. The whole matrix takes about two hours of CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from matrix import (
    CONDITIONS,
    FLOOR,
    MOST_SEEDS,
    ROOT,
    SHARED_TRACE,
    TRAFFIC,
    WEIGHTS,
    Cell,
    cells,
    loads_of,
    measure,
)


def results_by_key(results: Path, *, fresh: bool) -> dict[str, Any]:
    """Reads the results of earlier runs, by key. Deletes them first if ``fresh`` is set."""
    results.parent.mkdir(parents=True, exist_ok=True)
    if fresh:
        results.unlink(missing_ok=True)
    if not results.exists():
        return {}
    return {row["key"]: row for row in map(json.loads, results.read_text("utf-8").splitlines())}


def run_missing(results: Path, known: dict[str, Any], only: Sequence[str], until: float, trace: Path, jobs: int) -> int:
    """Runs missing cells until a time, ``jobs`` at once. Returns how many are still missing."""
    wanted = [cell for cell in cells() if not only or any(word in cell.key.split("/") for word in only)]
    missing = [cell for cell in wanted if cell.key not in known]
    running: set[Future[dict[str, Any]]] = set()
    with results.open("a", encoding="utf-8") as lines, ProcessPoolExecutor(jobs) as pool:

        def note(ended: set[Future[dict[str, Any]]]) -> None:
            for row in (each.result() for each in ended):
                known[row["key"]] = row
                lines.write(json.dumps(row) + "\n")
                lines.flush()
                print(f"{row['key']}: {row['mean']:.0f} ms, {row['cpu_s']:.1f} s", file=sys.stderr, flush=True)

        for cell in missing:
            if len(running) == jobs:
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                note(ended)
            if time.monotonic() > until:
                break
            running.add(pool.submit(measure, cell, trace))
        note(running)
    return sum(cell.key not in known for cell in missing)


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
    """Yields every table with its heading: for each workload, then for each disturbance, then for each larger fleet."""
    for traffic, spec in TRAFFIC.items():
        if spec.loads:
            lines = table(known, "plain", {f"load {load:g}": (traffic, load) for load in spec.loads})
            requests = "All" if spec.requests is None else f"{spec.requests:,}"
            about = f"{requests} requests on {spec.engines} engines."
            if lines:
                yield "\n".join([f"### {traffic.capitalize()}", "", about, "", *lines])
    for name, condition in CONDITIONS.items():
        if condition.loads is None and name != "plain":
            at = {f"{each}, load {load:g}": (each, load) for each in TRAFFIC for load in loads_of(each, name)}
            if lines := table(known, name, at):
                yield "\n".join([f"### {condition.title}", "", *lines])
    for name, condition in CONDITIONS.items():
        for traffic in TRAFFIC if condition.loads is not None else ():
            lines = table(known, name, {f"load {load:g}": (traffic, load) for load in loads_of(traffic, name)})
            if lines:
                yield "\n".join([f"### {traffic.capitalize()}: {condition.title}", "", *lines])


def losing(known: Mapping[str, Any]) -> Iterator[str]:
    """Yields the entries in which ``forecast`` loses, a row each."""
    for name in CONDITIONS:
        for traffic in TRAFFIC:
            for load in loads_of(traffic, name):
                found = entries(known, traffic, name, load)
                own = found.get("forecast")
                for policy, other in found.items():
                    if own is None or policy == FLOOR or own.ends("mean")[0] <= other.ends("mean")[1]:
                        continue
                    yield (
                        f"| {traffic}, {name}, load {load:g} | {policy} | {own.middle('mean'):,.1f} | "
                        f"{other.middle('mean'):,.1f} | {min(len(own.rows), len(other.rows))} |"
                    )


def show(known: Mapping[str, Any]) -> None:
    """Prints all tables and the losing entries."""
    print("Mean time to first token, ms (lowest to highest seed) / its p99 / share within objectives / reuse\n")
    print("\n\n".join(tables(known)))
    print("\n### Losing entries\n\n| cell | policy | forecast, ms | policy, ms | seeds |\n|---|---|---|---|---|")
    print("\n".join(losing(known)))


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "quality.jsonl")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop after this time, in minutes; the next call continues"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, each in a process of its own")
    parser.add_argument("--only", default="", help="run only keys with one of these words, separated by commas")
    parser.add_argument("--trace", type=Path, default=SHARED_TRACE, help="whole trace; the shipped one is its start")
    parser.add_argument("--fresh", action="store_true", help="delete earlier results, because the code has changed")
    options = parser.parse_args()
    known = results_by_key(options.results, fresh=options.fresh)
    until = time.monotonic() + options.minutes * 60
    only = [word for word in options.only.split(",") if word]
    left = run_missing(options.results, known, only, until, options.trace, options.jobs)
    show(known)
    if left:
        print(f"\n{left} runs are missing", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
