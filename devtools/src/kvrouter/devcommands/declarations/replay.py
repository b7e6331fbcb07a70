"""Declares ``kvrouter replay``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from kvrouter.cli.arguments import is_url, parse_address
from kvrouter.cli.errors import WrongUsage
from kvrouter.cli.interrupts import run_interruptibly
from kvrouter.cli.running import Run, chosen_system
from kvrouter.devcommands.declarations.options import (
    Load,
    OfModel,
    Requests,
    Trace,
    Verbose,
    check_modes,
    parse_time_scale,
    read_requests,
)
from kvrouter.devtools.system.ports import DEFAULT_GRPC_PORT


def replay_command(
    trace: Trace = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="gRPC address of a Frontend, host:port, or URL of an OpenAI server. May be repeated: the runs follow "
            "each other and are compared. By default the system that up or serve runs on this machine, else "
            f"127.0.0.1:{DEFAULT_GRPC_PORT}."
        ),
    ] = None,
    indexer: Annotated[
        str | None, typer.Option(help="gRPC address of an Indexer whose events are counted, host:port.")
    ] = None,
    run: Run = None,
    model: Annotated[str | None, typer.Option(help="Model to request; needed only if several are served.")] = None,
    of_model: OfModel = None,
    requests: Requests = None,
    load: Load = 1.0,
    clock: Annotated[
        float, typer.Option(help="Engine seconds that pass in one second of wall time at the running engines.")
    ] = 1.0,
    mode: Annotated[
        str | None, typer.Option(help="Routing mode, at a Frontend's gRPC address; the Scheduler's own by default.")
    ] = None,
    separate_caches: Annotated[
        bool,
        typer.Option(
            "--separate-caches", help="Give each run a cache salt of its own, so that it finds no blocks of others."
        ),
    ] = False,
    vocabulary: Annotated[
        int, typer.Option(min=2, max=1 << 32, help="Number of token ids of the model, at an OpenAI server.")
    ] = 1 << 16,
    ignore_eos: Annotated[
        bool, typer.Option(help="Whether outputs at an OpenAI server have the trace's length, by an extension.")
    ] = True,
    results: Annotated[Path | None, typer.Option(help="Directory for a picture and the results as JSON.")] = None,
    verbose: Verbose = False,
) -> None:
    """Replay a trace against running systems, and compare them."""
    from kvrouter.devcommands.replay import ReplayCommand, replay_running
    from rich.console import Console

    system = chosen_system(run, addresses={"--target": target})
    targets = target or [system.frontend if system and system.frontend else f"127.0.0.1:{DEFAULT_GRPC_PORT}"]
    indexer = indexer or (system.indexer if system else "") or None
    if mode is not None:
        check_modes([mode])
        if any(is_url(each) for each in targets):
            raise WrongUsage("--mode: an OpenAI server has its own mode; name the Frontend's gRPC address instead")
    command = ReplayCommand(
        requests=read_requests(trace, requests, of_model),
        trace_name=trace if trace is not None else "conversation_trace.jsonl.gz (shipped)",
        targets=[each if is_url(each) else parse_address(each) for each in targets],
        indexer=parse_address(indexer) if indexer is not None else None,
        model=model,
        time_scale=parse_time_scale(load, clock),
        mode=mode,
        separate_caches=separate_caches,
        vocabulary=vocabulary,
        ignore_eos=ignore_eos,
        results=results,
        verbose=verbose,
    )
    runs = run_interruptibly(replay_running(command, Console()))
    if any(run.errors or not run.valid for run in runs):
        raise typer.Exit(1)
