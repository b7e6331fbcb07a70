"""Reads the present settings for ``kvrouter tune``, and shows what it found."""

from __future__ import annotations

from pathlib import Path

from kvrouter.cli.errors import WrongUsage
from kvrouter.runtime.config.sources import SettingsError, read_all
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.scheduler.settings import SchedulerSettings
from kvrouter.simulator.tuning.search import Standing, Tuned
from rich import box
from rich.console import Console
from rich.table import Table


def present_options(config: Path | None) -> RoutingOptions:
    """Returns the options of a configuration file, or the defaults.

    Raises:
        WrongUsage: the file cannot be used, or its mode cannot be simulated.
    """
    if config is None:
        return RoutingOptions()
    try:
        (settings,) = read_all([SchedulerSettings], ["--config", str(config)], {})
    except SettingsError as error:
        raise WrongUsage(f"--config: {error}") from None
    options: RoutingOptions = settings.routing()
    if POLICIES[options.mode].needs_worker:
        raise WrongUsage(f"--config: mode {options.mode} cannot be simulated, since requests name their workers")
    return options


def show(tuned: Tuned, workload: str, workers: int, console: Console) -> None:
    """Prints the best settings and how they compare with the present ones."""
    first, held_out = tuned.requests
    console.print(
        f"{workload}: {len(tuned.tried)} settings of {workers} workers on {first:,} requests,"
        f" the best on {held_out:,} further ones",
        highlight=False,
    )
    shown = Table(box=box.SIMPLE_HEAD)
    for name in ("settings", "seeds", "within objectives", "refused", "mean TTFT ms"):
        shown.add_column(name, justify="left" if name == "settings" else "right")
    for standing in tuned.tried[:8]:
        _add(shown, standing, "")
    shown.add_section()
    _add(shown, tuned.present, "held-out part: present, ")
    _add(shown, tuned.challenger, "held-out part: ")
    console.print(shown)
    console.print(gain(tuned), highlight=False)
    if tuned.unfinished:
        console.print(f"{tuned.unfinished} runs did not end in time: give more --budget", highlight=False)


def _add(shown: Table, standing: Standing, before: str) -> None:
    middle = standing.median
    shown.add_row(
        before + standing.candidate.name,
        str(len(standing.scores)),
        f"{middle.good_share:.1%}",
        f"{middle.refused_share:.1%}",
        f"{middle.ttft_ms:,.0f}",
    )


def gain(tuned: Tuned) -> str:
    """Returns what the best settings gain over the present ones, in words."""
    before, after, seeds = tuned.present.median, tuned.challenger.median, len(tuned.present.scores)
    differences = [
        other.ttft_ms - own.ttft_ms for own, other in zip(tuned.present.scores, tuned.challenger.scores, strict=True)
    ]
    verb = "keep" if tuned.best == tuned.present.candidate else "use"
    changes = [f"{after.good_share - before.good_share:+.1%} of the requests within their objectives"]
    if refused := after.refused_share - before.refused_share:
        changes.append(f"{refused:+.1%} refused")
    changes.append(f"{min(differences):+,.0f} to {max(differences):+,.0f} ms mean time to first token")
    return (
        f"{verb} {tuned.best.name}: compared with the present settings, {tuned.challenger.candidate.name}"
        f" has {', '.join(changes)}; better with {tuned.wins} of {seeds} seeds"
    )
