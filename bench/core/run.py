"""Plays the same operations through our index and through NVIDIA Dynamo's, in turn, and prints one table with ratios.

    python bench/core/run.py [--rounds 5] [--cpu] [--only trace,memory,hashing,steady,growth,worst,concurrent]

The peer is the ``ai-dynamo-runtime`` wheel in ``$PEERS_WORK/venv``, its op lists are in ``$PEERS_WORK/data`` (see
``../shared/peers``). Without them, ours runs alone, on what it can make for itself. Each measurement is a process of
its own, and the two take turns, so that what else the machine does falls on both. Figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
CASES = ("trace", "memory", "hashing", "steady", "growth", "worst", "concurrent")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the comparison."""

    name: str
    script: str
    arguments: tuple[str, ...]
    figure: str
    bar: str
    """What the ratio, or our figure, is to reach."""
    lower_is_better: bool = True


def comparison(data: Path, cpu: bool) -> list[tuple[str, Line]]:
    """All lines, by case."""
    lines: list[tuple[str, Line]] = []
    clock = ("--cpu",) if cpu else ()
    for workers in (16, 64):
        ops = data / f"ops_w{workers}.npz"
        if not ops.exists():
            continue
        arguments = (str(ops), "--verify", *clock)
        name = f"trace, {workers} workers, from empty (the table grows)"
        for figure, bar in (("stored ns/block", "8x"), ("removed ns/block", "5x"), ("query us", "15x")):
            lines.append(("trace", Line(f"{name}: {figure}", "trace.py", arguments, figure, bar)))
        for figure in ("query p99 us", "wrong"):
            bar = "0" if figure == "wrong" else "-"
            lines.append(("trace", Line(f"{name}: {figure}", "trace.py", arguments, figure, bar)))
    for kind, name, bar in (
        ("one", "one holder", "<= 36"),
        ("four", "four holders, equal engine hashes", "<= 40"),
        ("private", "four holders, engine hashes of their own", "<= 100"),
    ):
        arguments = ("memory", kind, "1000000", "512")
        lines.append(("memory", Line(f"resident bytes/block, {name}", "synthetic.py", arguments, "bytes/block", bar)))
    lines.append(
        ("hashing", Line("hashing, Mtokens/s", "synthetic.py", ("hashing", "12000"), "Mtokens/s", "10x", False))
    )
    for figure in ("stored ns/block", "removed ns/block", "query us", "growth p99.9 us"):
        arguments = ("steady", "1000000", "512")
        lines.append(("steady", Line(f"1 M live, chains of 512: {figure}", "synthetic.py", arguments, figure, "-")))
    return lines


class Runner:
    """Runs children, and keeps what they said: lines that share a child share its rounds."""

    def __init__(self, peer: Path | None, rounds: int) -> None:
        self.peer = peer
        self.rounds = rounds
        self._said: dict[tuple[str, ...], dict[str, list[dict[str, float]]]] = {}

    def figures(self, script: str, arguments: tuple[str, ...]) -> dict[str, list[dict[str, float]]]:
        """Engine → figures of each round."""
        key = (script, *arguments)
        if key not in self._said:
            said: dict[str, list[dict[str, float]]] = {"kvrouter": [], "dynamo": []}
            for _ in range(self.rounds):
                said["kvrouter"].append(child(Path(sys.executable), script, "kvrouter", arguments))
                if self.peer is not None:
                    said["dynamo"].append(child(self.peer, script, "dynamo", arguments))
            self._said[key] = said
        return self._said[key]


def child(python: Path, script: str, engine: str, arguments: tuple[str, ...]) -> dict[str, float]:
    """Figures of one measurement, in a process of its own."""
    command = [str(python), str(HERE / script), engine, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def spread(figures: list[dict[str, float]], name: str) -> str:
    values = [one[name] for one in figures]
    return f"{statistics.median(values):,.2f} [{min(values):,.2f} .. {max(values):,.2f}]"


def compare(console: Console, runner: Runner, lines: list[Line]) -> None:
    """Prints the table of ours against the peer's."""
    table = Table("measurement", "kvrouter", "Dynamo", "ratio", "bar", title="median [least .. most]")
    for line in lines:
        said = runner.figures(line.script, line.arguments)
        ours, theirs = said["kvrouter"], said["dynamo"]
        ratio = ""
        if theirs and line.figure != "wrong":
            our, their = (statistics.median(one[line.figure] for one in figures) for figures in (ours, theirs))
            ratio = f"{their / our if line.lower_is_better else our / their:.1f}x"
        table.add_row(
            line.name, spread(ours, line.figure), spread(theirs, line.figure) if theirs else "", ratio, line.bar
        )
    console.print(table)


def alone(console: Console, title: str, runs: Mapping[str, tuple[str, ...]]) -> None:
    """Prints figures of ours that have no counterpart."""
    table = Table("case", "figure", "value", title=title)
    for name, arguments in runs.items():
        for figure, value in child(Path(sys.executable), "synthetic.py", "kvrouter", arguments).items():
            table.add_row(name, figure, f"{value:,.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each measurement")
    parser.add_argument("--cpu", action="store_true", help="processor time for the trace, where the machine is shared")
    parser.add_argument("--only", default=",".join(CASES), help="cases, by comma")
    options = parser.parse_args()
    only = set(options.only.split(","))
    if unknown := only - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    work = Path(os.environ.get("PEERS_WORK", "peers-work"))
    peer = work / "venv" / "bin" / "python"
    console = Console(width=150)
    console.print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if not peer.exists():
        console.print("No peer: set PEERS_WORK to where ../shared/peers/setup.sh installed it. Ours runs alone.")
    lines = [line for case, line in comparison(work / "data", options.cpu) if case in only]
    if lines:
        compare(console, Runner(peer if peer.exists() else None, options.rounds), lines)
    if "growth" in only:
        sizes = {f"{millions} M blocks": ("steady", f"{millions}000000", "512") for millions in (1, 4, 16)}
        alone(console, "growth, chains of 512", sizes)
        alone(console, "departure", {"1 M blocks, 16 workers": ("departure", "1000000")})
    if "worst" in only:
        alone(console, "worst cases", {"": ("worst",)})
    if "concurrent" in only:
        rates = {"queries alone": ("concurrent", "0"), "beside 2,000 batches/s": ("concurrent", "2000")}
        alone(console, "queries of 750 blocks from Python, a second thread applying batches of 512", rates)


if __name__ == "__main__":
    main()
