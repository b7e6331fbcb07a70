"""``kvrouter simulate``: runs any routing policy on any workload in virtual time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer
from kvrouter.cli.development.options import (
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
from kvrouter.cli.development.simulated_pools import (
    Bandwidth,
    Decode,
    Latency,
    MinTokens,
    Prefill,
    PrefillTime,
    TokenBytes,
    remote_prefill_options,
)
from kvrouter.cli.errors import WrongUsage
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.engine.implementation import IMPLEMENTATION
from kvrouter.mocker.engine.time_model import TimeModel
from kvrouter.runtime.config.files import can_be_written
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.simulator.plan import NAMES, InvalidPolicy, Plan, routing_options, run_plan
from kvrouter.simulator.results import report
from kvrouter.simulator.routing.replicas import Sync
from kvrouter.simulator.simulation import Setting
from kvrouter.simulator.workloads import traces
from kvrouter.simulator.workloads.generators import GENERATORS, generate
from kvrouter.simulator.workloads.workload import Workload
from rich.console import Console

DEFAULT_GENERATED = 8000
DEFAULT_POLICY = "forecast"
DEFAULT_WORKERS = 16
_WIDTH = 140
DEFAULT_SWEEP = "0.5,1,2,3,4,5,6"
DEFAULT_SYNC = Sync()
_PICTURES = (".png", ".svg", ".pdf")


def simulate_command(
    trace: Annotated[
        str | None,
        typer.Argument(
            help=f"Mooncake trace, recording, or workload ({', '.join(GENERATORS)}); the shipped trace by default."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of simulated engines.")] = DEFAULT_WORKERS,
    prefill: Prefill = None,
    decode: Decode = None,
    policy: Annotated[
        str,
        typer.Option(help=f"Policy: {', '.join(NAMES)}; kv:64 is kv with weight 64."),
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
        typer.Option(
            help=f"Delay until a lost message is repaired, in milliseconds; {DEFAULT_SYNC.repair_s * 1e3:g} by default."
        ),
    ] = None,
    slo_ttft_ms: SloTtftMs = 2000,
    slo_itl_ms: SloItlMs = 50,
    regret: Annotated[bool, typer.Option(help="Compare each choice with the best one in hindsight.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="File to write all results to, as JSON.")] = None,
    picture: Annotated[Path | None, typer.Option(help="File to draw a picture to: .png, .svg or .pdf.")] = None,
    save: Annotated[Path | None, typer.Option(help="File to write the workload to, without running it.")] = None,
) -> None:
    """Run a workload against simulated engines, with any routing policy, in virtual time."""
    for path in (json_file, picture, save):
        if path is not None and not can_be_written(path):
            raise WrongUsage(f"{path} cannot be written")
    if picture is not None and picture.suffix not in _PICTURES:
        raise WrongUsage(f"--picture is {picture}: expected a name that ends in {', '.join(_PICTURES)}")
    if compare is not None and policy != DEFAULT_POLICY:
        raise WrongUsage("--policy and --compare exclude each other: give one of them")
    if sweep is not None and load != 1:
        raise WrongUsage("--load and --sweep exclude each other: give one of them")
    loads = _numbers("--sweep", sweep) if sweep is not None else [_number("--load", str(load), above=0)]
    policies = [name.strip() for name in (compare if compare is not None else policy).split(",")]
    if len(set(policies)) < len(policies) or len(set(loads)) < len(loads):
        raise WrongUsage("a policy or a load is given twice: give each once")
    try:
        for name in policies:
            routing_options(name)
    except InvalidPolicy as error:
        raise WrongUsage(str(error)) from None
    link = (prefill_us_per_token, kv_bytes_per_token, kv_transfer_gb_per_second, kv_transfer_latency_ms)
    if (prefill is None) != (decode is None):
        raise WrongUsage("--prefill and --decode belong together: give both, or neither")
    if prefill is None and any(value is not None for value in (remote_prefill_min_tokens, *link)):
        raise WrongUsage("options of transfers need pools: add --prefill and --decode")
    if prefill is not None and workers != DEFAULT_WORKERS:
        raise WrongUsage("--workers excludes --prefill and --decode: give either")
    if prefill is not None and restart:
        raise WrongUsage("--restart is not simulated with --prefill: leave one of them out")
    decoding = decode or workers
    count = decoding + (prefill or 0)
    speeds = _numbers("--speed", speed)
    time_model = time_model_of(prefill_ms, decode_ms, budget)
    try:
        engines = [
            EngineConfig(
                num_blocks=blocks,
                block_size=block_size,
                max_batched_tokens=budget,
                max_sequences=sequences,
                speed=speeds[number % len(speeds)],
                hash_seed=number,
                time_model=time_model,
            )
            for number in range(count)
        ]
    except ValueError as error:
        raise WrongUsage(_in_options(str(error))) from None
    if schedulers == 1 and (sharding or sync_lag_ms is not None):
        raise WrongUsage(
            f"{'--sharding' if sharding else '--sync-lag-ms'} needs several Schedulers: add --schedulers 2 or more"
        )
    plan = Plan(
        workload=workload_of(trace, requests, seed, of_model),
        setting=Setting(
            engines[:decoding],
            prefill_engines=engines[decoding:],
            options=RoutingOptions(remote_prefill=remote_prefill_options(remote_prefill_min_tokens, *link)),
            event_lag_s=_seconds("--event-lag-ms", event_lag_ms),
            calibration_error=_number("--calibration-error", str(calibration_error), above=0),
            restarts=[_restart(text, workers) for text in restart or []],
            schedulers=schedulers,
            sync=_sync(sync_lag_ms, sync_loss, sync_repair_ms),
            sharded=sharding,
            regret=regret,
        ),
        policies=policies,
        loads=loads,
        seeds=range(seed, seed + seeds),
        slo_ttft_s=_seconds("--slo-ttft-ms", slo_ttft_ms),
        slo_itl_s=_seconds("--slo-itl-ms", slo_itl_ms),
        temperature=_number("--temperature", str(temperature)),
    )
    if save is not None:
        save.write_text("".join(traces.lines(plan.workload.faster(loads[0]))), encoding="utf-8")
        return
    _check_lengths(plan)
    # Without a terminal, a fixed width keeps each row on one line.
    console = Console()
    _report(plan, console if console.is_terminal else Console(width=_WIDTH), json_file, picture)


def _report(plan: Plan, console: Console, json_file: Path | None, picture: Path | None) -> None:
    runs, waits = run_plan(plan, console)
    first, setting = plan.setting.engines[0], plan.setting
    size = f"{len(setting.engines)} engines"
    if setting.prefill_engines:
        size = f"{len(setting.prefill_engines)} prefill and {len(setting.engines)} decode engines"
    title = (
        f"{plan.workload.name}: {len(plan.workload.requests):,} requests on {size} of "
        f"{first.num_blocks:,} blocks of {first.block_size} tokens"
    )
    console.print(title, highlight=False)
    console.print(report.table(runs))
    for words in (
        report.knee_text(runs),
        f"objectives: {plan.slo_ttft_s * 1e3:g} ms to the first token, {plan.slo_itl_s * 1e3:g} ms between tokens",
        f"medians of {len(plan.seeds)} seeds" if len(plan.seeds) > 1 else "",
        f"{sum(run.wall_s for run in runs):.1f} s, engine model: {IMPLEMENTATION}",
    ):
        if words:
            console.print(words, style="dim", highlight=False)
    if json_file is not None:
        report.write_json(json_file, plan.described(), runs)
        console.print(f"statistics: {json_file}", highlight=False)
    if picture is not None:
        from kvrouter.simulator.results.charts import draw  # only here: it takes long to import

        draw(picture, title, runs, waits)
        console.print(f"picture: {picture}", highlight=False)


def workload_of(trace: str | None, requests: int | None, seed: int, of_model: str | None) -> Workload:
    """Returns a workload as it is named on the command line.

    Raises:
        WrongUsage: there is no such file or generator.
        TraceError: the file is not a trace.
    """
    if trace is not None and trace in GENERATORS:
        if of_model is not None:
            raise WrongUsage(f"--of-model selects from a recording; {trace} is a generated workload")
        return generate(trace, requests or DEFAULT_GENERATED, seed)
    if trace is not None and not Path(trace).exists():
        raise WrongUsage(f"{trace}: there is no such file, and no generator of that name: {', '.join(GENERATORS)}")
    if trace is not None:
        return traces.read(Path(trace), requests, of_model)
    with as_file(files("kvrouter.devtools.traces") / "data" / "conversation_trace.jsonl.gz") as path:
        return traces.read(path, requests, of_model)


def _check_lengths(plan: Plan) -> None:
    limit = min(config.length_limit for config in plan.setting.engines)
    for number, request in enumerate(plan.workload.requests):
        if request.prompt_tokens + request.output_tokens > limit:
            length = request.prompt_tokens + request.output_tokens
            raise WrongUsage(f"request {number} has {length} tokens, an engine holds {limit}: give it more --blocks")


def _in_options(words: str) -> str:
    """Replaces the fields that an engine's error names by the options of this command."""
    for field, option in (("max_batched_tokens", "--budget"), ("max_sequences", "--sequences")):
        words = words.replace(field, option)
    return words.replace("num_blocks * block_size", "--blocks times --block-size")


