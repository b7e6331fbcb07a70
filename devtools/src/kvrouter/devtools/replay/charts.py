"""Draws runs side by side: the distribution of the time to first token, and the hit rate over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrouter.devtools.replay.records import RequestRecord
from kvrouter.devtools.replay.statistics import RunStatistics, hit_rate

_COLORS = ("#8a8f98", "#0b7a75", "#b5541c", "#5b4b8a")
_WINDOWS = 12  # time windows over which hit rates are averaged: about 70 requests each in the demo


@dataclass(frozen=True, slots=True)
class DrawnRun:
    """A run to draw."""

    statistics: RunStatistics
    records: Sequence[RequestRecord]


def hit_rate_over_time(records: Sequence[RequestRecord], windows: int = _WINDOWS) -> tuple[list[float], list[float]]:
    """Returns the middle of each window (engine seconds) and the hit rate of its requests, without empty windows."""
    span = max((record.due_engine_s for record in records), default=0.0)
    width = span / windows if span else 1.0
    gathered: list[list[RequestRecord]] = [[] for _ in range(windows)]
    for record in records:
        gathered[min(int(record.due_engine_s / width), windows - 1)].append(record)
    points = [((place + 0.5) * width, hit_rate(window)) for place, window in enumerate(gathered)]
    drawn = [point for point in points if not math.isnan(point[1])]
    return [time for time, _ in drawn], [rate for _, rate in drawn]


def draw(path: Path, runs: Sequence[DrawnRun]) -> None:
    """Draws the runs to a PNG file.

    Raises:
        OSError: the file cannot be written.
    """
    # Imported here because they take long to import, and most commands draw nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    figure = Figure(figsize=(12.5, 5.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    first = runs[0].statistics
    figure.suptitle(
        f"{first.requests:,} requests on {first.workers} workers, load factor {first.load:g}, "
        f"clock factor {first.clock:g}",
        fontsize=12,
    )
    times, rates = figure.subplots(1, 2)
    for run, color in zip(runs, _COLORS, strict=False):
        name = run.statistics.mode if run.statistics.valid else f"{run.statistics.mode} (INVALID)"
        waits = sorted(record.ttft_ms for record in run.records if record.ttft_ms is not None)
        median = run.statistics.ttft_ms.p50
        times.step(
            waits,
            [(place + 1) / len(waits) for place in range(len(waits))],
            where="post",
            color=color,
            linewidth=2,
            label=f"{name}: half within {_duration(median)}, 99% within {_duration(run.statistics.ttft_ms.p99)}",
        )
        moments, values = hit_rate_over_time(run.records)
        rates.plot(moments, values, color=color, linewidth=2, label=f"{name}: {run.statistics.hit_rate:.1%} overall")
    times.set_xscale("log")
    times.set_title("Time to first token (further left is better)")
    times.set_xlabel("engine time")
    times.set_ylabel("share of requests that have their first token")
    times.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _duration(value)))
    times.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    times.set_ylim(0, 1)
    rates.set_title("Prompt tokens found in a cache (higher is better)")
    rates.set_xlabel("arrival, seconds of engine time")
    rates.set_ylabel("share of prompt tokens")
    rates.yaxis.set_major_formatter(PercentFormatter(1))
    rates.set_ylim(bottom=0)
    for axes in (times, rates):
        axes.grid(visible=True, color="#e3e3e3", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right" if axes is times else "best")
    figure.savefig(path)


def _duration(milliseconds: float) -> str:
    if math.isnan(milliseconds):
        return "-"
    return (
        f"{milliseconds / 1000:g} s"
        if milliseconds >= 1000 and milliseconds % 100 == 0
        else (f"{milliseconds / 1000:.1f} s" if milliseconds >= 1000 else f"{milliseconds:.0f} ms")
    )
