"""Options that several commands of the development stack have, and their parsing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from kvrouter.cli.errors import WrongUsage
from kvrouter.devtools.replay.pacing import TimeScale
from kvrouter.devtools.traces.reader import TraceRequest, read_shipped_trace, read_trace
from kvrouter.simulator.plan import NAMES

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
OfModel = Annotated[str | None, typer.Option(help="Model whose requests are taken from a recording of several models.")]


def read_requests(trace: Path | None, limit: int | None, of_model: str | None = None) -> list[TraceRequest]:
    """Reads a trace, the shipped one if ``trace`` is None.

    Raises:
        TraceError: the file is unreadable or not a trace.
    """
    return read_shipped_trace(limit) if trace is None else read_trace(trace, limit, of_model)


def parse_time_scale(load: float, clock: float) -> TimeScale:
    """Returns the time scale of a replay.

    Raises:
        WrongUsage: a factor is not above 0 and finite.
    """
    try:
        return TimeScale(load, clock)
    except ValueError as error:
        raise WrongUsage(str(error)) from None


def check_modes(modes: list[str]) -> list[str]:
    """Returns the routing modes if each is known and given once.

    Raises:
        WrongUsage: a mode is unknown or given twice.
    """
    for mode in modes:
        if mode not in NAMES:
            raise WrongUsage(f"mode {mode!r} is unknown: use {', '.join(NAMES)}")
    if len(set(modes)) != len(modes):
        raise WrongUsage("a mode is given twice: give each once")
    return modes
