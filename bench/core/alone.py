"""Measurements without a counterpart in Dynamo: growth, worst cases, returned memory, threads."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from measure import Measurements, Runner, spread
from rich.console import Console
from rich.table import Table

RUST = Path(__file__).parents[2] / "core/rust"
SIZES = {"1 M": "1000000", "10 M": "10000000", "50 M": "50000000"}
STEADY = (
    "growing ns/block",
    "stored ns/block",
    "removed ns/block",
    "query us",
    "query p99 us",
    "answer for all tiers us",
    "growth p99.9 us",
    "growth worst us",
    "most moved",
    "bytes/block",
    "grew while measured, %",
)
PROMPTS = ("128", "512", "2048", "8192", "32768", "65536")


def columns(
    console: Console, title: str, said: dict[str, list[Measurements]], measurements: tuple[str, ...] = ()
) -> None:
    """Returns a table with a column for each case."""
    table = Table(r"median \[least .. most]", *said, title=title)
    for figure in measurements or tuple(next(iter(said.values()))[0]):
        table.add_row(figure, *(spread(rounds, figure) if figure in rounds[0] else "" for rounds in said.values()))
    console.print(table)


def steady(
    console: Console, runner: Runner, title: str, sizes: Mapping[str, tuple[str, ...]], rounds: int | None
) -> None:
    said = {name: runner.ours("synthetic.py", "steady", *size, rounds=rounds) for name, size in sizes.items()}
    columns(console, title, said, STEADY)


def sixteen(console: Console, runner: Runner) -> None:
    sizes = {f"{millions} M live": (f"{millions}000000", "512") for millions in (1, 4, 16)}
    steady(console, runner, "16 M against 1 M, chains of 512 (bar: within 3 times)", sizes, None)


def blocks(console: Console, runner: Runner) -> None:
    steady(console, runner, "chains of 512", {name: (size, "512") for name, size in SIZES.items()}, 3)


def workers(console: Console, runner: Runner) -> None:
    sizes = {f"{count} workers": ("1000000", "448", str(count)) for count in (16, 256, 2048)}
    steady(console, runner, "1 M live, chains of 448 below 64 blocks that all workers hold", sizes, None)


def prompts(console: Console, runner: Runner) -> None:
    said = {f"{length} blocks": runner.ours("prompts.py", length) for length in PROMPTS}
    columns(console, "length of prompts, at 1 M live", said)


def worst(console: Console, runner: Runner) -> None:
    columns(console, "worst cases", {"kvrouter": runner.ours("worst.py")})


def departure(console: Console, runner: Runner) -> None:
    columns(console, "workers leave", {"1 M blocks, 16 workers": runner.ours("churn.py", "departure", "1000000")})


def day(console: Console, runner: Runner) -> None:
    said = runner.ours("churn.py", "day", "24", "3600000", rounds=1)
    columns(console, "a day of churn: 1,000 blocks a second", {"16 workers of 32,768 blocks": said})


def threads(console: Console, runner: Runner) -> None:
    said = {
        "queries alone": runner.ours("threads.py", "0"),
        "beside 2,000 batches/s": runner.ours("threads.py", "2000"),
    }
    columns(console, "queries of 750 blocks from Python, beside a thread that applies batches of 512", said)


def native(console: Console, _: Runner) -> None:
    """Runs native threads only: an example of the crate, which prints its own results."""
    example = RUST / "examples/threads.rs"
    if shutil.which("cargo") is None or not example.exists():
        console.print("native threads only: no Rust toolchain here")
        return
    command = ["cargo", "run", "--release", "-q", "--no-default-features", "--example", example.stem]
    done = subprocess.run(command, cwd=RUST, stdout=subprocess.PIPE, check=True, text=True)
    console.print(f"native threads only\n{done.stdout}", markup=False)


PARTS: dict[str, Callable[[Console, Runner], None]] = {
    "sixteen": sixteen,
    "blocks": blocks,
    "workers": workers,
    "prompts": prompts,
    "worst": worst,
    "departure": departure,
    "day": day,
    "threads": threads,
    "native": native,
}
