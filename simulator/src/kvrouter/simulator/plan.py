"""The runs of a simulation: each policy at each load with each seed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvrouter.mocker.engine.implementation import IMPLEMENTATION
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.request.options import MAX_WEIGHT, RoutingOptions
from kvrouter.simulator.floor import floor
from kvrouter.simulator.results.outcome import Outcome, run_statistics
from kvrouter.simulator.results.report import Run
from kvrouter.simulator.simulation import Setting, simulate
from kvrouter.simulator.workloads.workload import Prompts, Workload
from rich.console import Console

NAMES = tuple(mode for mode, policy in POLICIES.items() if not policy.needs_worker)
"""Policies that can be simulated: all except those that need a worker in the request."""


FLOOR = "floor"
"""Name of the floor among the policies of a result."""


class InvalidPolicy(ValueError):
    """A policy is unknown, or its weight is invalid."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Runs that differ only in policy, load and seed."""

    workload: Workload
    setting: Setting
    """Settings common to all runs; policy and seed in it are replaced."""
    policies: Sequence[str]
    """Policies as on the command line: a mode, for kv optionally with its weight after a colon."""
    loads: Sequence[float]
    seeds: Sequence[int]
    slo_ttft_s: float
    slo_itl_s: float
    temperature: float = 0.0
    floor: bool = False
    """Whether the floor is shown beside the policies: one cache of the size of all, without queueing."""

    def described(self) -> Mapping[str, Any]:
        """Returns the common settings as JSON values."""
        setting = self.setting
        return {
            "workload": self.workload.name,
            "requests": len(self.workload.requests),
            "engines": [asdict(config) for config in setting.engines],
            "prefill_engines": [asdict(config) for config in setting.prefill_engines],
            "remote_prefill": asdict(setting.options.remote_prefill) if setting.prefill_engines else None,
            "event_lag_s": setting.event_lag_s,
            "calibration_error": setting.calibration_error,
            "restarts": list(setting.restarts),
            "slo_ttft_s": self.slo_ttft_s,
            "slo_itl_s": self.slo_itl_s,
            "temperature": self.temperature,
            "schedulers": setting.schedulers,
            "sharded": setting.sharded,
            "sync": asdict(setting.sync) if setting.sync is not None else None,
            "engine_model": IMPLEMENTATION,
        }


def run_plan(plan: Plan, console: Console | None = None) -> tuple[list[Run], dict[tuple[float, str], list[float]]]:
    """Runs everything. Returns the runs, and the sorted times to first token (s) of the last seed of each.

    Raises:
        InvalidPolicy: a policy is unknown.
    """
    prompts = Prompts(plan.workload, plan.setting.engines[0].block_size)
    options = {name: routing_options(name, plan.temperature) for name in plan.policies}
    runs: list[Run] = []
    waits: dict[tuple[float, str], list[float]] = {}

    def add(name: str, load: float, seed: int, outcome: Outcome, started: float) -> None:
        summed = run_statistics(outcome, slo_ttft_s=plan.slo_ttft_s, slo_itl_s=plan.slo_itl_s)
        runs.append(Run(name, load, seed, summed, time.perf_counter() - started))
        waits[load, name] = sorted(request.ttft_s for request in outcome.served if request.was_served)
        if console is not None and console.is_terminal:
            console.print(f"[dim]x{load:g} {name} seed {seed}: {runs[-1].wall_s:.1f} s[/dim]", highlight=False)

    for load in plan.loads:
        workload = plan.workload.faster(load)
        for name in plan.policies:
            for seed in plan.seeds:
                started = time.perf_counter()
                chosen = replace(options[name], remote_prefill=plan.setting.options.remote_prefill)
                setting = replace(plan.setting, options=chosen, seed=seed)
                add(name, load, seed, simulate(workload, setting, prompts), started)
        if plan.floor:
            started = time.perf_counter()
            engines = plan.setting.prefill_engines or plan.setting.engines
            add(FLOOR, load, plan.seeds[0], floor(workload, engines, prompts), started)
    return runs, waits


def routing_options(name: str, temperature: float = 0.0) -> RoutingOptions:
    """Returns the routing options of a policy as it is named on the command line.

    Raises:
        InvalidPolicy: the name is unknown or the weight is invalid.
    """
    mode, colon, weight = name.partition(":")
    if mode not in NAMES:
        raise InvalidPolicy(f"policy {mode!r} is not known; use one of {', '.join(NAMES)}")
    if not colon:
        return RoutingOptions(mode, temperature=temperature)
    if mode != "kv":
        raise InvalidPolicy(f"policy {mode} has no weight; only kv has")
    try:
        value = float(weight)
    except ValueError:
        raise InvalidPolicy(f"weight is {weight!r}, must be a number") from None
    if not 0 <= value <= MAX_WEIGHT:
        raise InvalidPolicy(f"weight is {weight}, must be 0 to {MAX_WEIGHT:g}")
    return RoutingOptions(mode, overlap_score_weight=value, temperature=temperature)
