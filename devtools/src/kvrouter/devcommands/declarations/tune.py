"""Declares ``kvrouter tune``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from kvrouter.cli.component import Etcd
from kvrouter.cli.errors import WrongUsage
from kvrouter.cli.interrupts import run_interruptibly
from kvrouter.devcommands.declarations.options import (
    BatchedTokens,
    Blocks,
    BlockSize,
    DecodeMs,
    OfModel,
    PrefillMs,
    Sequences,
    SloItlMs,
    SloTtftMs,
)
from kvrouter.devcommands.declarations.pools import Decode, Prefill

DEFAULT_SECONDS = 110.0
_WIDTH = 160


def tune_command(
    trace: Annotated[
        str | None, typer.Argument(help="Trace, recording, or generated workload; the shipped trace by default.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Workers of an undivided fleet; 16 by default.")] = None,
    prefill: Prefill = None,
    decode: Decode = None,
    discover: Annotated[
        bool, typer.Option("--discover", help="Take the fleet from the workers that are registered in etcd.")
    ] = False,
    etcd: Etcd = "127.0.0.1:2379",
    namespace: Annotated[str, typer.Option(envvar="KVROUTER_NAMESPACE", help="Namespace in etcd.")] = "kvrouter",
    config: Annotated[
        Path | None, typer.Option(help="File with the present options of the Scheduler, and the fleet as [fleet].")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="File to write the options and the fleet found to, as TOML.")
    ] = None,
    splits: Annotated[bool, typer.Option(help="Also try prefill and decode workers.")] = True,
    load: Annotated[float, typer.Option(min=0.001, help="Arrival rate relative to the workload.")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=1, help="Number of requests; fewer if time is short.")] = None,
    of_model: OfModel = None,
    budget: Annotated[float, typer.Option(min=1, help="Time limit of the search, in seconds.")] = DEFAULT_SECONDS,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each of the best settings, with other draws.")] = 3,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes that run simulations; by default one for each CPU.")
    ] = None,
    blocks: Blocks = 16_384,
    block_size: BlockSize = 16,
    batched_tokens: BatchedTokens = 8192,
    sequences: Sequences = 256,
    prefill_ms: PrefillMs = None,
    decode_ms: DecodeMs = None,
    slo_ttft_ms: SloTtftMs = 2000,
    slo_itl_ms: SloItlMs = 50,
) -> None:
    """Find the routing mode, its weight, busy thresholds and the ratio of prefill to decode workers, by simulation."""
    from kvrouter.devcommands.discovered_fleet import discover_fleet
    from kvrouter.devcommands.fleet_file import read_fleet
    from kvrouter.devcommands.simulate import time_model_of, workload_of
    from kvrouter.devcommands.tune import gain, present_options, show
    from kvrouter.mocker.engine.config import EngineConfig
    from kvrouter.runtime.config.fields import can_be_written
    from kvrouter.scheduler.request.options import Thresholds
    from kvrouter.simulator.tuning.candidates import Candidate, candidates
    from kvrouter.simulator.tuning.configuration import toml_of
    from kvrouter.simulator.tuning.search import TooShort, search
    from kvrouter.simulator.tuning.trials import Fleet
    from rich.console import Console

    if write is not None and not can_be_written(write):
        raise WrongUsage(f"{write} cannot be written")
    if (prefill is None) != (decode is None):
        raise WrongUsage("--prefill and --decode belong together: give both, or neither")
    if prefill is not None and workers is not None:
        raise WrongUsage("--workers excludes --prefill and --decode: give either")
    options = present_options(config)
    set_at_run_time = Thresholds()
    if discover:
        if workers is not None or prefill is not None:
            raise WrongUsage("--discover excludes --workers, --prefill and --decode")
        found = run_interruptibly(discover_fleet(etcd, namespace, of_model))
        prefill, decode = (found.prefill, found.others) if found.prefill else (None, None)
        workers = None if found.prefill else found.others
        set_at_run_time = found.thresholds
        blocks, block_size = found.blocks, found.block_size
        batched_tokens, sequences = max(found.batched_tokens, found.sequences), found.sequences
    elif config is not None and workers is None and prefill is None and (fleet_size := read_fleet(config)) is not None:
        prefill, decode = (fleet_size.prefill, fleet_size.others) if fleet_size.prefill else (None, None)
        workers = None if fleet_size.prefill else fleet_size.others
    count = (workers or 16) if prefill is None else prefill + (decode or 0)
    options = replace(options, thresholds=set_at_run_time.over(options.thresholds))
    present = Candidate(options, prefill or 0)
    workload = workload_of(trace, requests, 0, of_model).faster(load)
    try:
        engine = EngineConfig(
            num_blocks=blocks,
            block_size=block_size,
            max_batched_tokens=batched_tokens,
            max_sequences=sequences,
            time_model=time_model_of(prefill_ms, decode_ms, batched_tokens),
        )
    except ValueError as error:
        raise WrongUsage(str(error)) from None
    longest = max(request.prompt_tokens + request.output_tokens for request in workload.requests)
    if longest > engine.length_limit:
        raise WrongUsage(f"a request has {longest} tokens, a worker holds {engine.length_limit}: give it more --blocks")
    fleet = Fleet([replace(engine, hash_seed=number) for number in range(count)], slo_ttft_ms / 1e3, slo_itl_ms / 1e3)
    tried = candidates(present, count, splits=splits)
    try:
        tuned = search(workload, fleet, tried, seeds=seeds, seconds=budget, processes=processes or os.cpu_count() or 1)
    except TooShort as error:
        raise WrongUsage(str(error)) from None
    console = Console()
    show(tuned, workload.name, count, console if console.is_terminal else Console(width=_WIDTH))
    if write is not None:
        why = f"{gain(tuned)} ({workload.name})"
        write.write_text(toml_of(tuned.best, count, " ".join(why.split())), encoding="utf-8")
        console.print(f"options: {write}", highlight=False)
    if set_at_run_time.any_set and tuned.best.options.thresholds != options.thresholds:
        console.print(
            "busy thresholds were set at run time: they outrank those of the file, so set or remove them there"
        )
