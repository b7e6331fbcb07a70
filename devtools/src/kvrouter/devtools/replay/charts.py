"""Draws runs side by side: how much of the prompts was cached, of what was possible, and the time to first token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvrouter.devtools.replay.statistics import RunStatistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#8a8f98", "#0b7a75", "#b5541c", "#5b4b8a")
_QUANTILES = ("half within (p50)", "90% within (p90)", "99% within (p99)")


def draw(path: Path, runs: Sequence[RunStatistics]) -> None:
    """Draws the runs to a PNG file.

    Raises:
        OSError: the file cannot be written.
    """
    # Imported here because they take long to import, and most commands draw nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 5.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    first = runs[0]
    figure.suptitle(
        f"{first.requests:,} requests on {first.workers} workers, load factor {first.load:g}, "
        f"clock factor {first.clock:g}",
        fontsize=12,
    )
    cached, waits = figure.subplots(1, 2, width_ratios=(1, 1.6))
    _draw_hit_rates(cached, runs)
    _draw_waits(waits, runs)
    for axes in (cached, waits):
        axes.grid(visible=True, axis="y", color="#e3e3e3", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _draw_hit_rates(axes: Axes, runs: Sequence[RunStatistics]) -> None:
    from matplotlib.ticker import PercentFormatter

    rates = [0.0 if math.isnan(run.hit_rate) else run.hit_rate for run in runs]
    bars = axes.bar([_name(run) for run in runs], rates, color=_colors(runs), width=0.6)
    axes.bar_label(bars, [f"{rate:.1%}" for rate in rates], padding=3, fontsize=11)
    possible = runs[0].possible_hit_rate
    if not math.isnan(possible):
        axes.axhline(possible, color="#222222", linestyle="--", linewidth=1.2)
        axes.text(-0.4, possible, f"best possible: {possible:.1%}", verticalalignment="bottom", fontsize=10)
    axes.set_title("Prompt tokens from a cache (higher is better)")
    axes.set_ylabel("share of prompt tokens")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_ylim(0, max([*rates, 0.0 if math.isnan(possible) else possible, 0.01]) * 1.15)


def _draw_waits(axes: Axes, runs: Sequence[RunStatistics]) -> None:
    width = 0.8 / len(runs)
    for place, (run, color) in enumerate(zip(runs, _colors(runs), strict=True)):
        measured = (run.ttft_ms.p50, run.ttft_ms.p90, run.ttft_ms.p99)
        seconds = [0.0 if math.isnan(each) else each / 1e3 for each in measured]
        places = [group + (place - (len(runs) - 1) / 2) * width for group in range(len(_QUANTILES))]
        bars = axes.bar(places, seconds, width=width * 0.92, color=color, label=_name(run))
        axes.bar_label(bars, [_duration(each) for each in measured], padding=3, fontsize=10)
    axes.set_xticks(range(len(_QUANTILES)), _QUANTILES)
    axes.set_title("Time to first token (lower is better)")
    axes.set_ylabel("seconds of engine time")
    axes.legend(frameon=False, loc="upper left")


def _name(run: RunStatistics) -> str:
    return run.mode if run.valid else f"{run.mode} (INVALID)"


def _colors(runs: Sequence[RunStatistics]) -> list[str]:
    return [_COLORS[place % len(_COLORS)] for place in range(len(runs))]


def _duration(milliseconds: float) -> str:
    if math.isnan(milliseconds):
        return "-"
    return f"{milliseconds / 1000:.1f} s" if milliseconds >= 1000 else f"{milliseconds:.0f} ms"
