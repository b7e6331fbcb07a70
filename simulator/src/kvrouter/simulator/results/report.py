"""Reports the results of runs as tables and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvrouter.simulator.results.knee import KNEE_SHARE, knee
from kvrouter.simulator.results.outcome import RunStatistics
from rich import box
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Run:
    """One run with its settings and statistics."""

    policy: str
    load: float
    seed: int
    statistics: RunStatistics
    wall_s: float
    """Real time that the simulation took, seconds."""


Figure = tuple[str, Callable[[RunStatistics], float], str]
"""Name, value and format."""

_BRIEF: Sequence[Figure] = (
    ("reuse", lambda f: f.reuse, ".1%"),
    ("TTFT p50", lambda f: f.ttft_ms.p50, ",.0f"),
    ("p90", lambda f: f.ttft_ms.p90, ",.0f"),
    ("p99", lambda f: f.ttft_ms.p99, ",.0f"),
    ("mean ms", lambda f: f.ttft_ms.mean, ",.0f"),
    ("ITL p50", lambda f: f.itl_ms.p50, ",.1f"),
    ("p99", lambda f: f.itl_ms.p99, ",.1f"),
    ("mean ms", lambda f: f.itl_ms.mean, ",.1f"),
    ("within SLO", lambda f: f.within_slo, ",.0f"),
    ("imbalance", lambda f: f.imbalance, ".2f"),
    ("regret ms", lambda f: f.regret_ms, ",.1f"),
)

_RARE: Sequence[Figure] = (
    ("prompt tokens loaded from host memory", lambda f: f.host_reuse, ".1%"),
    ("prompt tokens loaded from shared storage", lambda f: f.shared_reuse, ".1%"),
    ("refused: all engines busy", lambda f: f.refused, ",.0f"),
    ("queued at the Scheduler", lambda f: f.queued, ",.0f"),
    ("prompts computed by the prefill pool", lambda f: f.prefilled_remotely, ",.0f"),
    ("preemptions", lambda f: f.preemptions, ",.0f"),
    ("sent again after a restart", lambda f: f.retried, ",.0f"),
    ("failed by a restart", lambda f: f.failed, ",.0f"),
)
"""Statistics that are left out if they are 0."""
_INDENT = len("time to first token, ms: mean")
_FULL: Sequence[Sequence[Figure]] = (
    (("prompt tokens found in a cache", lambda f: f.reuse, ".1%"),),
    (
        ("time to first token, ms:  p50", lambda f: f.ttft_ms.p50, ",.0f"),
        ("p90".rjust(_INDENT), lambda f: f.ttft_ms.p90, ",.0f"),
        ("p99".rjust(_INDENT), lambda f: f.ttft_ms.p99, ",.0f"),
        ("mean".rjust(_INDENT), lambda f: f.ttft_ms.mean, ",.0f"),
    ),
    (
        ("time between tokens, ms:  p50", lambda f: f.itl_ms.p50, ",.1f"),
        ("p90".rjust(_INDENT), lambda f: f.itl_ms.p90, ",.1f"),
        ("p99".rjust(_INDENT), lambda f: f.itl_ms.p99, ",.1f"),
        ("mean".rjust(_INDENT), lambda f: f.itl_ms.mean, ",.1f"),
    ),
    (
        ("requests within objectives", lambda f: f.within_slo, ",.0f"),
        ("goodput: of those, per second", lambda f: f.goodput_per_s, ",.2f"),
        ("requests per second", lambda f: f.requests_per_s, ",.2f"),
        ("output tokens per second", lambda f: f.output_tokens_per_s, ",.0f"),
    ),
    (
        ("load imbalance: busiest engine / mean", lambda f: f.imbalance, ".2f"),
        ("fullest engine / mean, at arrivals", lambda f: f.block_peak, ".2f"),
        ("longest prefill queue, tokens, at arrivals", lambda f: f.longest_prefill_tokens, ",.0f"),
        ("regret, ms", lambda f: f.regret_ms, ",.1f"),
    ),
    _RARE,
)


def table(runs: Sequence[Run]) -> Table:
    """Returns policies side by side at one load, or a row for each load and policy. Values are medians over seeds."""
    return _by_load(runs) if len({run.load for run in runs}) > 1 else _side_by_side(runs)


def _side_by_side(runs: Sequence[Run]) -> Table:
    groups = grouped(runs)
    drawn = Table(box=box.SIMPLE_HEAD)
    drawn.add_column(f"load x{runs[0].load:g}", no_wrap=True)
    for _, policy in groups:
        drawn.add_column(policy, justify="right")
    for section in _FULL:
        for name, value, shape in section:
            cells = _cells(groups.values(), value, shape)
            if section is not _RARE or any(cell not in ("0", "0.0%") for cell in cells):
                drawn.add_row(name, *cells)
        drawn.add_section()
    return drawn


def _by_load(runs: Sequence[Run]) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD)
    drawn.add_column("load")
    drawn.add_column("policy")
    for name, _, _ in _BRIEF:
        drawn.add_column(name, justify="right")
    for (load, policy), group in grouped(runs).items():
        drawn.add_row(f"x{load:g}", policy, *[_cells([group], value, shape)[0] for _, value, shape in _BRIEF])
    return drawn


def _cells(groups: Iterable[Sequence[Run]], value: Callable[[RunStatistics], float], shape: str) -> list[str]:
    middles = [median(value(run.statistics) for run in group) for group in groups]
    return ["-" if math.isnan(middle) else format(middle, shape) for middle in middles]


def knees(runs: Sequence[Run]) -> dict[str, float]:
    """Returns the knee of each policy over the simulated loads; empty with one load."""
    shares: dict[str, list[tuple[float, float]]] = {}
    for (load, policy), group in sorted(grouped(runs).items()):
        share = median(run.statistics.good_share for run in group)
        shares.setdefault(policy, []).append((load, share))
    order = dict.fromkeys(run.policy for run in runs)
    return {policy: knee(shares[policy]) for policy in order if len(shares[policy]) > 1}


def knee_text(runs: Sequence[Run]) -> str:
    """Returns the knees as a line of text; empty with one load."""
    loads = [run.load for run in runs]

    def where(load: float) -> str:
        if math.isinf(load):
            return f"beyond x{max(loads):g}" if load > 0 else f"before x{min(loads):g}"
        return f"x{load:.1f}"

    found = ", ".join(f"{policy} {where(load)}" for policy, load in knees(runs).items())
    return found and f"knee (fewer than {KNEE_SHARE:.0%} within their objectives): {found}"


def grouped(runs: Sequence[Run]) -> Mapping[tuple[float, str], list[Run]]:
    """Returns runs grouped by everything but their seed, in the order in which they were made."""
    groups: dict[tuple[float, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.load, run.policy), []).append(run)
    return groups


def write_json(path: Path, setting: Mapping[str, Any], runs: Sequence[Run]) -> None:
    """Writes the statistics of all runs. NaN becomes null, as does a knee beyond the loads.

    Raises:
        OSError: the file cannot be written.
    """
    document = {"setting": dict(setting), "runs": [asdict(run) for run in runs], "knees": knees(runs)}
    path.write_text(json.dumps(_without_nan(document), indent=1) + "\n", encoding="utf-8")


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
