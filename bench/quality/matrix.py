"""What the tables of routing quality compare: workloads, fleets, loads and policies, and how one run is measured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.simulator.floor import floor
from kvrouter.simulator.plan import routing_options
from kvrouter.simulator.results.outcome import run_statistics
from kvrouter.simulator.simulation import Setting, simulate
from kvrouter.simulator.workloads import traces
from kvrouter.simulator.workloads.generators import generate
from kvrouter.simulator.workloads.workload import Prompts, Workload

ROOT = Path(__file__).parents[2]
SHARED_TRACE = ROOT.parent / "shared" / "traces" / "conversation_trace.jsonl"
SEEDS, FEW_SEEDS, MOST_SEEDS = 5, 3, 10
WEIGHTS = ("kv:1", "kv:4", "kv:64")
READ_CACHES = ("forecast", *WEIGHTS, "product", "sticky")
"""Policies that a late index can affect."""
COMPARED = (*READ_CACHES, "power-of-two", "round-robin")
FLOOR = "floor"
"""What no policy can improve: see ``kvrouter simulate --floor``."""

_FLEET, _LOADS = 16, (0.05, 0.1, 0.2, 0.5, 1, 2)
_FEW_LOADS = (0.05, 0.2, 1)


@dataclass(frozen=True, slots=True)
class Traffic:
    """A workload, its engines, and its loads below, near and past the knee."""

    requests: int | None
    """Number of requests; None for the whole trace."""
    engines: int
    loads: Sequence[float]
    disturbed: Sequence[float]
    """Loads at which disturbances are run as well."""
    seeds: int = SEEDS


TRAFFIC: Mapping[str, Traffic] = {
    "prompts": Traffic(3000, 8, (2, 3, 4), (3,)),
    "chat": Traffic(3000, 8, (0.2, 3, 5, 7), (5,)),
    "documents": Traffic(1500, 8, (1.5, 2, 3), (2,)),
    "agents": Traffic(8000, _FLEET, (), ()),
    # The whole trace takes as long as ten other runs, and its seeds differ in random draws only.
    "trace": Traffic(None, _FLEET, (2, 4, 5, 6), (), seeds=1),
}


class Sizes(NamedTuple):
    """Blocks of a workload."""

    working_set: int
    """Distinct full blocks of all prompts."""
    largest_request: int
    """Blocks of the longest prompt with its output."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A fleet or a disturbance, and the policies that it affects."""

    title: str
    policies: Sequence[str]
    event_lag_s: float = 0.0
    every_other_speed: float = 1.0
    every_other_cache: float = 1.0
    """Size of every other cache; the size of the others is 2 less this."""
    cache_share: float | None = None
    """All caches together, as a multiple of the distinct blocks of the prompts; None for the default."""
    calibration_error: float = 1.0
    """Expected duration of steps in the policy's time model over their real duration."""
    loads: Sequence[float] | None = None
    """Loads of each generated workload, on 16 engines; None for those of the workload, on its own."""
    seeds: int | None = None
    """Seeds of its runs; None for those of the workload."""

    def fleet(self, engines: int, sizes: Sizes) -> list[EngineConfig]:
        """Returns the engines. None refuses a request because it is larger than its cache."""
        mean = EngineConfig().num_blocks
        if self.cache_share is not None:
            mean = round(self.cache_share * sizes.working_set / engines)
        caches = [round(mean * share) for share in (2 - self.every_other_cache, self.every_other_cache)]
        return [
            EngineConfig(
                num_blocks=max(sizes.largest_request, caches[n % 2]),
                hash_seed=n,
                speed=self.every_other_speed if n % 2 else 1.0,
            )
            for n in range(engines)
        ]


