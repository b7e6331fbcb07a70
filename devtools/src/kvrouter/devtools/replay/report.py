"""Reports the results of runs as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrouter.devtools.replay.statistics import MAX_LATE_ENGINE_MS, MAX_STEP_LATE_MS, RunStatistics
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    value: Callable[[RunStatistics], float | None]
    form: Callable[[float], str]
    lower_is_better: bool | None = None
    """None if a comparison has no meaning."""
    same_at_clock_1: bool = False
    """Whether another row has the same value while engine time is wall time."""


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _plain(value: float) -> str:
    return f"{value:.2f}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _of_possible(run: RunStatistics) -> str:
    possible = "" if math.isnan(run.possible_hit_rate) else f" of {_percent(run.possible_hit_rate)}"
    return "-" if math.isnan(run.hit_rate) else f"{_percent(run.hit_rate)}{possible}"


_HIT_RATE = "cached tokens, of possible"
_TTFT_P50 = _Row("time to first token, p50", lambda run: run.ttft_ms.p50, _milliseconds, lower_is_better=True)
_TTFT_P99 = _Row("time to first token, p99", lambda run: run.ttft_ms.p99, _milliseconds, lower_is_better=True)
_ITL_P50 = _Row("time between tokens, p50", lambda run: run.itl_ms.p50, _milliseconds, lower_is_better=True)
_ITL_P99 = _Row("time between tokens, p99", lambda run: run.itl_ms.p99, _milliseconds, lower_is_better=True)
_OUTPUT = _Row("output tokens per second", lambda run: run.output_tokens_per_engine_s, _count, lower_is_better=False)
_PEAK = _Row("prefill load, busiest / mean", lambda run: run.balance.peak, _plain, lower_is_better=True)
_COMPLETED = _Row("requests completed", lambda run: run.completed, _count)

_HOST = _Row("loaded from host memory", lambda run: run.host_rate, _percent)
_SHARED = _Row("loaded from shared storage", lambda run: run.shared_rate, _percent)

_SUMMARY = ((_HOST, _SHARED, _TTFT_P50, _TTFT_P99, _ITL_P50, _ITL_P99, _OUTPUT, _PEAK, _COMPLETED),)
"""Rows after the hit rate."""
_ALL: tuple[tuple[_Row, ...], ...] = (
    (
        _HOST,
        _SHARED,
        _TTFT_P50,
        _Row("time to first token, p90", lambda run: run.ttft_ms.p90, _milliseconds, lower_is_better=True),
        _TTFT_P99,
        _Row("time to first token, mean", lambda run: run.ttft_ms.mean, _milliseconds, lower_is_better=True),
        _ITL_P50,
        _ITL_P99,
        _Row("requests per second", lambda run: run.requests_per_engine_s, _plain, lower_is_better=False),
        _OUTPUT,
        _PEAK,
        _Row("prefill load, deviation / mean", lambda run: run.balance.variation, _plain, lower_is_better=True),
    ),
    (
        _Row("router's own added time, p50 (wall)", lambda run: run.router_ms.p50, _milliseconds),
        _Row("router's own added time, p99 (wall)", lambda run: run.router_ms.p99, _milliseconds),
        _Row("requests per second (wall)", lambda run: run.requests_per_wall_s, _plain, same_at_clock_1=True),
        _Row("overlap predicted exactly", lambda run: run.prediction_exact, _percent),
        _Row("cache events applied by the Indexer", lambda run: run.counts.events_applied, _count),
        _Row("faulty cache events", lambda run: run.counts.events_faulty, _count),
    ),
    (
        _COMPLETED,
        _Row("errors", lambda run: sum(run.errors.values()), _count),
        _Row("retried on another worker", lambda run: run.retried, _count),
        _Row("requests sent late by, p99 (engine)", lambda run: run.late_engine_ms.p99, _milliseconds),
        _Row(
            "requests sent late by, p99 (wall)",
            lambda run: run.late_wall_ms.p99,
            _milliseconds,
            same_at_clock_1=True,
        ),
        _Row("engine steps late by, p99 (engine)", lambda run: run.counts.step_late_p99_ms, _milliseconds),
    ),
)


def settings_line(run: RunStatistics) -> str:
    """Returns a sentence with the settings that a run's statistics depend on."""
    arrivals = "as" if run.load == 1 else f"{run.load:g} times as fast as"
    workers = "1 worker" if run.workers == 1 else f"{run.workers} workers"
    time_scale = (
        "engine time is wall time."
        if run.clock == 1
        else f"{run.clock:g} engine seconds pass in one wall second. Times are engine time unless marked."
    )
    return (
        f"{workers}, {run.requests:,} requests. Load factor {run.load:g}: requests arrive {arrivals} "
        f"in the trace. Clock factor {run.clock:g}: {time_scale}"
    )