def _sync(lag_ms: float | None, loss: float | None, repair_ms: float | None) -> Sync | None:
    if lag_ms is None:
        for option, value in (("--sync-loss", loss), ("--sync-repair-ms", repair_ms)):
            if value is not None:
                raise WrongUsage(f"{option} needs replica sync: add --sync-lag-ms")
        return None
    if loss is not None and not 0 <= loss < 1:
        raise WrongUsage(f"--sync-loss is {loss:g}, must be 0 or more and below 1")
    return Sync(
        _seconds("--sync-lag-ms", lag_ms),
        DEFAULT_SYNC.loss if loss is None else loss,
        DEFAULT_SYNC.repair_s if repair_ms is None else _seconds("--sync-repair-ms", repair_ms),
    )


def time_model_of(prefill_ms: str | None, decode_ms: str | None, budget: int) -> TimeModel:
    """Returns the time model with the coefficients that are given.

    Raises:
        WrongUsage: they are malformed, or a step would take no time.
    """
    names = [field.name for field in fields(TimeModel)]
    given: dict[str, float] = {}
    for option, text, first in (("--prefill-ms", prefill_ms, 0), ("--decode-ms", decode_ms, 3)):
        if text is None:
            continue
        terms = [_number(option, part, above=-math.inf) for part in text.split(",")]
        if len(terms) != 3:
            raise WrongUsage(f"{option} is {text!r}: write A,B,C")
        given |= dict(zip(names[first : first + 3], terms, strict=True))
    model = TimeModel(**given)
    # A parabola has its minimum at an end of the range or at its vertex.
    square, linear = model.prefill_n2_ms, model.prefill_n1_ms
    vertex = min(max(round(-linear / 2 / square), 1), budget) if square > 0 else 1
    for tokens in (1, vertex, budget):
        if model.step_seconds(tokens, 0, 1) <= 0:
            raise WrongUsage(f"--prefill-ms is {prefill_ms}: at {tokens} tokens that is not above 0")
    return model


def _restart(text: str, workers: int) -> tuple[float, int]:
    at, _, engine = text.partition(":")
    if not engine.isdecimal() or int(engine) >= workers:
        raise WrongUsage(f"--restart is {text!r}: write SECONDS:ENGINE, engine 0 to {workers - 1}")
    return _number("--restart", at), int(engine)


def _numbers(option: str, text: str) -> Sequence[float]:
    return [_number(option, part, above=0) for part in text.split(",")]


def _seconds(option: str, milliseconds: float) -> float:
    return _number(option, str(milliseconds)) / 1e3


def _number(option: str, text: str, above: float | None = None) -> float:
    """Parses a finite number, 0 or more, or more than ``above``."""
    try:
        value = float(text)
    except ValueError:
        raise WrongUsage(f"{option} is {text!r}, must be a number") from None
    if not math.isfinite(value):
        raise WrongUsage(f"{option} is {text}, must be finite")
    if value < 0 if above is None else value <= above:
        raise WrongUsage(f"{option} is {text}, must be {'0 or more' if above is None else f'above {above:g}'}")
    return value
