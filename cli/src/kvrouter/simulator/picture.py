"""Draws runs: at one load how long first tokens took, over several loads where each policy's knee is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvrouter.simulator.report import Run, grouped
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

_COLORS = ("#8a8f98", "#0b7a75", "#b5541c", "#5b4b8a", "#b08900", "#2f5d9b", "#9b2f5d", "#4f7d2a")


def draw(path: Path, title: str, runs: Sequence[Run], waits_s: Mapping[tuple[float, str], Sequence[float]]) -> None:
    """Writes a PNG. ``waits_s``: sorted times to first token by (load, policy), of the last seed.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(12.5, 5.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12)
    left, right = figure.subplots(1, 2)
    loads = sorted({run.load for run in runs})
    if len(loads) > 1:
        _over_load(left, runs, lambda run: run.figures.ttft_ms.mean / 1e3)
        left.set_yscale("log")
        left.set_title("Mean time to first token (lower is better)")
        left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _duration(value)))
        _over_load(right, runs, lambda run: run.figures.within_slo / run.figures.requests)
        right.set_title("Requests within their objectives (higher is better)")
        right.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        right.set_ylim(0, 1.02)
    else:
        _distribution(left, waits_s)
        _bars(right, runs)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    left.legend(frameon=False, fontsize=9)
    figure.savefig(path)


def _over_load(axes: Axes, runs: Sequence[Run], value: Callable[[Run], float]) -> None:
    policies = list(dict.fromkeys(run.policy for run in runs))
    groups = grouped(runs)
    for policy, color in zip(policies, _COLORS * len(policies), strict=False):
        points = sorted(
            (load, [value(run) for run in group]) for (load, name), group in groups.items() if name == policy
        )
        middle = [sorted(values)[len(values) // 2] for _, values in points]
        axes.plot(
            [load for load, _ in points], middle, color=color, linewidth=2, marker="o", markersize=4, label=policy
        )
    axes.set_xlabel("load: arrivals against the workload's own rate")


def _distribution(axes: Axes, waits_s: Mapping[tuple[float, str], Sequence[float]]) -> None:
    for ((_, policy), waits), color in zip(waits_s.items(), _COLORS * len(waits_s), strict=False):
        shares = [(place + 1) / len(waits) for place in range(len(waits))]
        axes.step(waits, shares, where="post", color=color, linewidth=2, label=policy)
    axes.set_xscale("log")
    axes.set_title("Time to first token (further left is better)")
    axes.set_ylabel("share of requests that have their first token")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _duration(value)))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_ylim(0, 1)


def _bars(axes: Axes, runs: Sequence[Run]) -> None:
    groups = grouped(runs)
    names = [policy for _, policy in groups]
    reuse = [sum(run.figures.reuse for run in group) / len(group) for group in groups.values()]
    colors = [_COLORS[place % len(_COLORS)] for place in range(len(names))]
    axes.barh(names, reuse, color=colors)
    axes.invert_yaxis()
    axes.set_title("Prompt tokens found in a cache (higher is better)")
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _duration(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"
