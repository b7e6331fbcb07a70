"""The search for settings: all candidates on a part of the workload, then the best ones on a part held out.

First every candidate runs once on the first part of the workload. The best few run again with further seeds. Then the
best of them and the present settings run on the part that was held out, with the same seeds: what they differ by there
is the expected gain. The present settings are kept unless the other ones are better there with most of the seeds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from kvrouter.simulator.simulation import simulate
from kvrouter.simulator.tuning.candidates import Candidate
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
    runs = len(tried) + FINALISTS * (seeds - 1) + 2 * seeds
    affordable = int(seconds * _SAFETY * processes / runs / _seconds_per_request(workload, fleet, tried[0]))
    parts = _parts(workload.first(max(MIN_REQUESTS, affordable)))
    with Trials(fleet, parts, tried, processes=processes, deadline=deadline) as trials:
        everyone = [Trial(place, 0, 0) for place in range(len(tried))]
        scores = trials.run(everyone)
        ranked = sorted((trial.candidate for trial in scores), key=lambda place: scores[Trial(place, 0, 0)])
        finalists = ranked[::-1][:FINALISTS]
        again = [Trial(place, 0, seed) for seed in range(1, seeds) for place in finalists]
        scores |= trials.run(again)
        standings = sorted(
            (_standing(tried, scores, place, 0) for place in ranked), key=lambda each: each.median, reverse=True
        )
        other = next((tried.index(each.candidate) for each in standings if each.candidate != tried[0]), None)
        final = [Trial(place, 1, seed) for seed in range(seeds) for place in (0, other) if place is not None]
        compared = trials.run(final)
    unfinished = len(everyone) + len(again) + len(final) - len(scores) - len(compared)
    common = [seed for seed in range(seeds) if all(Trial(place or 0, 1, seed) in compared for place in (0, other))]
    if other is None or not common:
        raise TooShort(f"no comparison ended within {seconds:g} s: give more time, or fewer requests")
    wins = sum(compared[Trial(other, 1, seed)] > compared[Trial(0, 1, seed)] for seed in common)
    return Tuned(
        best=tried[other] if wins * 2 > len(common) else tried[0],
        present=Standing(tried[0], [compared[Trial(0, 1, seed)] for seed in common]),
        challenger=Standing(tried[other], [compared[Trial(other, 1, seed)] for seed in common]),
        wins=wins,
        tried=standings,
        requests=(len(parts[0].requests), len(parts[1].requests)),
        unfinished=unfinished,
    )


def _standing(tried: Sequence[Candidate], scores: dict[Trial, Score], place: int, part: int) -> Standing:
    return Standing(
        tried[place], [score for trial, score in scores.items() if trial.candidate == place and trial.part == part]
    )


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
