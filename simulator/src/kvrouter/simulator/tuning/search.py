"""The search for settings: all candidates on a part of the workload, then the best ones on a part held out.

First every candidate runs once on the first part of the workload, then the best one with several busy thresholds. The
best few run again with further seeds. The best of them and the present settings run on the part that was held out, with
the same seeds: what they differ by there is the expected gain. The present settings are kept unless the other ones are
better there with most of the seeds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from kvrouter.scheduler.request.options import Thresholds
from kvrouter.simulator.simulation import simulate
from kvrouter.simulator.tuning.candidates import Candidate, replace_thresholds, with_thresholds
from kvrouter.simulator.tuning.trials import Fleet, Score, Trial, Trials
from kvrouter.simulator.workloads.workload import Prompts, Workload

HELD_OUT = 0.3
"""Share of the workload that is held out."""
FINALISTS = 4
"""Candidates that run with further seeds."""
MIN_REQUESTS = 20
"""Least number of requests of a workload."""
_PROBE_REQUESTS = 60
_SAFETY = 0.5
"""Share of the time that the runs are planned for: other processes may slow them down."""


class TooShort(ValueError):
    """The workload has too few requests, or the time does not suffice for them."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Results of one candidate."""

    candidate: Candidate
    scores: Sequence[Score]
    """Scores by seed."""

    @property
    def median(self) -> Score:
        """Medians over the seeds."""
        return Score(
            median(score.good_share for score in self.scores),
            median(score.negative_refused_share for score in self.scores),
            median(score.negative_mean_ttft_ms for score in self.scores),
        )


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of a search."""

    best: Candidate
    """What to use: the present settings if nothing is better."""
    present: Standing
    """The present settings on the held-out part."""
    challenger: Standing
    """The best other settings, on the held-out part."""
    wins: int
    """Seeds with which the challenger was better there."""
    tried: Sequence[Standing]
    """All candidates on the first part, the best one first."""
    requests: tuple[int, int]
    """Requests of the first part and of the held-out part."""
    unfinished: int
    """Runs that did not end in time."""


def search(
    workload: Workload, fleet: Fleet, tried: Sequence[Candidate], *, seeds: int, seconds: float, processes: int
) -> Tuned:
    """Finds the best settings.

    Args:
        workload: The workload.
        fleet: The workers and objectives.
        tried: Candidates, the present settings first, at least two.
        seeds: Runs of each finalist, with consecutive seeds.
        seconds: Time limit.
        processes: Processes that run simulations.

    Raises:
        TooShort: the workload has too few requests, or the time does not suffice for a comparison.
    """
    deadline = time.monotonic() + seconds
    if len(workload.requests) < MIN_REQUESTS:
        raise TooShort(f"the workload has {len(workload.requests)} requests: expected at least {MIN_REQUESTS}")
    present, batched_tokens = tried[0], fleet.engines[0].max_batched_tokens
    runs = len(tried) + len(with_thresholds(present, batched_tokens)) + FINALISTS * (seeds - 1) + 2 * seeds
    affordable = int(seconds * _SAFETY * processes / runs / _seconds_per_request(workload, fleet, present))
    parts = _parts(workload.first(max(MIN_REQUESTS, affordable)))
    with Trials(fleet, parts, processes=processes, deadline=deadline) as trials:
        search = _Search(trials)
        search.run(tried, 0, [0])
        search.run([other for best in search.ranked(0)[:1] for other in with_thresholds(best, batched_tokens)], 0, [0])
        search.run(search.ranked(0)[:FINALISTS], 0, range(1, seeds))
        ranked = search.ranked(0)
        challenger = next((each for each in ranked if each != present), None)
        if challenger is not None:
            search.run([present, challenger], 1, range(seeds))
    compared = [] if challenger is None else search.common_seeds(present, challenger, 1)
    if challenger is None or not compared:
        raise TooShort(f"no comparison ended within {seconds:g} s: give more time, or fewer requests")
    before, after = search.standing(present, 1, compared), search.standing(challenger, 1, compared)
    wins = sum(own < other for own, other in zip(before.scores, after.scores, strict=True))
    return Tuned(
        best=challenger if wins * 2 > len(compared) else present,
        present=before,
        challenger=after,
        wins=wins,
        tried=[search.standing(each, 0, range(seeds)) for each in ranked],
        requests=(len(parts[0].requests), len(parts[1].requests)),
        unfinished=search.unfinished,
    )


class _Search:
    """The scores so far."""

    def __init__(self, trials: Trials) -> None:
        self.unfinished = 0
        """Runs that did not end in time."""
        self._trials = trials
        self._scores: dict[Trial, Score] = {}

    def run(self, tried: Iterable[Candidate], part: int, seeds: Iterable[int]) -> None:
        """Runs every candidate with every seed on a part of the workload."""
        trials = [Trial(candidate, part, seed) for seed in seeds for candidate in tried]
        scores = self._trials.run(trials)
        self.unfinished += len(trials) - len(scores)
        # In the order of the trials, not of their ends: equal candidates rank in the order in which they are given.
        self._scores |= {trial: scores[trial] for trial in trials if trial in scores}

    def standing(self, candidate: Candidate, part: int, seeds: Iterable[int]) -> Standing:
        """Returns the scores of a candidate by seed."""
        trials = [Trial(candidate, part, seed) for seed in seeds]
        return Standing(candidate, [self._scores[trial] for trial in trials if trial in self._scores])

    def ranked(self, part: int) -> list[Candidate]:
        """Returns the candidates by their medians, the best one first.

        Those with a threshold that is never reached are left out: they score as without it.
        """
        seeds = range(1 + max((trial.seed for trial in self._scores), default=0))
        distinct: dict[tuple[Score, Candidate], Candidate] = {}
        for trial, score in self._scores.items():
            if (trial.part, trial.seed) == (part, 0):
                distinct.setdefault((score, replace_thresholds(trial.candidate, Thresholds())), trial.candidate)
        return sorted(distinct.values(), key=lambda each: self.standing(each, part, seeds).median, reverse=True)

    def common_seeds(self, one: Candidate, other: Candidate, part: int) -> list[int]:
        """Returns the seeds with which both candidates ended on a part."""
        own = [trial.seed for trial in self._scores if (trial.candidate, trial.part) == (one, part)]
        return [seed for seed in own if Trial(other, part, seed) in self._scores]


def _parts(workload: Workload) -> tuple[Workload, Workload]:
    """Divides a workload in time; the second part starts at 0 too."""
    requests = workload.requests
    cut = len(requests) - max(1, round(HELD_OUT * len(requests)))
    start = requests[cut].arrives_s
    later = [replace(request, arrives_s=request.arrives_s - start) for request in requests[cut:]]
    return workload.first(cut), replace(workload, requests=later)


def _seconds_per_request(workload: Workload, fleet: Fleet, candidate: Candidate) -> float:
    """Measures the time of a simulation, seconds for each request."""
    probe = workload.first(_PROBE_REQUESTS)
    started = time.perf_counter()
    simulate(probe, candidate.setting(fleet.engines, 0), Prompts(probe, fleet.engines[0].block_size))
    return max((time.perf_counter() - started) / len(probe.requests), 1e-6)
