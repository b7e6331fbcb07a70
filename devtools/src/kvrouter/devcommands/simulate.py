"""Runs what ``kvrouter simulate`` asks for, and reads its options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from importlib.resources import as_file, files
from pathlib import Path

from kvrouter.cli.errors import WrongUsage
from kvrouter.devcommands.declarations.simulate import DEFAULT_GENERATED
from kvrouter.mocker.engine.config import TierConfig
from kvrouter.mocker.engine.implementation import IMPLEMENTATION
from kvrouter.mocker.engine.time_model import TimeModel
from kvrouter.simulator.plan import Plan, run_plan
from kvrouter.simulator.results import report
from kvrouter.simulator.routing.replicas import Sync
from kvrouter.simulator.workloads import traces
from kvrouter.simulator.workloads.generators import GENERATORS, generate
from kvrouter.simulator.workloads.workload import Workload
from rich.console import Console

DEFAULT_SYNC = Sync()


def report_runs(plan: Plan, console: Console, json_file: Path | None, picture: Path | None) -> None:
    """Runs the plan, and prints, writes and draws its results."""
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


def generated(name: str, requests: int | None, seed: int = 0, *, of_model: str | None = None) -> Workload | None:
    """Returns the generated workload of this name; None if there is no such generator.

    Raises:
        WrongUsage: requests of one model are to be selected from it.
    """
    if name not in GENERATORS:
        return None
    if of_model is not None:
        raise WrongUsage(f"--of-model selects from a recording; {name} is a generated workload")
    return generate(name, requests or DEFAULT_GENERATED, seed)


def workload_of(trace: str | None, requests: int | None, seed: int, of_model: str | None) -> Workload:
    """Returns a workload as it is named on the command line.

    Raises:
        WrongUsage: there is no such file or generator.
        TraceError: the file is not a trace.
    """
    workload = None if trace is None else generated(trace, requests, seed, of_model=of_model)
    if workload is not None:
        return workload
    if trace is not None and not Path(trace).exists():
        raise WrongUsage(f"{trace}: there is no such file, and no generator of that name: {', '.join(GENERATORS)}")
    if trace is not None:
        return traces.read(Path(trace), requests, of_model)
    with as_file(files("kvrouter.devtools.traces") / "data" / "conversation_trace.jsonl.gz") as path:
        return traces.read(path, requests, of_model)


def check_lengths(plan: Plan) -> None:
    """Checks that an engine can hold each request.

    Raises:
        WrongUsage: it cannot.
    """
    limit = min(config.length_limit for config in plan.setting.engines)
    for number, request in enumerate(plan.workload.requests):
        if request.prompt_tokens + request.output_tokens > limit:
            length = request.prompt_tokens + request.output_tokens
            raise WrongUsage(f"request {number} has {length} tokens, an engine holds {limit}: give it more --blocks")


def in_options(words: str) -> str:
    """Replaces the fields that an engine's error names by the options of this command."""
    for field, option in (("max_batched_tokens", "--budget"), ("max_sequences", "--sequences")):
        words = words.replace(field, option)
    return words.replace("num_blocks * block_size", "--blocks times --block-size")


def sync_of(lag_ms: float | None, loss: float | None, repair_ms: float | None) -> Sync | None:
    """Returns how Schedulers learn of each other's bookings; None if they never do.

    Raises:
        WrongUsage: the options contradict each other.
    """
    if lag_ms is None:
        for option, value in (("--sync-loss", loss), ("--sync-repair-ms", repair_ms)):
            if value is not None:
                raise WrongUsage(f"{option} needs replica sync: add --sync-lag-ms")
        return None
    if loss is not None and not 0 <= loss < 1:
        raise WrongUsage(f"--sync-loss is {loss:g}, must be 0 or more and below 1")
    return Sync(
        seconds("--sync-lag-ms", lag_ms),
        DEFAULT_SYNC.loss if loss is None else loss,
        DEFAULT_SYNC.repair_s if repair_ms is None else seconds("--sync-repair-ms", repair_ms),
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
        terms = [number(option, part, above=-math.inf) for part in text.split(",")]
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


def restart_of(text: str, workers: int) -> tuple[float, int]:
    """Returns the time (s) and the engine of a restart as it is named on the command line.

    Raises:
        WrongUsage: it is malformed, or there is no such engine.
    """
    at, _, engine = text.partition(":")
    if not engine.isdecimal() or int(engine) >= workers:
        raise WrongUsage(f"--restart is {text!r}: write SECONDS:ENGINE, engine 0 to {workers - 1}")
    return number("--restart", at), int(engine)


def tier_of(option: str, text: str | None) -> TierConfig:
    """Returns a tier from BLOCKS[:GB/S[:MS]]; one without blocks if there is no text.

    Raises:
        WrongUsage: it is not written so, or no tier could be like this.
    """
    if text is None:
        return TierConfig()
    blocks, *link = text.split(":")
    if len(link) > 2:
        raise WrongUsage(f"{option} is {text!r}: expected BLOCKS, BLOCKS:GB/S or BLOCKS:GB/S:MS")
    try:
        return TierConfig(int(blocks), *map(float, link))
    except ValueError as error:
        raise WrongUsage(f"{option} is {text!r}: {error}") from None


def numbers(option: str, text: str) -> Sequence[float]:
    """Parses numbers above 0, separated by commas.

    Raises:
        WrongUsage: one is malformed.
    """
    return [number(option, part, above=0) for part in text.split(",")]


def seconds(option: str, milliseconds: float) -> float:
    """Parses milliseconds.

    Raises:
        WrongUsage: they are malformed.
    """
    return number(option, str(milliseconds)) / 1e3


def number(option: str, text: str, above: float | None = None) -> float:
    """Parses a finite number, 0 or more, or more than ``above``.

    Raises:
        WrongUsage: it is malformed.
    """
    try:
        value = float(text)
    except ValueError:
        raise WrongUsage(f"{option} is {text!r}, must be a number") from None
    if not math.isfinite(value):
        raise WrongUsage(f"{option} is {text}, must be finite")
    if value < 0 if above is None else value <= above:
        raise WrongUsage(f"{option} is {text}, must be {'0 or more' if above is None else f'above {above:g}'}")
    return value
