"""``kvrouter replay``: replays a trace through a running system."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import typer
from kvrouter.cli.addresses import parse_address
from kvrouter.cli.development.options import Load, OfModel, Requests, check_modes, parse_time_scale, read_requests
from kvrouter.cli.errors import CommandFailed
from kvrouter.cli.interrupts import run_interruptibly
from kvrouter.devtools.replay.charts import DrawnRun, draw
from kvrouter.devtools.replay.open_loop import ReplayOptions, replay
from kvrouter.devtools.replay.pacing import TimeScale
from kvrouter.devtools.replay.probes import event_counts, faulty_events
from kvrouter.devtools.replay.progress import replay_progress
from kvrouter.devtools.replay.report import print_report, write_json
from kvrouter.devtools.replay.statistics import RunStatistics, SystemCounts, statistics_of_run
from kvrouter.devtools.system.stack import DEFAULT_GRPC_PORT
from kvrouter.devtools.traces.reader import TraceRequest
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import KvRouterError
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import frontend_pb2
from kvrouter.v1.frontend_pb2 import ListModelsRequest, Model
from rich.console import Console

_CALL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ReplayCommand:
    """Options of a replay."""

    requests: Sequence[TraceRequest]
    trace_name: str
    target: str
    """gRPC address of the Frontend, host:port."""
    indexer: str | None
    """gRPC address of an Indexer whose events are counted, host:port; None counts none."""
    model: str | None
    """Model to request; None for the only one that is served."""
    time_scale: TimeScale
    mode: str | None
    """Routing mode of all requests; None for the Scheduler's own."""
    results: Path | None
    """Folder for a picture and the statistics; None writes neither."""


async def replay_running(command: ReplayCommand, console: Console) -> RunStatistics:
    """Replays the trace, prints the statistics, and writes them if a folder is given.

    Raises:
        CommandFailed: the Frontend does not answer, or does not serve the model.
    """
    before = await event_counts(command.indexer) if command.indexer is not None else None
    async with open_channel(command.target) as channel:
        frontend = cast("Frontend", remote(frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"], channel))
        model = await _model(frontend, command)
        mode = command.mode or "the Scheduler's mode"
        options = ReplayOptions(model=model.name, id_prefix=f"replay-{time.time_ns():x}", mode=command.mode)
        with replay_progress(console, mode, len(command.requests)) as on_end:
            result = await replay(frontend, command.requests, command.time_scale, options, on_end)
    after = await event_counts(command.indexer) if command.indexer is not None else None
    counts = SystemCounts(
        events_applied=after.applied - before.applied if before is not None and after is not None else None,
        events_faulty=faulty_events(after) - faulty_events(before)
        if before is not None and after is not None
        else None,
    )
    run_statistics = statistics_of_run(
        result,
        mode=mode,
        workers=model.workers,
        block_size=model.block_size,
        time_scale=command.time_scale,
        counts=counts,
    )
    print_report(console, [run_statistics])
    if command.results is not None:
        command.results.mkdir(parents=True, exist_ok=True)
        write_json(command.results / "statistics.json", [run_statistics], command.trace_name)
        draw(command.results / "picture.png", [DrawnRun(run_statistics, result.records)])
        for name in ("picture.png", "statistics.json"):
            console.print(f"{command.results / name}", highlight=False, soft_wrap=True)
    return run_statistics


async def _model(frontend: Frontend, command: ReplayCommand) -> Model:
    try:
        models = (await frontend.list_models(ListModelsRequest(), deadline=Deadline.after(_CALL_SECONDS))).models
    except KvRouterError as error:
        raise CommandFailed(f"the Frontend at {command.target} does not answer: {error}") from None
    wanted = [model for model in models if command.model in (None, model.name)]
    served = ", ".join(sorted(model.name for model in models)) or "none"
    if not wanted:
        raise CommandFailed(f"{command.target} does not serve {command.model or 'any model'}; it serves: {served}")
    if len(wanted) > 1:
        raise CommandFailed(f"{command.target} serves several models, choose one with --model: {served}")
    return wanted[0]


def replay_command(
    trace: Annotated[
        Path | None, typer.Argument(help="Mooncake trace or recording; the shipped trace by default.")
    ] = None,
    target: Annotated[
        str, typer.Option(help="gRPC address of the Frontend, host:port.")
    ] = f"127.0.0.1:{DEFAULT_GRPC_PORT}",
    indexer: Annotated[
        str | None, typer.Option(help="gRPC address of an Indexer whose events are counted, host:port.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to request; needed only if several are served.")] = None,
    of_model: OfModel = None,
    requests: Requests = None,
    load: Load = 1.0,
    clock: Annotated[
        float, typer.Option(help="Engine seconds that pass in one second of wall time at the running engines.")
    ] = 1.0,
    mode: Annotated[str | None, typer.Option(help="Routing mode; the Scheduler's own by default.")] = None,
    results: Annotated[Path | None, typer.Option(help="Directory for a picture and the results as JSON.")] = None,
) -> None:
    """Replay a trace against a running system."""
    if mode is not None:
        check_modes([mode])
    command = ReplayCommand(
        requests=read_requests(trace, requests, of_model),
        trace_name=str(trace) if trace is not None else "conversation_trace.jsonl.gz (shipped)",
        target=parse_address(target),
        indexer=parse_address(indexer) if indexer is not None else None,
        model=model,
        time_scale=parse_time_scale(load, clock),
        mode=mode,
        results=results,
    )
    run_statistics = run_interruptibly(replay_running(command, Console()))
    if run_statistics.errors or not run_statistics.valid:
        raise typer.Exit(1)
