"""Tables of a benchmark: every measured row, and every bar with met or missed."""

from __future__ import annotations

from bars import BARS
from rich.table import Table
from samples import Samples

_COLUMNS = {
    "cpu_us": "CPU µs",
    "engine_cpu_us": "engines' CPU µs",
    "p50_us": "p50 µs",
    "p99_us": "p99 µs",
    "per_second": "per second",
    "resident_mb": "MB",
    "failed": "failed",
}


def measurements(samples: Samples) -> Table:
    """Returns medians with the lowest and the highest CPU, a line for each row and system."""
    table = Table("work", "system", *_COLUMNS.values(), "parts", title="medians; lowest and highest CPU in brackets")
    for row, system in samples.rows():
        cells = [_cell(samples, row, system, name) for name in _COLUMNS]
        others = [name for name in samples.names(row, system) if name not in _COLUMNS]
        parts = [f"{name.removeprefix('cpu_us ')} {_cell(samples, row, system, name, spread=False)}" for name in others]
        table.add_row(row, system, *cells, ", ".join(parts))
    return table


def bars(samples: Samples, before: Samples | None = None) -> Table:
    """Returns every bar with what was measured; ``before`` adds a column with an earlier run's values."""
    table = Table("work", "system", "bar", *(("before",) if before else ()), "measured", "", title="bars")
    for bar in BARS:
        verdict = bar.verdict(samples)
        style = {"met": "green", "missed": "bold red"}.get(verdict, "dim")
        earlier = (bar.show(bar.measured(before)),) if before else ()
        shown = (bar.show(bar.measured(samples)), f"[{style}]{verdict}[/]")
        table.add_row(bar.work, bar.system, f"≤ {bar.show(bar.limit)}", *earlier, *shown)
    return table


def _cell(samples: Samples, row: str, system: str, name: str, *, spread: bool = True) -> str:
    values = samples.of(row, system, name)
    middle = samples.median(row, system, name)
    if middle is None:
        return ""
    if not spread or name != "cpu_us" or len(values) == 1:
        return _number(middle)
    return f"{_number(middle)} [{_number(min(values))}, {_number(max(values))}]"


def _number(value: float) -> str:
    digits = 0 if abs(value) >= 100 or value == 0 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"
