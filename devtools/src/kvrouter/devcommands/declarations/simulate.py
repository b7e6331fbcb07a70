"""Declares ``kvrouter simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from kvrouter.cli.errors import WrongUsage
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
    Trace,
)
from kvrouter.devcommands.declarations.pools import (
    Bandwidth,
    Decode,
    Latency,
    MinTokens,
    Prefill,
    PrefillTime,
    TokenBytes,
    remote_prefill_options,
)

DEFAULT_GENERATED = 8000
DEFAULT_POLICY = "forecast"
DEFAULT_WORKERS = 16
DEFAULT_SWEEP = "0.5,1,2,3,4,5,6"
_WIDTH = 140
_PICTURES = (".png", ".svg", ".pdf")


def simulate_command(
    trace: Trace = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of simulated engines.")] = DEFAULT_WORKERS,
    prefill: Prefill = None,
    decode: Decode = None,
    policy: Annotated[
        str,
        typer.Option(
            help="Policy: forecast, kv, power-of-two, product, random, round-robin, sticky; kv:64 is kv with weight 64."
        ),
    ] = DEFAULT_POLICY,
    compare: Annotated[str | None, typer.Option(help="Policies to run side by side, separated by commas.")] = None,
    load: Annotated[float, typer.Option(help="Arrival rate relative to the workload.")] = 1.0,
    sweep: Annotated[
        str | None, typer.Option(help=f"Loads to run one after another, separated by commas, such as {DEFAULT_SWEEP}.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Number of requests; all of a trace and {DEFAULT_GENERATED} of a generated workload by default.",
        ),
    ] = None,
    of_model: OfModel = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random draws; equal seeds give equal results.")] = 0,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of runs with consecutive seeds, of which medians are shown.")
    ] = 1,
    blocks: Blocks = 16_384,
    block_size: BlockSize = 16,
    budget: BatchedTokens = 8192,
    sequences: Sequences = 256,
    prefill_ms: PrefillMs = None,
    decode_ms: DecodeMs = None,
    speed: Annotated[
        str, typer.Option(help="Relative speeds, repeated over the engines; 1,0.5 makes every second one half as fast.")
    ] = "1",
    host_tier: Annotated[
        str | None,
        typer.Option(
            metavar="BLOCKS[:GB/S[:MS]]",
            help="Host memory of each engine: KV blocks, bandwidth and latency of a load; 20 and 0.1 by default.",
        ),
    ] = None,
    shared_tier: Annotated[
        str | None,
        typer.Option(
            metavar="BLOCKS[:GB/S[:MS]]",
            help="Storage that all engines read: KV blocks that each engine adds, bandwidth and latency of a load; "
            "20 and 0.1 by default.",
        ),
    ] = None,
    restart: Annotated[
        list[str] | None,
        typer.Option(help="SECONDS:ENGINE; at that time the engine, counted from 0, loses its cache and its requests."),
    ] = None,
    remote_prefill_min_tokens: MinTokens = None,
    prefill_us_per_token: PrefillTime = None,
    kv_bytes_per_token: TokenBytes = None,
    kv_transfer_gb_per_second: Bandwidth = None,
    kv_transfer_latency_ms: Latency = None,
    event_lag_ms: Annotated[
        float, typer.Option(help="Delay until the index knows about a change in a cache, in milliseconds.")
    ] = 0,
    calibration_error: Annotated[
        float, typer.Option(help="Error of the router's time model; at 3 it takes engines to be a third as fast.")
    ] = 1.0,
    temperature: Annotated[float, typer.Option(help="Softmax temperature of kv; 0 takes the cheapest rank.")] = 0.0,
    schedulers: Annotated[
        int, typer.Option(min=1, help="Number of Schedulers, each of which decides for a part of the requests.")
    ] = 1,
    sharding: Annotated[
        bool, typer.Option(help="Divide requests among the Schedulers by prompt prefix instead of at random.")
    ] = False,
    sync_lag_ms: Annotated[
        float | None,
        typer.Option(
            help="Delay until a Scheduler knows another's bookings, in milliseconds; without it, it never does."
        ),
    ] = None,
    sync_loss: Annotated[
        float | None, typer.Option(help="Share of lost replication messages, 0 to below 1; 0 by default.")
    ] = None,
    sync_repair_ms: Annotated[
        float | None,
        typer.Option(help="Delay until a lost message is repaired, in milliseconds; 100 by default."),
    ] = None,
    slo_ttft_ms: SloTtftMs = 2000,
    slo_itl_ms: SloItlMs = 50,
    floor: Annotated[
        bool,
        typer.Option("--floor", help="Show the floor beside the policies: one cache of the size of all, no queueing."),
    ] = False,
    regret: Annotated[bool, typer.Option(help="Compare each choice with the best one in hindsight.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="File to write all results to, as JSON.")] = None,
    picture: Annotated[Path | None, typer.Option(help="File to draw a picture to: .png, .svg or .pdf.")] = None,
    save: Annotated[Path | None, typer.Option(help="File to write the workload to, without running it.")] = None,
) -> None:
    """Run a workload against simulated engines, with any routing policy, in virtual time."""
    from kvrouter.devcommands import simulate
    from kvrouter.mocker.engine.config import EngineConfig
    from kvrouter.runtime.config.fields import can_be_written
    from kvrouter.runtime.kv_transfer import KvTransfer
    from kvrouter.scheduler.request.options import RoutingOptions
    from kvrouter.simulator.plan import InvalidPolicy, Plan, routing_options
    from kvrouter.simulator.simulation import Setting
    from kvrouter.simulator.workloads import traces
    from rich.console import Console

    for path in (json_file, picture, save):
        if path is not None and not can_be_written(path):
            raise WrongUsage(f"{path} cannot be written")
    if picture is not None and picture.suffix not in _PICTURES:
        raise WrongUsage(f"--picture is {picture}: expected a name that ends in {', '.join(_PICTURES)}")
    if compare is not None and policy != DEFAULT_POLICY:
        raise WrongUsage("--policy and --compare exclude each other: give one of them")
    if sweep is not None and load != 1:
        raise WrongUsage("--load and --sweep exclude each other: give one of them")
    loads = simulate.numbers("--sweep", sweep) if sweep is not None else [simulate.number("--load", str(load), above=0)]
    policies = [name.strip() for name in (compare if compare is not None else policy).split(",")]
    if len(set(policies)) < len(policies) or len(set(loads)) < len(loads):
        raise WrongUsage("a policy or a load is given twice: give each once")
    try:
        for name in policies:
            routing_options(name)
    except InvalidPolicy as error:
        raise WrongUsage(str(error)) from None
    link = (prefill_us_per_token, kv_bytes_per_token, kv_transfer_gb_per_second, kv_transfer_latency_ms)
    host = simulate.tier_of("--host-tier", host_tier)
    shared = simulate.tier_of("--shared-tier", shared_tier)
    has_tiers = bool(host.num_blocks or shared.num_blocks)
    of_pools = (
        remote_prefill_min_tokens,
        prefill_us_per_token,
        None if has_tiers else kv_bytes_per_token,  # loads from tiers need it too
        kv_transfer_gb_per_second,
        kv_transfer_latency_ms,
    )
    if (prefill is None) != (decode is None):
        raise WrongUsage("--prefill and --decode belong together: give both, or neither")
    if prefill is None and any(value is not None for value in of_pools):
        raise WrongUsage("options of transfers need pools: add --prefill and --decode")
    if prefill is not None and workers != DEFAULT_WORKERS:
        raise WrongUsage("--workers excludes --prefill and --decode: give either")
    if prefill is not None and restart:
        raise WrongUsage("--restart is not simulated with --prefill: leave one of them out")
    decoding = decode or workers
    count = decoding + (prefill or 0)
    speeds = simulate.numbers("--speed", speed)
    time_model = simulate.time_model_of(prefill_ms, decode_ms, budget)
    try:
        engines = [
            EngineConfig(
                num_blocks=blocks,
                block_size=block_size,
                max_batched_tokens=budget,
                max_sequences=sequences,
                speed=speeds[number % len(speeds)],
                hash_seed=0 if shared.num_blocks else number,
                time_model=time_model,
                host=host,
                shared=shared,
                kv_bytes_per_token=KvTransfer().bytes_per_token if kv_bytes_per_token is None else kv_bytes_per_token,
            )
            for number in range(count)
        ]
    except ValueError as error:
        raise WrongUsage(simulate.in_options(str(error))) from None
    if schedulers == 1 and (sharding or sync_lag_ms is not None):
        raise WrongUsage(
            f"{'--sharding' if sharding else '--sync-lag-ms'} needs several Schedulers: add --schedulers 2 or more"
        )
    plan = Plan(
        workload=simulate.workload_of(trace, requests, seed, of_model),
        setting=Setting(
            engines[:decoding],
            prefill_engines=engines[decoding:],
            options=RoutingOptions(remote_prefill=remote_prefill_options(remote_prefill_min_tokens, *link)),
            event_lag_s=simulate.seconds("--event-lag-ms", event_lag_ms),
            calibration_error=simulate.number("--calibration-error", str(calibration_error), above=0),
            restarts=[simulate.restart_of(text, workers) for text in restart or []],
            schedulers=schedulers,
            sync=simulate.sync_of(sync_lag_ms, sync_loss, sync_repair_ms),
            sharded=sharding,
            regret=regret,
        ),
        policies=policies,
        loads=loads,
        seeds=range(seed, seed + seeds),
        slo_ttft_s=simulate.seconds("--slo-ttft-ms", slo_ttft_ms),
        slo_itl_s=simulate.seconds("--slo-itl-ms", slo_itl_ms),
        temperature=simulate.number("--temperature", str(temperature)),
        floor=floor,
    )
    if save is not None:
        save.write_text("".join(traces.lines(plan.workload.faster(loads[0]))), encoding="utf-8")
        return
    simulate.check_lengths(plan)
    # Without a terminal, a fixed width keeps each row on one line.
    console = Console()
    simulate.report_runs(plan, console if console.is_terminal else Console(width=_WIDTH), json_file, picture)
