"""``kvrouter demo``: replays the same requests through the same system, once for each routing mode."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvrouter.devtools.replay.charts import draw
from kvrouter.devtools.replay.frontend_target import FrontendTarget, ReplayOptions
from kvrouter.devtools.replay.open_loop import replay
from kvrouter.devtools.replay.pacing import TimeScale
from kvrouter.devtools.replay.probes import event_counts, faulty_events, histogram_quantile
from kvrouter.devtools.replay.progress import replay_progress
from kvrouter.devtools.replay.report import print_report, write_json
from kvrouter.devtools.replay.statistics import RunStatistics, SystemCounts, statistics_of_run
from kvrouter.devtools.system.stack import Stack, StackOptions, running_stack
from kvrouter.devtools.traces.reader import TraceRequest
from kvrouter.devtools.traces.reuse import possible_hit_rate
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import frontend_pb2
from rich.console import Console

STEP_LATENESS = "kvrouter_mocker_step_lateness_seconds"
"""Histogram of each worker: lateness of its steps in engine seconds."""

_AROUND_SECONDS = 20.0
"""Time of a run besides its arrivals: to start the system, and to finish its last requests."""
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
    verbose: bool = False
    """Whether to print every statistic."""
    host_blocks: int = 0
    """KV blocks of each engine in host memory; 0 for none."""


async def demo(options: DemoOptions, console: Console) -> list[RunStatistics]:
    """Runs every mode, and prints, writes and draws the statistics.

    Raises:
        ProcessDied, StackFailed, StartFailed, BinaryMissing: a system did not become ready, or did not stay up.
        OSError: results cannot be written.
    """
    options.results.mkdir(parents=True, exist_ok=True)
    console.print(opening(options), highlight=False)
    run_statistics = [await _run(mode, options, console) for mode in options.modes]
    write_json(options.results / "statistics.json", run_statistics, options.trace_name)
    draw(options.results / "picture.png", run_statistics)
    print_report(console, run_statistics, verbose=options.verbose)
    console.print()
    for what, name in (("picture", "picture.png"), ("statistics", "statistics.json"), ("logs", "logs")):
        console.print(f"{what}: {options.results / name}", highlight=False, soft_wrap=True)
    return run_statistics


def opening(options: DemoOptions) -> str:
    """Returns what the demo does, and how long it takes."""
    sending = options.time_scale.due_wall_seconds(options.requests[-1].arrival_ms) if options.requests else 0.0
    minutes = len(options.modes) * (sending + _AROUND_SECONDS) / 60
    about = "a minute" if minutes < 1.5 else f"{minutes:.0f} minutes"
    return (
        f"Sends {len(options.requests):,} requests ({options.trace_name}) to {options.workers} simulated engines, "
        f"once for each routing mode: {', '.join(options.modes)}. Takes about {about}."
    )


async def _run(mode: str, options: DemoOptions, console: Console) -> RunStatistics:
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
            host_blocks=options.host_blocks,
            block_size=options.block_size,
            clock=options.time_scale.clock,
            stream_interval=_STREAM_INTERVAL,
            mode=mode,
        )
        async with running_stack(stack_options, say) as stack:
            run = await _measure(stack, mode, options, console)
            say("stopping")
    return run


async def _measure(stack: Stack, mode: str, options: DemoOptions, console: Console) -> RunStatistics:
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
    return statistics_of_run(
        result,
        mode=mode,
        workers=options.workers,
        block_size=options.block_size,
        time_scale=options.time_scale,
        counts=counts,
        possible_hit_rate=possible_hit_rate(options.requests, options.block_size),
    )
