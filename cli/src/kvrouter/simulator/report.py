"""Tells a person, and a machine, what runs came to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvrouter.simulator.outcome import Figures
from rich import box
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Run:
    """One run, and what it was."""

    policy: str
    load: float
    seed: int
    figures: Figures
    wall_s: float
    """Time that the simulation itself took."""


def table(runs: Sequence[Run], title: str) -> Table:
    """A row for each load and policy; over several seeds, the median of each figure."""
    drawn = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    drawn.add_column("load")
    drawn.add_column("policy")
    for name in (
        "reuse",
        "TTFT p50",
        "p90",
        "p99",
        "mean ms",
        "ITL p50",
        "p99 ms",
        "within SLO",
        "imbalance",
        "regret ms",
    ):
        drawn.add_column(name, justify="right")
    for (load, policy), group in grouped(runs).items():
        figures = [run.figures for run in group]
        drawn.add_row(
            f"x{load:g}",
            policy,
            f"{_median([f.reuse for f in figures]):.1%}",
            *[f"{_median([getattr(f.ttft_ms, name) for f in figures]):,.0f}" for name in ("p50", "p90", "p99", "mean")],
            *[f"{_median([getattr(f.itl_ms, name) for f in figures]):,.1f}" for name in ("p50", "p99")],
            f"{_median([f.within_slo for f in figures]):,.0f}",
            f"{_median([f.imbalance for f in figures]):.2f}",
            f"{_median([f.regret_ms for f in figures]):,.1f}",
        )
    return drawn


def grouped(runs: Sequence[Run]) -> Mapping[tuple[float, str], list[Run]]:
    """Runs that differ in their seed only, in the order in which they were made."""
    groups: dict[tuple[float, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.load, run.policy), []).append(run)
    return groups


def write_json(path: Path, setting: Mapping[str, Any], runs: Sequence[Run]) -> None:
    """Writes the figures of all runs. Raises OSError if the file cannot be written."""
    document = {"setting": dict(setting), "runs": [asdict(run) for run in runs]}
    path.write_text(json.dumps(_without_nan(document), indent=1) + "\n", encoding="utf-8")


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
