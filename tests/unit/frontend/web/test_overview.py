"""The page's data: history, problems and JSON, from what services report."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from kvrouter.frontend.web.overview import decision, overview
from kvrouter.frontend.web.problems import problems
from kvrouter.frontend.web.traffic import History
from kvrouter.runtime.overview.ranks import HitWindow
from kvrouter.runtime.overview.system import FrontendView, IndexerView, SchedulerView, System
from kvrouter.v1.common_pb2 import Component, PrefillDecision, Rank
from kvrouter.v1.frontend_pb2 import GetWorkerHealthResponse, WorkerHealth, WorkerHealthState
from kvrouter.v1.indexer_pb2 import ComponentStats, GetStatsResponse, RankStats
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import (
    CandidateTerms,
    ComponentStatus,
    ComponentSums,
    Decision,
    GetStatusResponse,
    HitCounts,
    QueueStatus,
    RankStatus,
)

NAME = ComponentName("n", "pool")
COMPONENT = Component(namespace="n", name="pool")
AT = datetime(2026, 1, 1, tzinfo=UTC)


def status(*ranks: RankStatus, **fields: object) -> GetStatusResponse:
    component = ComponentStatus(component=COMPONENT, model="m", mode="kv", ranks=ranks, **fields)
    return GetStatusResponse(scheduler_id="s", ready=True, started_unix_ns=1, components=[component])


def rank(worker_id: int = 1, *, prompt: int = 0, cached: int = 0, **fields: object) -> RankStatus:
    hits = HitCounts(requests=prompt // 100, prompt_tokens=prompt, cached_tokens=cached)
    return RankStatus(rank=Rank(worker_id=worker_id), registered=True, cache_hits=hits, total_blocks=100, **fields)


def sums(
    *, prompt: int = 0, cached: int = 0, predicted: int = 0, reachable: int = 0, **fields: int
) -> GetStatusResponse:
    hits = HitCounts(
        requests=prompt // 100,
        prompt_tokens=prompt,
        cached_tokens=cached,
        predicted_prompt_tokens=predicted,
        reachable_cached_tokens=reachable,
    )
    return status(sums=ComponentSums(total_blocks=100, cache_hits=hits, **fields))


def system(response: GetStatusResponse | None = None, **views: object) -> System:
    views = {"indexers": [IndexerView("i:1", GetStatsResponse(replica_id="i"))], **views}
    return System(AT, [SchedulerView("s:1", response or status(rank()))], **views)  # type: ignore[arg-type]


def found(seen: System) -> list[tuple[str, str]]:
    return [(each.severity, each.what) for each in problems(seen, HitWindow(60))]


def test_a_healthy_system_has_no_problems() -> None:
    assert found(system()) == []


def test_history_has_what_happened_between_samples() -> None:
    history = History()
    history.take(system(sums(prompt=1000, cached=100)), 0.0)
    later = sums(prompt=1500, cached=400, predicted=400, reachable=350, active_blocks=25, active_requests=3)
    history.take(system(later), 10.0)
    (point,) = history.points
    assert (point.predicted_prompt_tokens, point.reachable_tokens) == (400, 350)
    assert (point.requests, point.prompt_tokens, point.cached_tokens) == (5, 500, 300)
    assert (point.active_requests, point.active_share) == (3, 0.25)


def test_history_survives_a_restarted_scheduler_and_an_absent_one() -> None:
    history = History()
    history.take(system(sums(prompt=1000, cached=100)), 0.0)
    history.take(System(AT, [SchedulerView("s:1", failure="gone")]), 10.0)
    assert not history.at_rest, "nobody answers"
    history.take(system(sums(prompt=1200, cached=200)), 20.0)
    restarted = sums(prompt=100, cached=50)
    restarted.started_unix_ns = 2
    history.take(system(restarted), 30.0)
    assert [(point.prompt_tokens, point.seconds) for point in history.points] == [(0, 10), (200, 20), (100, 10)]


def test_history_counts_a_request_that_replicas_have_booked_too_once() -> None:
    history = History()
    deciding, replica = sums(active_requests=3, active_blocks=25), sums(active_requests=2, active_blocks=20)
    replica.scheduler_id = "r"
    seen = System(AT, [SchedulerView("r:1", replica), SchedulerView("s:1", deciding)])
    history.take(seen, 0.0)
    history.take(seen, 10.0)
    assert (history.points[0].active_requests, history.points[0].active_share) == (3, 0.25)


def test_history_sums_the_ranks_that_an_earlier_scheduler_lists() -> None:
    history = History()
    earlier, later = status(rank(prompt=1000, cached=100)), status(rank(prompt=1500, cached=400, active_requests=3))
    idle = sums()
    idle.scheduler_id = "r"
    for response, now in ((earlier, 0.0), (later, 10.0)):
        history.take(System(AT, [SchedulerView("r:1", idle), SchedulerView("s:1", response)]), now)
    (point,) = history.points
    assert (point.prompt_tokens, point.cached_tokens, point.active_requests) == (500, 300, 3)
    assert point.active_share == 0


def test_the_rate_of_a_component_is_that_of_its_sums() -> None:
    window = HitWindow(60)
    window.take(system(sums(prompt=1000, cached=100)), 0.0)
    window.take(system(sums(prompt=2000, cached=600)), 10.0)
    assert window.rate(NAME).found == 0.5
    assert window.rates(NAME) == {}


def test_history_is_of_an_hour_and_knows_the_length_of_intervals() -> None:
    history = History()
    for number in range(500):
        history.take(replace(system(sums()), at=AT + timedelta(seconds=10 * number)), 10.0 * number)
    assert len(history.points) == 360
    assert {point.seconds for point in history.points} == {10.0}
    for number in range(500, 900):
        history.take(replace(system(sums()), at=AT - timedelta(days=1)), 10.0 * number)
    assert len(history.points) == 360, "the clock was set back"
    assert {point.seconds for point in history.points} == {10.0}


def test_history_is_at_rest_while_nothing_runs_or_ends() -> None:
    history = History()
    history.take(system(sums()), 0.0)
    assert not history.at_rest, "nothing is known of the time before"
    for response, at_rest in (
        (sums(), True),
        (sums(active_requests=1), False),
        (sums(prompt=1500), False),
        (sums(prompt=1500), True),
    ):
        history.take(system(response), 10.0)
        assert history.at_rest == at_rest


def test_a_service_that_is_away_is_an_error() -> None:
    seen = system(indexers=[IndexerView("i:1", failure="Connection refused")])
    assert found(seen) == [("error", "Indexer at i:1 does not answer: Connection refused")]
    assert ("error", "etcd does not answer") in found(System(AT, note="etcd does not answer"))


def test_worker_health_names_the_cause() -> None:
    worker = WorkerHealth(
        component=COMPONENT,
        worker_id=1,
        endpoint="w:1",
        state=WorkerHealthState.WORKER_HEALTH_STATE_BACKED_OFF,
        last_failure="out of memory",
    )
    seen = system(frontends=[FrontendView("f:1", GetWorkerHealthResponse(workers=[worker]))])
    assert found(seen) == [("error", "worker 1 of n/pool: requests fail: out of memory")]


def test_busy_queued_and_lagging_parts_are_named() -> None:
    queued = QueueStatus(requests=90, capacity=100)
    stats = ComponentStats(component=COMPONENT, ready=True, stream_error="no space", last_stream_sequence=20_000)
    stats.ranks.extend(RankStats(rank=Rank(worker_id=each), silent=True) for each in range(7))
    stats.ranks.add(rank=Rank(worker_id=7))
    seen = system(
        status(rank(1, busy="full"), rank(2, busy="full"), queued=queued),
        indexers=[IndexerView("i:1", GetStatsResponse(replica_id="i", components=[stats]))],
    )
    assert found(seen) == [
        ("error", "every rank of n/pool is busy: requests wait or are refused"),
        ("error", "n/pool: 90 of at most 100 requests queued"),
        ("error", "Indexer i, pool: the stream takes no messages: no space"),
        ("warning", "Indexer i, pool: 20,000 messages behind"),
        ("warning", "Indexer i, pool: ranks 0:0, 1:0, 2:0, 3:0, 4:0 and 2 more: no events or heartbeats"),
    ]


def test_an_indexer_that_hears_no_worker_at_all_is_one_problem() -> None:
    silent = [RankStats(rank=Rank(worker_id=each), silent=True) for each in range(2)]
    pools = [
        ComponentStats(component=Component(namespace="n", name=name), ready=True, ranks=silent)
        for name in ("decode", "prefill")
    ]
    seen = system(status(rank()), indexers=[IndexerView("i:1", GetStatsResponse(replica_id="i", components=pools))])
    assert found(seen) == [("error", "Indexer i: no events or heartbeats of any worker")]


def test_every_problem_has_a_remedy() -> None:
    seen = system(status(), indexers=[])
    assert problems(seen, HitWindow(60))
    assert all(each.remedy.endswith(".") for each in problems(seen, HitWindow(60)))


def test_the_overview_is_json() -> None:
    seen = system(status(rank(2, active_blocks=50, draining=True)))
    rates = HitWindow(60)
    rates.take(seen, 0.0)
    shown = overview(
        seen, rates, rates, history=[], traffic=None, prefixes=[], found=[], roles={NAME: "decode"}, frontend_ids={}
    )
    (component,) = json.loads(json.dumps(shown, allow_nan=False))["components"]
    assert (component["name"], component["role"]) == ("n/pool", "decode")
    (row,) = component["ranks"]
    assert (row["rank"], row["active_blocks"], row["notes"]) == (
        "2:0",
        50,
        [{"severity": "warning", "what": "draining"}],
    )


@pytest.mark.parametrize(("remote", "who"), [(True, "a prefill worker"), (False, "this rank")])
def test_a_decision_says_who_computes_the_prompt(remote: bool, who: str) -> None:
    prefill = PrefillDecision(remote=remote, reason="to transfer takes 5.0 ms")
    message = Decision(component=COMPONENT, chosen=Rank(worker_id=1), prefill=prefill)
    assert decision(message, "s:1")["prefill"] == f"prefill by {who}: to transfer takes 5.0 ms"
    assert decision(Decision(component=COMPONENT), "s:1")["prefill"] == ""


def test_a_decision_has_every_candidate_and_no_infinity() -> None:
    message = Decision(decision_id=1 << 63, request_id="mine~1a2b", component=COMPONENT, chosen=Rank(worker_id=1))
    message.decided_unix_ns = int((AT + timedelta(seconds=1)).timestamp() * 1e9)
    message.candidates.append(CandidateTerms(rank=Rank(worker_id=1), cost=1.5, terms={"load": 2.0}))
    message.candidates.append(CandidateTerms(rank=Rank(worker_id=2), cost=float("inf"), excluded="busy"))
    shown = json.loads(json.dumps(decision(message, "s:1"), allow_nan=False))
    assert (shown["id"], shown["request"], shown["rank"]) == (str(1 << 63), "mine", "1:0")
    assert [each["cost"] for each in shown["candidates"]] == [1.5, None]
    assert shown["candidates"][0]["terms"] == {"load": 2.0}