CONDITIONS: Mapping[str, Condition] = {
    "plain": Condition("Nothing wrong", (*COMPARED, "random")),
    "event-lag": Condition("Index 50 ms late", READ_CACHES, event_lag_s=0.05),
    "half-speed": Condition("Every other worker at half speed", COMPARED, every_other_speed=0.5, seeds=10),
    "slow-model": Condition("Forecast times three times too long", ("forecast",), calibration_error=3.0),
    "fast-model": Condition("Forecast times a third of the real ones", ("forecast",), calibration_error=1 / 3),
    "fleet": Condition("16 engines", (*COMPARED, FLOOR), loads=_LOADS),
    **{
        f"cache-{share:g}": Condition(
            f"16 engines, caches of {share:g} times the working set",
            COMPARED,
            cache_share=share,
            loads=_FEW_LOADS,
            seeds=FEW_SEEDS,
        )
        for share in (0.3, 0.5, 1, 2)
    },
    "unequal": Condition(
        "16 engines, caches of 8,192 and 24,576 blocks in turns",
        COMPARED,
        every_other_cache=0.5,
        loads=_FEW_LOADS,
        seeds=FEW_SEEDS,
    ),
    "half-speed-fleet": Condition(
        "16 engines, every other one at half speed",
        COMPARED,
        every_other_speed=0.5,
        loads=_FEW_LOADS,
        seeds=FEW_SEEDS,
    ),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    traffic: str
    seed: int
    condition: str
    load: float
    policy: str

    @property
    def key(self) -> str:
        """Name of the run in the results."""
        return f"{self.traffic}/{self.seed}/{self.condition}/{self.load:g}/{self.policy}"


def loads_of(traffic: str, condition: str) -> Sequence[float]:
    """Returns the loads of a workload under a condition."""
    spec, loads = TRAFFIC[traffic], CONDITIONS[condition].loads
    if loads is not None:
        return loads if spec.requests is not None else ()
    return spec.loads if condition == "plain" else spec.disturbed


def cells() -> Iterator[Cell]:
    """Yields all runs, seed by seed, those of one workload together so that its prompts are hashed once."""
    for seed in range(MOST_SEEDS):
        for traffic, spec in TRAFFIC.items():
            for name, condition in CONDITIONS.items():
                if seed < (condition.seeds or spec.seeds):
                    yield from (
                        Cell(traffic, seed, name, load, policy)
                        for load in loads_of(traffic, name)
                        for policy in condition.policies
                    )


@lru_cache(maxsize=1)
def workload_of(traffic: str, seed: int, trace: Path) -> tuple[Workload, Prompts]:
    """Returns a workload, the trace or a generated one, and its hashed prompts."""
    requests = TRAFFIC[traffic].requests
    workload = traces.read(trace) if requests is None else generate(traffic, requests, seed)
    return workload, Prompts(workload, EngineConfig().block_size)


@lru_cache(maxsize=1)
def sizes_of(traffic: str, seed: int, trace: Path) -> Sizes:
    """Returns the sizes of a workload."""
    workload, prompts = workload_of(traffic, seed, trace)
    distinct: set[int] = set()
    for number in range(len(workload.requests)):
        distinct.update(memoryview(prompts.hashed(number).sequence_hashes).cast("Q"))
    largest = max(request.prompt_tokens + request.output_tokens for request in workload.requests)
    return Sizes(len(distinct), -(-largest // EngineConfig().block_size) + 1)


def measure(cell: Cell, trace: Path) -> dict[str, Any]:
    """Runs one cell. Returns its result."""
    workload, prompts = workload_of(cell.traffic, cell.seed, trace)
    condition = CONDITIONS[cell.condition]
    engines = TRAFFIC[cell.traffic].engines if condition.loads is None else _FLEET
    fleet = condition.fleet(engines, sizes_of(cell.traffic, cell.seed, trace))
    started, workload = time.process_time(), workload.faster(cell.load)
    if cell.policy == FLOOR:
        outcome = floor(workload, fleet, prompts)
    else:
        setting = Setting(
            fleet,
            options=routing_options(cell.policy),
            seed=cell.seed,
            event_lag_s=condition.event_lag_s,
            calibration_error=condition.calibration_error,
            regret=False,
        )
        outcome = simulate(workload, setting, prompts)
    summed = run_statistics(outcome, slo_ttft_s=2.0, slo_itl_s=0.05)
    return {
        "key": cell.key,
        "mean": summed.ttft_ms.mean,
        "p99": summed.ttft_ms.p99,
        "slo": summed.good_share,
        "reuse": summed.reuse,
        "itl": summed.itl_ms.p99,
        "cpu_s": time.process_time() - started,
    }
