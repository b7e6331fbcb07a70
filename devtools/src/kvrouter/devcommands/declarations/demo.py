"""Declares ``kvrouter demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from kvrouter.cli.interrupts import run_interruptibly
from kvrouter.devcommands.declarations.options import (
    Blocks,
    BlockSize,
    Load,
    Requests,
    Verbose,
    Workers,
    check_modes,
    parse_time_scale,
    read_requests,
)

DEFAULT_LOAD = 2.5
DEFAULT_CLOCK = 1.0
DEFAULT_REQUESTS = 400
DEFAULT_TRACE = "documents"
DEFAULT_MODES = ("round-robin", "kv", "forecast")


def demo_command(
    trace: Annotated[
        str,
        typer.Option(help="Mooncake trace, recording, or workload (prompts, chat, documents, agents, bursts)."),
    ] = DEFAULT_TRACE,
    requests: Requests = None,
    load: Load = DEFAULT_LOAD,
    clock: Annotated[float, typer.Option(help="Engine seconds that pass in one second of wall time.")] = DEFAULT_CLOCK,
    workers: Workers = 8,
    blocks: Blocks = 16_384,
    host_blocks: Annotated[int, typer.Option(min=0, help="KV blocks of each engine in host memory; 0 for none.")] = 0,
    block_size: BlockSize = 16,
    mode: Annotated[
        list[str] | None, typer.Option(help="Routing mode to run; by default round-robin, kv and forecast.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Directory for the picture, the results as JSON, and the logs.")] = Path(
        "demo-results"
    ),
    verbose: Verbose = False,
) -> None:
    """Send a workload through a whole system, once for each routing mode, and compare the results."""
    from kvrouter.devcommands.demo import DemoOptions, demo
    from rich.console import Console

    modes = check_modes(mode or list(DEFAULT_MODES))
    limit = DEFAULT_REQUESTS if requests is None and trace == DEFAULT_TRACE else requests
    options = DemoOptions(
        requests=read_requests(trace, limit),
        trace_name=trace,
        time_scale=parse_time_scale(load, clock),
        modes=modes,
        workers=workers,
        blocks=blocks,
        host_blocks=host_blocks,
        block_size=block_size,
        results=results,
        verbose=verbose,
    )
    run_statistics = run_interruptibly(demo(options, Console()))
    if not all(run.valid and not run.errors for run in run_statistics):
        raise typer.Exit(1)
