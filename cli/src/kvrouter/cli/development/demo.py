"""``kvrouter demo``: replays the same requests through the same system, once for each routing mode."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import typer
from kvrouter.cli.development.options import (
    Blocks,
    BlockSize,
    Load,
    Requests,
    Workers,
    check_modes,
    parse_time_scale,
    read_requests,
)
from kvrouter.cli.interrupts import run_interruptibly
from kvrouter.devtools.replay.charts import DrawnRun, draw
from kvrouter.devtools.replay.frontend_target import FrontendTarget, ReplayOptions
from kvrouter.devtools.replay.open_loop import replay
from kvrouter.devtools.replay.pacing import TimeScale
from kvrouter.devtools.replay.probes import event_counts, faulty_events, histogram_quantile
from kvrouter.devtools.replay.progress import replay_progress
from kvrouter.devtools.replay.report import print_report, write_json
from kvrouter.devtools.replay.statistics import RunStatistics, SystemCounts, statistics_of_run
from kvrouter.devtools.system.stack import Stack, StackOptions, running_stack
from kvrouter.devtools.traces.reader import TraceRequest
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import frontend_pb2
from rich.console import Console

DEFAULT_LOAD = 2.5
DEFAULT_CLOCK = 2.0
DEFAULT_REQUESTS = 500
DEFAULT_MODES = ("round-robin", "kv", "forecast")
STEP_LATENESS = "kvrouter_mocker_step_lateness_seconds"
"""Histogram of each worker: lateness of its steps in engine seconds."""

_STREAM_INTERVAL = 64
"""Tokens in each piece of a response. An engine generates hundreds of tokens per second; with compressed time, one
message for each token would measure this machine's gRPC."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of a demo."""

    requests: Sequence[TraceRequest]
    trace_name: str
    time_scale: TimeScale
    modes: Sequence[str]
    """Routing modes; each runs on a system of its own."""
    workers: int
    blocks: int
    block_size: int
    results: Path
    """Folder for the picture, the statistics and the logs; created if it is missing."""


async def demo(options: DemoOptions, console: Console) -> list[RunStatistics]:
    """Runs every mode, and prints, writes and draws the statistics.

    Raises:
        ProcessDied, StackFailed, StartFailed, BinaryMissing: a system did not become ready, or did not stay up.
        OSError: results cannot be written.
    """
    options.results.mkdir(parents=True, exist_ok=True)
    runs = [await _run(mode, options, console) for mode in options.modes]
    run_statistics = [run.statistics for run in runs]
    write_json(options.results / "statistics.json", run_statistics, options.trace_name)
    draw(options.results / "picture.png", runs)
    print_report(console, run_statistics)
    console.print()
    for what, name in (("picture", "picture.png"), ("statistics", "statistics.json"), ("logs", "logs")):
        console.print(f"{what}: {options.results / name}", highlight=False, soft_wrap=True)
    return run_statistics


async def _run(mode: str, options: DemoOptions, console: Console) -> DrawnRun:
    logs = options.results / "logs" / mode
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.glob("*.log"):
        old.unlink()
    say: Callable[[str], None] = lambda words: console.print(f"[bold]{mode}[/bold]: {words}")  # noqa: E731
    with tempfile.TemporaryDirectory(prefix="kvrouter-") as directory:
        stack_options = StackOptions(
            directory=Path(directory),
            logs=logs,
            workers=options.workers,
            blocks=options.blocks,
            block_size=options.block_size,
            clock=options.time_scale.clock,
            stream_interval=_STREAM_INTERVAL,
            mode=mode,
        )
        async with running_stack(stack_options, say) as stack:
            run = await _measure(stack, mode, options, console)
            say("stopping")
    return run


async def _measure(stack: Stack, mode: str, options: DemoOptions, console: Console) -> DrawnRun:
    async with open_channel(stack.frontend) as channel:
        frontend = cast("Frontend", remote(frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"], channel))
        with replay_progress(console, mode, len(options.requests)) as on_end:
            target = FrontendTarget(frontend, ReplayOptions(model=stack.options.model, id_prefix=mode))
            result = await replay(target, options.requests, options.time_scale, on_end)
    events = await event_counts(stack.indexer)
    late_s = await histogram_quantile(stack.worker_metrics, STEP_LATENESS, 0.99)
    counts = SystemCounts(
        events_applied=events.applied if events is not None else None,
        events_faulty=faulty_events(events) if events is not None else None,
        step_late_p99_ms=late_s * 1000 if late_s is not None else None,
    )
    run_statistics = statistics_of_run(
        result,
        mode=mode,
        workers=options.workers,
        block_size=options.block_size,
        time_scale=options.time_scale,
        counts=counts,
    )
    return DrawnRun(run_statistics, result.records)


def demo_command(
    trace: Annotated[Path | None, typer.Option(help="Mooncake trace; the shipped one by default.")] = None,
    requests: Requests = None,
    load: Load = DEFAULT_LOAD,
    clock: Annotated[float, typer.Option(help="Engine seconds that pass in one second of wall time.")] = DEFAULT_CLOCK,
    workers: Workers = 8,
    blocks: Blocks = 16_384,
    block_size: BlockSize = 16,
    mode: Annotated[
        list[str] | None, typer.Option(help="Routing mode to run; by default round-robin, kv and forecast.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Directory for the picture, the results as JSON, and the logs.")] = Path(
        "demo-results"
    ),
) -> None:
    """Replay a real trace through a whole system, once for each routing mode, and compare the results."""
    modes = check_modes(mode or list(DEFAULT_MODES))
    limit = DEFAULT_REQUESTS if requests is None and trace is None else requests
    options = DemoOptions(
        requests=read_requests(trace, limit),
        trace_name=str(trace) if trace is not None else "conversation_trace.jsonl.gz (shipped)",
        time_scale=parse_time_scale(load, clock),
        modes=modes,
        workers=workers,
        blocks=blocks,
        block_size=block_size,
        results=results,
    )
    run_statistics = run_interruptibly(demo(options, Console()))
    if not all(run.valid and not run.errors for run in run_statistics):
        raise typer.Exit(1)
