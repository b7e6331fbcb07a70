"""Draws runs: the distribution of first tokens at one load, or each policy's knee over several loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from kvrouter.simulator.results.knee import KNEE_SHARE
from kvrouter.simulator.results.report import Run, grouped, knees
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

_COLORS = ("#8a8f98", "#0b7a75", "#b5541c", "#5b4b8a", "#b08900", "#2f5d9b", "#9b2f5d", "#4f7d2a")


def draw(path: Path, title: str, runs: Sequence[Run], waits_s: Mapping[tuple[float, str], Sequence[float]]) -> None:
    """Writes a picture in the format of the file's suffix: .png, .svg or .pdf.

    Args:
        path: The file.
        title: Title of the picture.
        runs: The runs.
        waits_s: Sorted times to first token, seconds, by (load, policy), of the last seed.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(12.5, 5.4), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=12)
    colors = dict(zip(dict.fromkeys(run.policy for run in runs), _COLORS * len(runs), strict=False))
    if len({run.load for run in runs}) > 1:
        left, right = figure.subplots(1, 2)
        _over_load(left, runs, colors, lambda run: run.statistics.ttft_ms.mean / 1e3)
        left.set_yscale("log")
        left.set_title("Mean time to first token (lower is better)")
        _in_durations(left.yaxis)
        _over_load(right, runs, colors, lambda run: run.statistics.good_share)
        right.set_title("Requests within their objectives (higher is better)")
        right.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        right.set_ylim(0, 1.02)
        _mark_knees(right, knees(runs), colors)
        drawn = [left, right]
    else:
        parts = figure.subplot_mosaic([["waits", "reuse"], ["waits", "good"]], width_ratios=[1.5, 1])
        _distribution(parts["waits"], waits_s, colors)
        _bars(parts["reuse"], runs, colors, lambda run: run.statistics.reuse)
        parts["reuse"].set_title("Prompt tokens found in a cache (higher is better)")
        _bars(parts["good"], runs, colors, lambda run: run.statistics.good_share)
        parts["good"].set_title("Requests within their objectives (higher is better)")
        drawn = list(parts.values())
    for axes in drawn:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(alpha=0.25)
    drawn[0].legend(frameon=False, fontsize=9)
    figure.savefig(path)


def _over_load(axes: Axes, runs: Sequence[Run], colors: Mapping[str, str], value: Callable[[Run], float]) -> None:
    groups = grouped(runs)
    for policy, color in colors.items():
        points = sorted(
            (load, median(value(run) for run in group)) for (load, name), group in groups.items() if name == policy
        )
        axes.plot(
            [load for load, _ in points],
            [middle for _, middle in points],
            color=color,
            linewidth=2,
            marker="o",
            markersize=4,
            label=policy,
        )
    axes.set_xlabel("load: arrivals against the workload's own rate")


def _mark_knees(axes: Axes, at: Mapping[str, float], colors: Mapping[str, str]) -> None:
    axes.axhline(KNEE_SHARE, color="#555555", linewidth=0.8, linestyle=(0, (4, 3)))
    axes.annotate(
        f"knee: {KNEE_SHARE:.0%}",
        (1, KNEE_SHARE),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        fontsize=9,
    )
    for policy, load in at.items():
        if math.isfinite(load):
            axes.plot([load, load], [0, KNEE_SHARE], color=colors[policy], linewidth=1, linestyle=(0, (2, 2)))
            axes.plot([load], [KNEE_SHARE], color=colors[policy], marker="D", markersize=6)


def _distribution(axes: Axes, waits_s: Mapping[tuple[float, str], Sequence[float]], colors: Mapping[str, str]) -> None:
    for (_, policy), waits in waits_s.items():
        shares = [(place + 1) / len(waits) for place in range(len(waits))]
        axes.step(waits, shares, where="post", color=colors[policy], linewidth=2, label=policy)
    axes.set_xscale("log")
    axes.set_title("Time to first token (further left is better)")
    axes.set_ylabel("share of requests that have their first token")
    _in_durations(axes.xaxis)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_ylim(0, 1)


def _bars(axes: Axes, runs: Sequence[Run], colors: Mapping[str, str], value: Callable[[Run], float]) -> None:
    shares = {policy: median(value(run) for run in group) for (_, policy), group in grouped(runs).items()}
    drawn = axes.barh(list(shares), list(shares.values()), color=[colors[policy] for policy in shares])
    axes.bar_label(drawn, labels=[f"{share:.1%}" for share in shares.values()], padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(max(shares.values()) * 1.15, 0.01))
    axes.xaxis.set_major_formatter(PercentFormatter(1))


def _in_durations(axis: Axis) -> None:
    """Labels a log scale at 1, 2 and 5 of each decade."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms"))
    axis.set_minor_formatter(NullFormatter())