def report(runs: Sequence[RunStatistics], *, verbose: bool = False) -> RenderableType:
    """Returns the table: a column for each run, and for two runs a column that compares the second with the first.

    Args:
        runs: The runs, at least one.
        verbose: Whether to show every statistic instead of the eight that matter most.
    """
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("")
    for run in runs:
        table.add_column(run.mode, justify="right", style="bold" if run.valid else "red")
    if len(runs) == 2:
        # The heading has two lines, so that the table fits into 80 columns.
        table.add_column(f"{runs[1].mode} against\n{runs[0].mode}", justify="left")
    achieved = [run.hit_rate for run in runs]
    versus = [_better(achieved[0], achieved[1], lower_is_better=False)] if len(runs) == 2 else []
    table.add_row(_HIT_RATE, *(_of_possible(run) for run in runs), *versus)
    for group in _ALL if verbose else _SUMMARY:
        for row in group:
            if row.same_at_clock_1 and all(run.clock == 1 for run in runs):
                continue
            values = [row.value(run) for run in runs]
            if all(value is None or math.isnan(value) for value in values):
                continue
            cells: list[RenderableType] = [_cell(row, value) for value in values]
            table.add_row(row.name, *cells, *([_comparison(row, values[0], values[1])] if len(runs) == 2 else []))
        table.add_section()
    parts: list[RenderableType] = [table, Text(settings_line(runs[0]))]
    parts.extend(_remarks(runs))
    return Group(*parts)


def write_json(path: Path, runs: Sequence[RunStatistics], trace: str) -> None:
    """Writes the statistics of all runs to a JSON file."""
    document = {
        "trace": trace,
        "bounds": {"late_engine_ms_p99": MAX_LATE_ENGINE_MS, "step_late_ms_p99": MAX_STEP_LATE_MS},
        "runs": [run.as_json() for run in runs],
    }
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def print_report(console: Console, runs: Sequence[RunStatistics], *, verbose: bool = False) -> None:
    """Prints the table, as ``report`` returns it."""
    console.print()
    console.print(report(runs, verbose=verbose))


def _cell(row: _Row, value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else row.form(value)


def _comparison(row: _Row, first: float | None, second: float | None) -> Text:
    if row.lower_is_better is None or first is None or second is None:
        return Text("")
    return _better(first, second, lower_is_better=row.lower_is_better)


def _better(first: float, second: float, *, lower_is_better: bool) -> Text:
    if not first > 0 or math.isnan(second):
        return Text("")
    ratio = second / first
    if abs(ratio - 1) < 0.02:
        return Text("same")
    better = (ratio < 1) == lower_is_better
    change = f"{ratio - 1:.0%} more" if ratio > 1 else f"{1 - ratio:.0%} less"
    words = f"{ratio:.1f} times" if ratio >= 2 else change
    return Text(words, style="green" if better else "yellow")


def _remarks(runs: Sequence[RunStatistics]) -> list[Text]:
    remarks = []
    for run in runs:
        remarks += [
            Text(f"{run.mode}: {count} requests ended with {code}: {run.error_examples[code]}", style="red")
            for code, count in sorted(run.errors.items())
        ]
        remarks += [Text(f"INVALID {run.mode}: {reason}", style="bold red") for reason in run.invalid]
    if any(run.late_engine_ms.p99 > MAX_LATE_ENGINE_MS for run in runs):
        remarks.append(Text("The machine is too busy for this clock factor: try a lower --clock."))
    if all(run.valid for run in runs):
        within = f"within {MAX_LATE_ENGINE_MS:.0f} ms of engine time of when they were due (p99)"
        remarks.append(
            Text(
                f"Valid: requests left and engine steps ended {within}, "
                "so the statistics are the system's, not the machine's."
                if all(run.counts.step_late_p99_ms is not None for run in runs)
                else f"Valid: requests left {within}."
            )
        )
    return remarks
