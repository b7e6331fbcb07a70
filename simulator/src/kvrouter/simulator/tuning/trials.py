"""Runs settings on a workload, in several processes and within a time limit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import TimeoutError as Expired, get_context
from multiprocessing.pool import Pool
from types import TracebackType
from typing import NamedTuple, Self

from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.simulator.results.outcome import run_statistics
from kvrouter.simulator.simulation import simulate
from kvrouter.simulator.tuning.candidates import Candidate
from kvrouter.simulator.workloads.workload import Prompts, Workload


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the settings are tried on."""

    engines: Sequence[EngineConfig]
    slo_ttft_s: float
    """Objective for the time to first token, seconds."""
    slo_itl_s: float
    """Objective for a request's mean time between tokens, seconds."""


class Trial(NamedTuple):
    """One run of one candidate."""

    candidate: Candidate
    part: int
    """Index of the part of the workload."""
    seed: int


class Score(NamedTuple):
    """Result of a run; the greater, the better."""

    good_share: float
    """Share of the requests within their objectives."""
    negative_refused_share: float
    """Of several settings with as many requests within their objectives, the one that refuses fewer is better."""
    negative_mean_ttft_ms: float

    @property
    def refused_share(self) -> float:
        """Share of the requests that were refused, since all ranks were busy."""
        return -self.negative_refused_share

    @property
    def ttft_ms(self) -> float:
        """Mean time to first token, ms."""
        return -self.negative_mean_ttft_ms


class Trials:
    """Runs trials. Use it as a context; at its end, runs under way are ended."""

    def __init__(self, fleet: Fleet, parts: Sequence[Workload], *, processes: int, deadline: float) -> None:
        """Starts nothing yet.

        Args:
            fleet: The workers and objectives.
            parts: Parts of the workload.
            processes: Processes that run trials.
            deadline: Time by ``time.monotonic`` at which trials end.
        """
        self._arguments = (fleet, parts)
        self._processes = processes
        self._deadline = deadline
        self._pool: Pool | None = None

    def __enter__(self) -> Self:
        """Starts the processes."""
        self._pool = get_context("spawn").Pool(self._processes, _prepare, self._arguments)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the processes."""
        assert self._pool is not None  # noqa: S101 - it was entered
        self._pool.terminate()
        self._pool.join()

    def run(self, trials: Sequence[Trial]) -> dict[Trial, Score]:
        """Returns the scores of those trials that ended in time."""
        assert self._pool is not None  # noqa: S101 - it was entered
        scores: dict[Trial, Score] = {}
        results = self._pool.imap_unordered(_run, trials)
        for _ in trials:
            try:
                trial, score = results.next(timeout=max(0.0, self._deadline - time.monotonic()))
            except Expired:
                break
            scores[trial] = score
        return scores


class _Work(NamedTuple):
    """What a process runs."""

    fleet: Fleet
    parts: Sequence[Workload]
    prompts: Sequence[Prompts]


_work: list[_Work] = []
"""The work of this process; set once when it starts."""


def _prepare(fleet: Fleet, parts: Sequence[Workload]) -> None:
    block_size = fleet.engines[0].block_size
    _work[:] = [_Work(fleet, parts, [Prompts(part, block_size) for part in parts])]


def _run(trial: Trial) -> tuple[Trial, Score]:
    work = _work[0]
    setting = trial.candidate.setting(work.fleet.engines, trial.seed)
    outcome = simulate(work.parts[trial.part], setting, work.prompts[trial.part])
    summed = run_statistics(outcome, slo_ttft_s=work.fleet.slo_ttft_s, slo_itl_s=work.fleet.slo_itl_s)
    return trial, Score(summed.good_share, -summed.refused_share, -summed.ttft_ms.mean)
