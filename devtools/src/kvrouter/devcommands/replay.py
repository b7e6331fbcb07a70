"""``kvrouter replay``: replays a trace against running systems and compares them."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvrouter.cli.arguments import is_url
from kvrouter.cli.connections import command_api_key, command_tls, open_service
from kvrouter.cli.errors import CommandFailed
from kvrouter.devtools.replay.charts import draw
from kvrouter.devtools.replay.frontend_target import FrontendTarget, ReplayOptions
from kvrouter.devtools.replay.open_loop import ReplayResult, replay
from kvrouter.devtools.replay.openai_target import OpenAiOptions, TargetFailed, openai_target, served_models
from kvrouter.devtools.replay.pacing import TimeScale
from kvrouter.devtools.replay.probes import event_counts, faulty_events
from kvrouter.devtools.replay.progress import replay_progress
from kvrouter.devtools.replay.report import print_report, write_json
from kvrouter.devtools.replay.statistics import RunStatistics, SystemCounts, statistics_of_run
from kvrouter.devtools.traces.reader import TraceRequest
from kvrouter.devtools.traces.reuse import possible_hit_rate
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import remote
from kvrouter.v1 import frontend_pb2
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.frontend_pb2 import ListModelsRequest, Model
from kvrouter.v1.pages import all_pages
from rich.console import Console

_CALL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ReplayCommand:
    """Options of a replay."""

    requests: Sequence[TraceRequest]
    trace_name: str
    targets: Sequence[str]
    """Where the trace is replayed, in turn: addresses of Frontends (host:port), or URLs of OpenAI servers."""
    indexer: str | None
    """gRPC address of an Indexer whose events are counted, host:port; None counts none."""
    model: str | None
    """Model to request; None for the only one that is served."""
    time_scale: TimeScale
    mode: str | None
    """Routing mode of all requests; None for the Scheduler's own."""
    separate_caches: bool
    """Whether each run has a cache salt of its own."""
    vocabulary: int
    """Number of token ids of the model, for OpenAI servers."""
    ignore_eos: bool
    """Whether outputs have the trace's length, at OpenAI servers."""
    results: Path | None
    """Folder for a picture and the statistics; None writes neither."""
    verbose: bool = False
    """Whether to print every statistic."""


@dataclass(frozen=True, slots=True)
class _Served:
    """What a target serves."""

    name: str
    """How the run is called in the table."""
    workers: int
    """Number of workers; 0 if unknown."""
    block_size: int


async def replay_running(command: ReplayCommand, console: Console) -> list[RunStatistics]:
    """Replays the trace at each target, prints the statistics, and writes them if a folder is given.

    Raises:
        CommandFailed: a target does not answer, or does not serve the model.
    """
    runs = [await _run(target, command, console) for target in command.targets]
    print_report(console, runs, verbose=command.verbose)
    if command.results is not None:
        command.results.mkdir(parents=True, exist_ok=True)
        write_json(command.results / "statistics.json", runs, command.trace_name)
        draw(command.results / "picture.png", runs)
        for name in ("picture.png", "statistics.json"):
            console.print(f"{command.results / name}", highlight=False, soft_wrap=True)
    return runs


async def _run(address: str, command: ReplayCommand, console: Console) -> RunStatistics:
    run_id = f"replay-{time.time_ns():x}"
    salt = run_id if command.separate_caches else ""
    before = (
        await event_counts(command.indexer, command_tls(), command_api_key()) if command.indexer is not None else None
    )
    if is_url(address):
        served, result = await _replay_openai(address, command, salt, console)
    else:
        served, result = await _replay_frontend(address, command, run_id, salt, console)
    after = (
        await event_counts(command.indexer, command_tls(), command_api_key()) if command.indexer is not None else None
    )
    counts = SystemCounts()
    if before is not None and after is not None:
        counts = SystemCounts(after.applied - before.applied, faulty_events(after) - faulty_events(before))
    return statistics_of_run(
        result,
        mode=served.name,
        workers=served.workers or len({record.worker for record in result.records if record.worker}) or 1,
        block_size=served.block_size,
        time_scale=command.time_scale,
        counts=counts,
        possible_hit_rate=possible_hit_rate(command.requests, served.block_size),
    )


async def _replay_frontend(
    address: str, command: ReplayCommand, run_id: str, salt: str, console: Console
) -> tuple[_Served, ReplayResult]:
    async with open_service(address, "frontend") as channel:
        frontend = cast("Frontend", remote(frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"], channel))
        model = await _model(frontend, address, command)
        mode = command.mode or "the Scheduler's mode"
        name = mode if len(command.targets) == 1 else address
        options = ReplayOptions(model=model.name, id_prefix=run_id, mode=command.mode, cache_salt=salt)
        with replay_progress(console, name, len(command.requests)) as on_end:
            result = await replay(FrontendTarget(frontend, options), command.requests, command.time_scale, on_end)
    return _Served(name, model.workers, model.block_size), result


async def _replay_openai(url: str, command: ReplayCommand, salt: str, console: Console) -> tuple[_Served, ReplayResult]:
    api_key = command_api_key() or os.environ.get("OPENAI_API_KEY", "")
    try:
        models = await served_models(url, api_key, tls=command_tls())
    except TargetFailed as error:
        raise CommandFailed(str(error)) from None
    model = _chosen(url, models, command.model)
    options = OpenAiOptions(
        url,
        model,
        api_key=api_key,
        tls=command_tls(),
        vocabulary=command.vocabulary,
        ignore_eos=command.ignore_eos,
        cache_salt=salt,
    )
    name = url.split("://", 1)[1].rstrip("/")
    async with openai_target(options) as target:
        with replay_progress(console, name, len(command.requests)) as on_end:
            result = await replay(target, command.requests, command.time_scale, on_end)
    return _Served(name, models[model], block_size=1), result


async def _model(frontend: Frontend, address: str, command: ReplayCommand) -> Model:
    try:
        deadline = Deadline.after(_CALL_SECONDS)
        pages = all_pages(lambda asked: frontend.list_models(asked, deadline=deadline), ListModelsRequest())
        by_name = {model.name: model async for page in pages for model in page.models}
    except KvRouterError as error:
        raise CommandFailed(f"the Frontend at {address} does not answer: {error.message}") from None
    return by_name[_chosen(address, by_name, command.model)]


def _chosen(address: str, served: Collection[str], model: str | None) -> str:
    wanted = [name for name in served if model in (None, name)]
    named = ", ".join(sorted(served)) or "none"
    if not wanted:
        raise CommandFailed(f"{address} does not serve {model or 'any model'}; it serves: {named}")
    if len(wanted) > 1:
        raise CommandFailed(f"{address} serves several models, choose one with --model: {named}")
    return wanted[0]
