"""Runs the same operations through kvrouter's index and NVIDIA Dynamo's, alternating, and prints a table with ratios.

    python bench/core/run.py [--rounds 5] [--only trace16,trace64,...] [--cpu]

Dynamo's ``ai-dynamo-runtime`` wheel is expected in ``$PEERS_WORK/venv``, the lists of operations in
``$PEERS_WORK/data``. Without them kvrouter runs alone, on what it can generate. Each measurement is a process of its
own; the two alternate, so that other load on the machine affects both. Results are medians of the rounds with the
lowest and the highest. Every part takes less than four minutes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from alone import PARTS
from comparison import COMPARED, compare
from measure import Runner
from rich.console import Console

ALL = (*COMPARED, *PARTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each measurement")
    parser.add_argument("--cpu", action="store_true", help="processor time, where the machine does other work too")
    parser.add_argument("--only", default=",".join(ALL), help="parts, by comma")
    options = parser.parse_args()
    only = options.only.split(",")
    if unknown := set(only) - set(ALL):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    work = Path(os.environ.get("PEERS_WORK", "peers-work"))
    peer = work / "venv" / "bin" / "python"
    console = Console(width=160)
    console.print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if not peer.exists():
        console.print("No peer: set PEERS_WORK to where ../shared/peers/setup.sh installed it. Ours runs alone.")
    runner = Runner(peer if peer.exists() else None, options.rounds, ("--cpu",) if options.cpu else ())
    compare(console, runner, work / "data", [part for part in COMPARED if part in only])
    for part, table in PARTS.items():
        if part in only:
            table(console, runner)


if __name__ == "__main__":
    main()
