"""`kvrouter simulate`: any policy on any workload, in virtual time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any

import typer
from kvrouter.cli.faults import WrongUsage
from kvrouter.mocker.engine_choice import IMPLEMENTATION
from kvrouter.mocker.engine_config import EngineConfig
from kvrouter.scheduler.options import MAX_WEIGHT, RoutingOptions
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.simulator import report, traces
from kvrouter.simulator.generators import GENERATORS, generate
from kvrouter.simulator.outcome import figures
from kvrouter.simulator.simulation import Setting, simulate
from kvrouter.simulator.workload import Prompts, Workload
from rich.console import Console

DEFAULT_GENERATED = 8000
_WIDTH = 140
DEFAULT_SWEEP = "0.5,1,2,3,4,5,6"


OfModel = Annotated[
    str | None, typer.Option(help="Of a recording of several models: the one whose requests are taken.")
]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run: each policy at each load with each seed."""

    workload: Workload
    engines: Sequence[EngineConfig]
    policies: Sequence[str]
    loads: Sequence[float]
    seeds: Sequence[int]
    event_lag_s: float
    pace: float
    restarts: Sequence[tuple[float, int]]
    slo_ttft_s: float
    slo_itl_s: float
    temperature: float = 0.0
    regret: bool = True


def simulate_command(
    trace: Annotated[
        str | None,
        typer.Argument(
            help="Mooncake trace or recording, or a generator: "
            + ", ".join(GENERATORS)
            + "; the shipped trace where it is not given."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Engines.")] = 16,
    policy: Annotated[str, typer.Option(help="Policy; kv may have its weight after a colon, as in kv:64.")] = "kv",
    compare: Annotated[str | None, typer.Option(help="Policies side by side, separated by commas.")] = None,
    load: Annotated[float, typer.Option(help="Requests arrive this many times as fast.")] = 1.0,
    sweep: Annotated[
        str | None, typer.Option(help=f"Loads to go through, separated by commas, such as {DEFAULT_SWEEP}.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help=f"Requests; all of a trace, {DEFAULT_GENERATED} of a generator.")
    ] = None,
    of_model: OfModel = None,
    seed: Annotated[int, typer.Option(min=0, help="Of draws; equal seeds give equal runs.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, with seeds that follow; medians are shown.")] = 1,
    blocks: Annotated[int, typer.Option(min=1, help="KV blocks of each engine.")] = 16_384,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 16,
    budget: Annotated[int, typer.Option(min=1, help="Tokens that a step computes at most.")] = 8192,
    sequences: Annotated[int, typer.Option(min=1, help="Requests that run at once on an engine.")] = 256,
    speed: Annotated[
        str, typer.Option(help="Speeds of the engines, repeated as needed: 1,0.5 makes every other one half as fast.")
    ] = "1",
    restart: Annotated[
        list[str] | None, typer.Option(help="SECONDS:ENGINE, engine from 0: it loses its cache and its requests then.")
    ] = None,
    event_lag_ms: Annotated[float, typer.Option(min=0, help="Time until the index knows of a change in a cache.")] = 0,
    pace: Annotated[
        float, typer.Option(help="How wrong the router's time model is: at 3 it takes engines to be a third as fast.")
    ] = 1.0,
    slo_ttft_ms: Annotated[float, typer.Option(min=0, help="Objective for the time to first token.")] = 2000,
    slo_itl_ms: Annotated[float, typer.Option(min=0, help="Objective for a request's mean time between tokens.")] = 50,
    regret: Annotated[bool, typer.Option(help="Compare each choice with the others in hindsight.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the figures of every run.")] = None,
    picture: Annotated[Path | None, typer.Option(help="File for a picture (PNG).")] = None,
    save: Annotated[Path | None, typer.Option(help="File to write the workload to; nothing is run then.")] = None,
) -> None:
    """Run a workload against simulated engines, with any routing policy, in virtual time."""
    workload = _workload(trace, requests, seed, of_model)
    if save is not None:
        save.write_text("".join(traces.lines(workload.faster(load))), encoding="utf-8")
        return
    speeds = _numbers("--speed", speed)
    try:
        engines = [
            EngineConfig(
                num_blocks=blocks,
                block_size=block_size,
                max_batched_tokens=budget,
                max_sequences=sequences,
                speed=speeds[number % len(speeds)],
                hash_seed=number,
            )
            for number in range(workers)
        ]
    except ValueError as error:
        raise WrongUsage(str(error)) from None
    if not 0 < pace < float("inf"):
        raise WrongUsage(f"--pace is {pace}, must be above 0")
    plan = Plan(
        workload=workload,
        engines=engines,
        policies=[name.strip() for name in (compare or policy).split(",")],
        loads=_numbers("--sweep", sweep) if sweep else _numbers("--load", str(load)),
        seeds=range(seed, seed + seeds),
        event_lag_s=event_lag_ms / 1e3,
        pace=pace,
        restarts=[_restart(text, workers) for text in restart or []],
        slo_ttft_s=slo_ttft_ms / 1e3,
        slo_itl_s=slo_itl_ms / 1e3,
        regret=regret,
    )
    _check_lengths(plan)
    # Where nobody looks at it through a window, a row stays a line.
    console = Console()
    _report(plan, console if console.is_terminal else Console(width=_WIDTH), json_file, picture)


def run_plan(
    plan: Plan, console: Console | None = None
) -> tuple[list[report.Run], dict[tuple[float, str], list[float]]]:
    """Every run, and the sorted times to first token (s) of the last seed of each."""
    prompts = Prompts(plan.workload, plan.engines[0].block_size)
    options = {name: routing_options(name) for name in plan.policies}
    runs: list[report.Run] = []
    waits: dict[tuple[float, str], list[float]] = {}
    for load in plan.loads:
        workload = plan.workload.faster(load)
        for name in plan.policies:
            for seed in plan.seeds:
                started = time.perf_counter()
                setting = Setting(
                    engines=plan.engines,
                    options=options[name],
                    seed=seed,
                    event_lag_s=plan.event_lag_s,
                    pace=plan.pace,
                    restarts=plan.restarts,
                    regret=plan.regret,
                )
                outcome = simulate(workload, setting, prompts)
                summed = figures(outcome, slo_ttft_s=plan.slo_ttft_s, slo_itl_s=plan.slo_itl_s)
                runs.append(report.Run(name, load, seed, summed, time.perf_counter() - started))
                waits[load, name] = sorted(request.ttft_s for request in outcome.served if not request.failed)
                if console is not None and console.is_terminal:
                    console.print(f"[dim]x{load:g} {name} seed {seed}: {runs[-1].wall_s:.1f} s[/dim]", highlight=False)
    return runs, waits


def routing_options(name: str) -> RoutingOptions:
    """A policy as it is named on the command line.

    Raises:
        WrongUsage: there is none of that name, or its weight is no weight.
    """
    mode, colon, weight = name.partition(":")
    if mode not in POLICIES or POLICIES[mode].needs_worker:
        known = ", ".join(mode for mode, policy in POLICIES.items() if not policy.needs_worker)
        raise WrongUsage(f"policy {mode!r} is not known: {known}")
    if not colon:
        return RoutingOptions(mode)
    if mode != "kv":
        raise WrongUsage(f"policy {mode} has no weight; only kv has")
    value = _number("weight", weight)
    if not 0 <= value <= MAX_WEIGHT:
        raise WrongUsage(f"weight is {weight}, must be 0 to {MAX_WEIGHT:g}")
    return RoutingOptions(mode, overlap_score_weight=value)


def _report(plan: Plan, console: Console, json_file: Path | None, picture: Path | None) -> None:
    runs, waits = run_plan(plan, console)
    first = plan.engines[0]
    title = (
        f"{plan.workload.name}: {len(plan.workload.requests):,} requests on {len(plan.engines)} engines of "
        f"{first.num_blocks:,} blocks of {first.block_size} tokens"
    )
    console.print(report.table(runs, title))
    console.print(
        f"within {plan.slo_ttft_s * 1e3:g} ms to the first token and {plan.slo_itl_s * 1e3:g} ms between tokens; "
        f"{'medians of ' + str(len(plan.seeds)) + ' seeds; ' if len(plan.seeds) > 1 else ''}"
        f"{sum(run.wall_s for run in runs):.1f} s, engine model: {IMPLEMENTATION}",
        style="dim",
        highlight=False,
    )
    if json_file is not None:
        report.write_json(json_file, _setting(plan), runs)
        console.print(f"figures: {json_file}", highlight=False)
    if picture is not None:
        from kvrouter.simulator.picture import draw  # only here: it takes long to import

        draw(picture, title, runs, waits)
        console.print(f"picture: {picture}", highlight=False)


def _setting(plan: Plan) -> Mapping[str, Any]:
    return {
        "workload": plan.workload.name,
        "requests": len(plan.workload.requests),
        "engines": [asdict(config) for config in plan.engines],
        "event_lag_s": plan.event_lag_s,
        "pace": plan.pace,
        "restarts": list(plan.restarts),
        "slo_ttft_s": plan.slo_ttft_s,
        "slo_itl_s": plan.slo_itl_s,
        "engine_model": IMPLEMENTATION,
    }


def _workload(trace: str | None, requests: int | None, seed: int, of_model: str | None) -> Workload:
    if trace is not None and trace in GENERATORS:
        return generate(trace, requests or DEFAULT_GENERATED, seed)
    if trace is not None:
        return traces.read(Path(trace), requests, of_model)
    with as_file(files("kvrouter.cli") / "data" / "conversation_trace.jsonl.gz") as path:
        return traces.read(path, requests)


def _check_lengths(plan: Plan) -> None:
    limit = min(config.length_limit for config in plan.engines)
    for number, request in enumerate(plan.workload.requests):
        if request.prompt_tokens + request.output_tokens > limit:
            length = request.prompt_tokens + request.output_tokens
            raise WrongUsage(f"request {number} has {length} tokens, an engine holds {limit}: give it more --blocks")


def _restart(text: str, workers: int) -> tuple[float, int]:
    at, _, engine = text.partition(":")
    if not engine.isdigit() or int(engine) >= workers:
        raise WrongUsage(f"--restart is {text!r}: write SECONDS:ENGINE, engine 0 to {workers - 1}")
    return _number("--restart", at), int(engine)


def _numbers(name: str, text: str) -> list[float]:
    values = [_number(name, part) for part in text.split(",")]
    for value in values:
        if not 0 < value < float("inf"):
            raise WrongUsage(f"{name} is {text}, must be above 0")
    return values


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise WrongUsage(f"{name} is {text!r}, must be a number") from None
