"""Measures what a request costs: kvrouter in one process and split, beside Dynamo in the same run.

    python bench/request/run.py [--only requests,stream] [--rounds 3] [--seconds 5] [--json FILE] [--before FILE]

Dynamo and the routers of SGLang and vLLM are expected where PEERS_WORK says; without them kvrouter runs alone, and bars
that are ratios are not measured.
Load comes from wrk. Systems run beside each other and are under load in turn, so that other work on the machine affects
them alike. ``memory-one`` and ``memory-split`` send up to a million requests each and run only when they are named.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import report
import traffic
import uvloop
from bars import ONE_PROCESS, PEER, SPLIT, SPLIT_IN_TWO
from load import NoLoad, installed
from long import long
from memory import memory
from overlap import overlap
from rich.console import Console
from routers import FORWARDERS, PICKERS, available
from samples import Samples
from sending import sending
from systems import peer_home

HERE = Path(__file__).parent
DEFAULT_SYSTEMS = (ONE_PROCESS, SPLIT, PEER)
DEFAULT = ("requests", "stream", "overlap", "decisions", "emit")
CORNERS = {f"corners-{workers}": workers for workers in traffic.CORNER_WORKERS}
ROUTES = {"forward": FORWARDERS, "picker": PICKERS}
NAMED = ("text", "long", *ROUTES, *CORNERS, "memory-one", "memory-split")


async def main(options: argparse.Namespace, console: Console) -> Samples:
    samples = Samples()
    say = partial(console.print, highlight=False, style="dim")
    systems = [name for name in options.systems.split(",") if name != PEER or peer_home()]
    chosen = {"names": systems, "options": ("--router-mode", options.mode) if options.mode else ()}

    async def decisions(directory: Path) -> None:  # noqa: ARG001 - like the other parts
        await _decisions(samples, options.rounds)

    def over_http(part: Callable[..., Awaitable[None]], directory: Path) -> Awaitable[None]:
        return part(samples, directory, options.rounds, options.seconds, say, **chosen)

    def over_routes(names: tuple[str, ...], directory: Path) -> Awaitable[None]:
        there = available(names, say)
        return traffic.routes(samples, directory, options.rounds, options.seconds, say, names=there)

    def in_memory(name: str, directory: Path) -> Awaitable[None]:
        return memory(samples, directory, name, options.requests, options.minutes, say)

    parts: dict[str, Callable[[Path], Awaitable[None]]] = {
        "requests": partial(over_http, traffic.requests),
        "stream": partial(over_http, traffic.stream),
        "text": partial(over_http, traffic.text),
        "long": partial(over_http, long),
        "overlap": lambda directory: overlap(samples, directory, options.rounds, options.seconds, say),
        "decisions": decisions,
        "emit": lambda _: sending(samples, say),
        "memory-one": partial(in_memory, ONE_PROCESS),
        "memory-split": partial(in_memory, SPLIT),
    }
    for name, workers in CORNERS.items():
        parts[name] = partial(over_http, partial(traffic.corners, workers=workers))
    for name, routers in ROUTES.items():
        parts[name] = partial(over_routes, routers)
    for name in options.only.split(","):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="bench-request-") as directory:
            await parts[name](Path(directory))
        say(f"{name} took {time.monotonic() - began:.0f} s")
    return samples


async def _decisions(samples: Samples, rounds: int) -> None:
    for round_number in range(rounds):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(HERE / "decisions.py")), stdout=asyncio.subprocess.PIPE
        )
        said, _ = await process.communicate()
        for mode, values in json.loads(said).items():
            samples.add("decision", mode, round_number, values)


def _revision() -> str:
    return subprocess.run(
        ["git", "describe", "--always", "--dirty"],  # noqa: S607
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(DEFAULT), help=f"parts, by comma; further parts: {', '.join(NAMED)}")
    parser.add_argument(
        "--systems", default=",".join(DEFAULT_SYSTEMS), help=f"systems, by comma; a further one: {SPLIT_IN_TWO}"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each row and system")
    parser.add_argument("--seconds", type=float, default=5, help="time of a run")
    parser.add_argument("--requests", type=int, default=1_000_000, help="requests of the memory parts")
    parser.add_argument("--minutes", type=float, default=9, help="longest time of a memory part")
    parser.add_argument("--mode", default="", help="routing mode of kvrouter; the Scheduler's default if empty")
    parser.add_argument("--json", type=Path, help="file for the samples")
    parser.add_argument("--before", type=Path, help="file with samples of an earlier run, to compare with")
    options = parser.parse_args(arguments)
    if unknown := set(options.only.split(",")) - {*DEFAULT, *NAMED}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join((*DEFAULT, *NAMED))}")
    if unknown := set(options.systems.split(",")) - {*DEFAULT_SYSTEMS, SPLIT_IN_TWO}:
        parser.error(f"no such system: {', '.join(sorted(unknown))}")
    return options


def run(options: argparse.Namespace) -> None:
    console = Console(width=None if sys.stdout.isatty() else 180)
    if peer_home() is None:
        console.print("No peer: PEERS_WORK does not name a folder with Dynamo. kvrouter runs alone.")
    if not installed():
        raise SystemExit("wrk is not on the PATH: install your system's package (Debian: apt-get install wrk)")
    load_before = os.getloadavg()[0]
    try:
        samples = uvloop.run(main(options, console))
    except NoLoad as error:
        raise SystemExit(str(error)) from None
    console.print(f"{_revision()}; load average before the run {load_before:.1f} on {os.cpu_count()} cores")
    console.print(report.measurements(samples))
    earlier = Samples.decode(json.loads(options.before.read_text())["samples"]) if options.before else None
    console.print(report.bars(samples, earlier))
    if options.json:
        about = {"revision": _revision(), "unix_seconds": round(time.time()), "load_average": load_before}
        options.json.write_text(json.dumps({**about, "samples": samples.encode()}, indent=1) + "\n")


if __name__ == "__main__":
    run(parse())
