"""The search for settings: what is tried, and when it is believed."""

from __future__ import annotations

import time
import tomllib

import pytest
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.scheduler.request.remote_prefill import RemotePrefillOptions
from kvrouter.scheduler.settings import SchedulerSettings
from kvrouter.simulator.tuning.candidates import Candidate, candidates
from kvrouter.simulator.tuning.configuration import toml_of
from kvrouter.simulator.tuning.search import TooShort, search
from kvrouter.simulator.tuning.trials import Fleet, Score, Trial, Trials
from kvrouter.simulator.workloads.generators import generate
from kvrouter.simulator.workloads.workload import Request, Workload

FORECAST = Candidate(RoutingOptions("forecast"))
ENGINES = [EngineConfig(hash_seed=number) for number in range(4)]
FLEET = Fleet(ENGINES, 0.5, 0.05)


def test_every_candidate_is_tried_once_the_present_one_first() -> None:
    tried = candidates(FORECAST, 16, splits=True)
    assert tried[0] == FORECAST
    assert len(set(tried)) == len(tried)
    assert {each.prefill for each in tried} == {0, 2, 4, 6, 8}
    assert {each.prefill for each in candidates(FORECAST, 16, splits=False)} == {0}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_small_fleet_keeps_a_decode_worker(workers: int) -> None:
    assert all(each.prefill < workers for each in candidates(FORECAST, workers, splits=True))


def test_routing_by_cache_is_found_where_prompts_repeat() -> None:
    # Seven long prompts in turn: routed by cache, each is computed once.
    requests = [Request(0.05 * n, 4096, 8, tuple(range(64 * (n % 7), 64 * (n % 7) + 64))) for n in range(150)]
    tried = [Candidate(RoutingOptions("round-robin")), FORECAST]
    tuned = search(Workload("repeated", requests, 64), FLEET, tried, seeds=2, seconds=60, processes=1)
    assert tuned.best == FORECAST
    assert tuned.wins == 2
    assert tuned.challenger.median > tuned.present.median
    kept = search(Workload("repeated", requests, 64), FLEET, tried[::-1], seeds=2, seconds=60, processes=1)
    assert kept.best == FORECAST, "the present settings stay if nothing is better"


def test_trials_end_with_the_time_limit() -> None:
    workload = generate("prompts", 40)
    with Trials(FLEET, [workload], processes=1, deadline=time.monotonic()) as trials:
        assert trials.run([Trial(FORECAST, 0, 0)]) == {}


def test_a_time_limit_that_suffices_for_nothing_is_an_error() -> None:
    with pytest.raises(TooShort, match="give more time"):
        search(
            generate("prompts", 40), FLEET, [FORECAST, Candidate(RoutingOptions("kv"))], seeds=1, seconds=0, processes=1
        )


def test_objectives_come_before_refusals_and_these_before_the_mean() -> None:
    assert Score(0.9, -0.1, -500) > Score(0.8, 0.0, -100)
    assert Score(0.9, 0.0, -500) > Score(0.9, -0.1, -100)
    assert Score(0.9, 0.0, -100) > Score(0.9, 0.0, -500)


def test_a_busy_threshold_is_found_where_refusals_keep_others_within_their_objectives() -> None:
    # Twice as many prompts as the engines can compute: without refusals, all of them come late.
    requests = [Request(0.01 * n, 4096, 2, tuple(range(64 * n, 64 * n + 64))) for n in range(150)]
    workload = Workload("overload", requests, 64)
    tuned = search(workload, FLEET, [FORECAST, Candidate(RoutingOptions("kv"))], seeds=1, seconds=60, processes=1)
    assert tuned.best.options.thresholds.any_set
    assert tuned.challenger.median.refused_share > 0
    assert tuned.challenger.median.good_share > tuned.present.median.good_share + 0.1
    written = tomllib.loads(toml_of(tuned.best, 4, "because"))["scheduler"]
    assert {name for name in written if name.startswith("active_")}


def test_a_threshold_that_is_never_reached_is_not_listed() -> None:
    tuned = search(
        generate("prompts", 40),
        FLEET,
        [FORECAST, Candidate(RoutingOptions("round-robin"))],
        seeds=1,
        seconds=60,
        processes=1,
    )
    assert not any(standing.candidate.options.thresholds.any_set for standing in tuned.tried)


def test_the_file_has_the_options_of_the_pools() -> None:
    remote = RemotePrefillOptions(min_tokens=2048)
    written = toml_of(Candidate(RoutingOptions("kv", remote_prefill=remote), prefill=4), 16, "because")
    assert tomllib.loads(written)["fleet"] == {"prefill": 4, "decode": 12}
    assert tomllib.loads(written)["scheduler"]["remote_prefill_min_tokens"] == 2048


@pytest.mark.parametrize("mode", sorted(POLICIES))
def test_the_file_has_no_option_that_its_mode_ignores(mode: str) -> None:
    for found in (Candidate(RoutingOptions(mode)), Candidate(RoutingOptions(mode), prefill=4)):
        written = tomllib.loads(toml_of(found, 16, "because"))["scheduler"]
        assert SchedulerSettings(**written).ignored_options() == []
        assert ("overlap_score_weight" in written) == (mode == "kv")
