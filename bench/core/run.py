"""Plays the same operations through our index and through NVIDIA Dynamo's, in turn, and prints one table with ratios.

    python bench/core/run.py [--rounds 5] [--only trace16,trace64,...] [--cpu]

The peer is the ``ai-dynamo-runtime`` wheel in ``$PEERS_WORK/venv``, its op lists are in ``$PEERS_WORK/data`` (see
``../shared/peers``). Without them, ours runs alone, on what it can make for itself. Each measurement is a process of
its own, and the two take turns, so that what else the machine does falls on both. Figures are medians of the rounds,
with the least and the most. Every part takes less than four minutes.
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
