"""Options that several commands of the development stack have, and their parsing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from kvrouter.cli.errors import WrongUsage

if TYPE_CHECKING:
    from kvrouter.devtools.replay.pacing import TimeScale
    from kvrouter.devtools.traces.reader import TraceRequest

Trace = Annotated[
    str | None,
    typer.Argument(
        help="Mooncake trace, recording, or workload (prompts, chat, documents, agents, bursts); "
        "the shipped trace by default."
    ),
]
Load = Annotated[float, typer.Option(help="Arrival rate relative to the trace.")]
Requests = Annotated[
    int | None, typer.Option(min=1, help="Number of requests to replay from the start of the trace; all by default.")
]
Workers = Annotated[int, typer.Option(min=1, help="Number of simulated engines, each a process.")]
Blocks = Annotated[int, typer.Option(min=1, help="KV blocks of each engine.")]
BlockSize = Annotated[int, typer.Option(min=1, help="Tokens per KV block.")]
BatchedTokens = Annotated[int, typer.Option(min=1, help="Most tokens that a step computes.")]
Sequences = Annotated[int, typer.Option(min=1, help="Most requests that run at the same time on an engine.")]
PrefillMs = Annotated[
    str | None, typer.Option(help="Coefficients A,B,C: computing n prompt tokens adds A·n² + B·n + C ms to a step.")
]
DecodeMs = Annotated[
    str | None,
    typer.Option(
        help="Coefficients A,B,C: decoding adds A·p² + B·p + C ms to a step; p is the share of the KV cache read."
    ),
]
SloTtftMs = Annotated[float, typer.Option(min=0, help="Objective for the time to first token, in milliseconds.")]
SloItlMs = Annotated[
    float, typer.Option(min=0, help="Objective for a request's mean time between tokens, in milliseconds.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print every statistic instead of the eight main ones.")]
OfModel = Annotated[str | None, typer.Option(help="Model whose requests are taken from a recording of several models.")]


def read_requests(trace: str | None, limit: int | None, of_model: str | None = None) -> list[TraceRequest]:
    """Reads a trace or generates a workload by its name; the shipped trace if ``trace`` is None.

    Raises:
        WrongUsage: a generated workload is to be selected from.
        TraceError: the file is unreadable or not a trace.
    """
    from kvrouter.devcommands.simulate import generated
    from kvrouter.devtools.traces.reader import read_shipped_trace, read_trace
    from kvrouter.simulator.workloads.traces import replayable

    if trace is None:
        return read_shipped_trace(limit)
    workload = generated(trace, limit, of_model=of_model)
    return read_trace(Path(trace), limit, of_model) if workload is None else replayable(workload)


def parse_time_scale(load: float, clock: float) -> TimeScale:
    """Returns the time scale of a replay.

    Raises:
        WrongUsage: a factor is not above 0 and finite.
    """
    from kvrouter.devtools.replay.pacing import TimeScale

    try:
        return TimeScale(load, clock)
    except ValueError as error:
        raise WrongUsage(str(error)) from None


def check_modes(modes: list[str]) -> list[str]:
    """Returns the routing modes if each is known and given once.

    Raises:
        WrongUsage: a mode is unknown or given twice.
    """
    from kvrouter.simulator.plan import NAMES

    for mode in modes:
        if mode not in NAMES:
            raise WrongUsage(f"mode {mode!r} is unknown: use {', '.join(NAMES)}")
    if len(set(modes)) != len(modes):
        raise WrongUsage("a mode is given twice: give each once")
    return modes
