"""A frame of ``kvrouter top``, out of answers of Schedulers and Indexers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from kvrouter.cli.terminal import PlainConsole, count
from kvrouter.cli.top.frame import frame
from kvrouter.runtime.overview.ranks import HitRate, HitWindow, duration
from kvrouter.runtime.overview.system import FrontendView, IndexerView, SchedulerView, System
from kvrouter.v1.common_pb2 import BusyThresholds, Component, LowerTiers, PrefillDecision, Rank, Role
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.frontend_pb2 import GetWorkerHealthResponse, WorkerHealth, WorkerHealthState
from kvrouter.v1.indexer_pb2 import ComponentStats, GetStatsResponse, RankStats
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import (
    CandidateTerms,
    ComponentStatus,
    Decision,
    GetStatusResponse,
    HitCounts,
    QueuedRequest,
    QueueStatus,
    RankStatus,
    ReplicaStatus,
    TierTokens,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
NOW_NS = int(NOW.timestamp() * 1e9)
POOL = ComponentName("ns", "pool")


def component(name: str = "pool") -> Component:
    return Component(namespace="ns", name=name)


def rank(worker_id: int, **fields: Any) -> RankStatus:
    known: dict[str, Any] = {"registered": True, "total_blocks": 1000}
    return RankStatus(rank=Rank(worker_id=worker_id), **(known | fields))


def pool(*ranks: RankStatus, name: str = "pool", **fields: Any) -> ComponentStatus:
    return ComponentStatus(component=component(name), model="m", mode="kv", ranks=ranks, **fields)


def scheduler(*components: ComponentStatus, name: str = "s-1", **fields: Any) -> SchedulerView:
    known: dict[str, Any] = {"ready": True, "started_unix_ns": NOW_NS - 90 * 10**9}
    status = GetStatusResponse(scheduler_id=name, components=components, **(known | fields))
    return SchedulerView(f"{name}:1", status)


def indexer(*ranks: RankStats, name: str = "i-1", ready: bool = True) -> IndexerView:
    stats = ComponentStats(component=component(), ready=ready, blocks=sum(each.blocks for each in ranks), ranks=ranks)
    return IndexerView(f"{name}:1", GetStatsResponse(replica_id=name, components=[stats]))


def system(schedulers: Sequence[SchedulerView], indexers: Sequence[IndexerView] = (), note: str = "") -> System:
    return System(NOW, schedulers, indexers, note=note)


def lines(view: System, *, width: int = 160, height: int | None = None) -> list[str]:
    hit_rates = HitWindow(60)
    hit_rates.take(view, 0.0)
    out = io.StringIO()
    PlainConsole(width, file=out).print(frame(view, hit_rates, width=width, height=height))
    return out.getvalue().splitlines()


def line(found: list[str], start: str) -> str:
    return next(each for each in found if each.startswith(start))


def test_a_rank_shows_its_load_its_hits_and_its_events() -> None:
    loaded = rank(
        1,
        active_blocks=250,
        prefill_tokens=1234,
        active_requests=3,
        cache_hits=HitCounts(
            prompt_tokens=100, cached_tokens=60, predicted_prompt_tokens=100, predicted_cached_tokens=64
        ),
    )
    known = RankStats(rank=Rank(worker_id=1), blocks=900, lag_us=3_100, verified=True)
    found = lines(system([scheduler(pool(loaded, rank(2)), bookings=3, sessions=1)], [indexer(known)]))
    assert "s-1 at s-1:1 ready  3 bookings, 1 session, up 2 min" in line(found, "Scheduler")
    assert "i-1 at i-1:1 ready  900 blocks, 0 messages behind" in line(found, "Indexer")
    assert "model m, mode kv; hit rates since the start" in line(found, "ns/pool")
    row = line(found, "1:0").split()
    assert row[1] == "███░░░░░░░"
    assert row[2:] == ["250", "/", "1,000", "1,234", "3", "900", "64", "%", "60", "%", "3", "ms", "ok"]
    assert line(found, "2:0").split()[2:] == [
        "0",
        "/",
        "1,000",
        "0",
        "0",
        "-",
        "-",
        "-",
        "-",
        "no",
        "KV",
        "events:",
        "its",
        "cache",
        "is",
        "predicted",
    ]
    assert line(found, "2 ranks").split()[3:] == ["250", "/", "2,000", "1,234", "3", "900", "64", "%", "60", "%"]


@pytest.mark.parametrize(
    ("status", "stats", "state"),
    [
        (rank(1, busy="busy: 9 prefill tokens, above 8"), None, "busy: 9 prefill tokens, above 8"),
        (rank(1, draining=True), None, "draining"),
        (rank(1, relative_latency=1.96), None, "2.0 times as slow"),
        (rank(1, relative_latency=1.2, draining=True), None, "draining"),
        (rank(1, report_age_ms=70_000), None, "no load report for 1 min"),
        (rank(1, registered=False), None, "gone, with bookings"),
        (rank(1), RankStats(rank=Rank(worker_id=1), partial=True), "index partial"),
        (rank(1), RankStats(rank=Rank(worker_id=1)), "index not compared"),
        (
            rank(1),
            RankStats(rank=Rank(worker_id=1), verified=True, silent=True, heard_age_ms=70_000, evidence_age_ms=2_000),
            "no heartbeat for 1 min",
        ),
        (
            rank(1),
            RankStats(rank=Rank(worker_id=1), stale=True, silent=True, heard_age_ms=40_000, evidence_age_ms=20_000),
            "index stale for 20 s, no heartbeat for 40 s",
        ),
    ],
)
def test_what_is_unusual_about_a_rank_is_said(status: RankStatus, stats: RankStats | None, state: str) -> None:
    indexers = [] if stats is None else [indexer(stats)]
    assert line(lines(system([scheduler(pool(status))], indexers)), "1:0").rstrip().endswith(state)


def test_a_scheduler_that_etcd_does_not_answer_says_so() -> None:
    away = scheduler(pool(rank(1)), directory_age_ms=70_000)
    assert "etcd silent for 1 min" in line(lines(system([away])), "Scheduler")
    fresh = scheduler(pool(rank(1)), directory_age_ms=4_000)
    assert "etcd" not in line(lines(system([fresh])), "Scheduler")


def test_the_lag_of_a_silent_rank_is_the_time_since_its_last_event() -> None:
    heard = RankStats(rank=Rank(worker_id=1), verified=True, lag_us=3_000, heard_age_ms=1_000)
    silent = RankStats(rank=Rank(worker_id=1), verified=True, lag_us=3_000, silent=True, heard_age_ms=47_000)
    row = line(lines(system([scheduler(pool(rank(1)))], [indexer(heard), indexer(silent, name="i-2")])), "1:0")
    assert ">47 s" in row, "the Indexer that hears less counts"
    assert "no heartbeat for 47 s" in row
    assert "ok" not in row.split()


def test_an_indexer_that_cannot_ask_nats_says_how_old_its_knowledge_is() -> None:
    away = ComponentStats(
        component=component(), ready=True, stream_checked_age_ms=70_000, stream_error="no space left on device"
    )
    view = IndexerView("i-1:1", GetStatsResponse(replica_id="i-1", components=[away]))
    found = line(lines(system([scheduler(pool(rank(1)))], [view])), "Indexer")
    assert "0 messages behind 1 min ago, pool: stream takes no messages" in found


def test_without_an_indexer_cached_blocks_are_what_the_worker_reports() -> None:
    reporting = rank(1, reported=LoadReport(cached_blocks=77))
    found = lines(system([scheduler(pool(reporting))], [IndexerView("i-1:1", failure="refused")]))
    assert line(found, "Indexer") == "Indexer   at i-1:1 does not answer: refused"
    assert line(found, "1:0").split()[-5] == "77"
    assert any("no Indexer is there" in each for each in lines(system([scheduler(pool(reporting))])))


def test_a_decision_shows_the_next_cheapest_and_why() -> None:
    decision = Decision(
        component=component(),
        request_id="a-conversation-with-a-long-name-17~5eed",
        mode="kv",
        chosen=Rank(worker_id=1),
        decided_unix_ns=NOW_NS,
        prompt_blocks=40,
        reason="lowest cost",
        load_only=True,
        prefill=PrefillDecision(remote=True),
        candidates=[
            CandidateTerms(rank=Rank(worker_id=1), cost=125.5, overlap_blocks=12),
            CandidateTerms(rank=Rank(worker_id=3), cost=2130, overlap_blocks=1),
        ],
    )
    refused = Decision(component=component(), mode="kv", decided_unix_ns=NOW_NS - 1, reason="all workers are busy")
    found = lines(system([scheduler(pool(rank(1)), decisions=[refused, decision])]))
    first, second = found[-2:]
    assert "a-conver…-a-long-name-17  1:0   12 / 40" in first
    assert (
        "kv: lowest cost 125.5; next 3:0 2,130.0 (1 cached); a prefill worker computes the prompt; on load alone"
        in first
    )
    assert "(not booked)" in second
    assert second.rstrip().endswith("kv: all workers are busy")


def test_held_requests_are_shown_with_the_longest() -> None:
    waiting = QueuedRequest(
        request_id="r", rank=Rank(worker_id=2), age_ms=1200, reason="the cheapest rank lacks KV blocks"
    )
    queued = QueueStatus(requests=1, capacity=64, oldest_age_ms=1200, refused_full=2, longest=[waiting])
    found = lines(system([scheduler(pool(rank(2, queued_requests=1), queued=queued))]))
    assert "queued 1 of at most 64, the oldest for 1.2 s; refused 2 for lack of room, 0 too late anyway" in found
    assert "  r for 1.2 s, for rank 2:0: the cheapest rank lacks KV blocks" in found
    assert "+1 queued" in line(found, "2:0")


def test_the_view_of_the_scheduler_that_decides_counts() -> None:
    old = Decision(component=component(), decided_unix_ns=NOW_NS - 5)
    new = Decision(component=component(), decided_unix_ns=NOW_NS)
    idle = scheduler(pool(rank(1)), name="s-1", decisions=[old])
    deciding = scheduler(pool(rank(1, active_requests=9)), name="s-2", decisions=[new])
    away = SchedulerView("s-3:1", failure="refused")
    found = lines(system([idle, deciding, away]))
    assert line(found, "Scheduler at s-3:1") == "Scheduler at s-3:1 does not answer: refused"
    assert "load as s-2 sees it" in line(found, "ns/pool")
    assert line(found, "1:0").split()[5:7] == ["0", "9"]


def test_replicas_whose_load_is_counted_are_named() -> None:
    replicas = [
        ReplicaStatus(scheduler_id="s-1", bookings=2, complete=True),
        ReplicaStatus(scheduler_id="s-2", bookings=3, heard_age_ms=400, complete=True),
        ReplicaStatus(scheduler_id="s-3", bookings=1, heard_age_ms=2000),
    ]
    found = lines(system([scheduler(pool(rank(1), replicas=replicas))]))
    assert (
        "with the load of s-2 (3 bookings, heard 400 ms ago); s-3 (1 booking, heard 2.0 s ago, "
        "its state is being fetched)"
    ) in found
    assert not any("with the load of" in each for each in lines(system([scheduler(pool(replicas=replicas[:1]))])))


def test_each_component_has_its_ranks() -> None:
    thresholds = BusyThresholds(active_decode_blocks_threshold=0.85, active_prefill_tokens_threshold=8192)
    decision = Decision(component=component("other"), decided_unix_ns=NOW_NS)
    both = scheduler(pool(rank(1)), pool(rank(7), name="other", thresholds=thresholds), decisions=[decision])
    found = lines(system([both]))
    assert "busy above 85% of the blocks active or 8,192 prefill tokens" in line(found, "ns/other")
    assert found.index(line(found, "ns/other")) < found.index(line(found, "7:0")) < found.index(line(found, "1:0"))
    assert " other " in found[-1]


@pytest.mark.parametrize(
    ("view", "words"),
    [
        (system([], note="etcd at e:1 does not answer"), ["etcd at e:1 does not answer"]),
        (system([SchedulerView("s:1", failure="refused")]), ["no Scheduler answers"]),
        (system([scheduler()]), ["no worker is registered"]),
    ],
)
def test_an_absence_is_said(view: System, words: list[str]) -> None:
    found = lines(view)
    assert all(each in found for each in words)


@pytest.mark.parametrize("height", [16, 24, 60])
@pytest.mark.parametrize("width", [70, 80, 100, 200])
def test_a_frame_fits_the_terminal(width: int, height: int) -> None:
    ranks = [
        rank(number, active_blocks=number * 10_000, total_blocks=100_000, prefill_tokens=10**6, busy="so " * 40)
        for number in range(1, 101)
    ]
    decisions = [Decision(component=component(), decided_unix_ns=NOW_NS + n, reason="so " * 80) for n in range(50)]
    found = lines(system([scheduler(pool(*ranks), decisions=decisions)]), width=width, height=height)
    assert len(found) <= height
    assert all(len(each) <= width for each in found)
    assert any(each.startswith("100:0") for each in found)  # the busiest one
    assert any(" of 100 " in each for each in found) == (height < 60 or len(found) < 100)


def test_long_ids_of_workers_are_shortened_in_80_columns() -> None:
    long = (1 << 64) - 1
    ranks = [
        rank(long, active_blocks=16_384, total_blocks=16_384, prefill_tokens=330_000, active_requests=200),
        rank(2),
    ]
    chosen = Decision(component=component(), mode="forecast", chosen=Rank(worker_id=long), decided_unix_ns=NOW_NS)
    view = system([scheduler(pool(*ranks), decisions=[chosen])])
    narrow = lines(view, width=80)
    assert sum("1844…1615:0" in each for each in narrow) == 2
    assert "hits pred." in " ".join(narrow)
    assert all(len(each) <= 80 for each in narrow)
    assert sum(f"{long}:0" in each for each in lines(view, width=160)) == 2


def hit_rates(prompt: int, cached: int) -> HitCounts:
    return HitCounts(
        prompt_tokens=prompt,
        cached_tokens=cached,
        predicted_prompt_tokens=prompt,
        predicted_cached_tokens=cached,
        reachable_cached_tokens=cached,
    )


def counted(*schedulers: tuple[str, int, HitCounts]) -> System:
    return system(
        [
            scheduler(pool(rank(1, cache_hits=sums)), name=name, started_unix_ns=start)
            for name, start, sums in schedulers
        ]
    )


def test_hit_rates_are_over_the_window_and_all_schedulers() -> None:
    window = HitWindow(60)
    window.take(counted(("a", 1, hit_rates(100, 100))), 0.0)
    assert window.rate(POOL) == HitRate(1.0, 1.0, 1.0)
    window.take(counted(("a", 1, hit_rates(200, 150)), ("b", 1, hit_rates(100, 0))), 10.0)
    assert window.rates(POOL) == {(1, 0): HitRate(0.25, 0.25, 0.25)}
    window.take(counted(("a", 1, hit_rates(200, 150)), ("b", 1, hit_rates(100, 0))), 71.0)
    assert window.rate(POOL) == HitRate(None, None)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"cached_tokens": 10}, "70% of the prompt tokens predicted to be cached, workers report 10%"),
        ({"cached_tokens": 65}, ""),
        ({"prompt_tokens": 0}, ""),
    ],
)
def test_a_difference_from_the_prediction_is_said_unless_nothing_is_reported(found: dict[str, int], words: str) -> None:
    sums = {"prompt_tokens": 100, "predicted_prompt_tokens": 100, "predicted_cached_tokens": 70} | found
    shown = "\n".join(lines(system([scheduler(pool(rank(1, cache_hits=HitCounts(**sums))))])))
    assert words in shown
    assert ("predicted to be cached" in shown) == bool(words)


def test_a_component_whose_workers_reuse_less_than_predicted_says_so() -> None:
    status = pool(rank(1))
    assert "decisions count" not in "\n".join(lines(system([scheduler(status)])))
    status.reuse_ratio = 0.256
    shown = "\n".join(lines(system([scheduler(status)])))
    assert "decisions count 26% of predicted blocks, since workers reuse no more" in shown


def test_what_comes_from_which_tier_is_said_beside_its_prediction() -> None:
    sums = HitCounts(
        prompt_tokens=200,
        cached_tokens=100,
        predicted_prompt_tokens=100,
        predicted_cached_tokens=60,
        lower_cached_tokens=TierTokens(host=60, shared=2),
        predicted_lower_tokens=TierTokens(host=40),
    )
    candidate = CandidateTerms(rank=Rank(worker_id=1), overlap_blocks=9, lower_blocks=LowerTiers(host=4, disk=1))
    chosen = Decision(component=component(), chosen=Rank(worker_id=1), candidates=[candidate])
    shown = "\n".join(lines(system([scheduler(pool(rank(1, cache_hits=sums)), decisions=[chosen])])))
    assert (
        "found of the prompt tokens: 30% in host memory (40% predicted), 1% in shared storage (0% predicted)" in shown
    )
    assert "; 4 blocks in host memory; 1 block on disk" in shown


def test_a_scheduler_that_restarts_counts_from_its_start() -> None:
    window = HitWindow(60)
    window.take(counted(("a", 1, hit_rates(1000, 1000))), 0.0)
    window.take(system([SchedulerView("a:1", failure="refused")]), 1.0)
    window.take(counted(("a", 2, hit_rates(10, 5))), 2.0)
    assert window.rate(POOL) == HitRate(0.5, 0.5, 0.5)


def test_a_rank_that_was_forgotten_in_between_counts_from_then() -> None:
    window = HitWindow(60)
    window.take(counted(("a", 1, hit_rates(1000, 1000))), 0.0)
    window.take(counted(("a", 1, hit_rates(10, 5))), 1.0)
    assert window.rate(POOL) == HitRate(0.5, 0.5, 0.5)


def test_numbers_as_text() -> None:
    assert [duration(seconds) for seconds in (0.0031, 1.24, 48.2, 300, 12_600, 10**6)] == [
        *("3 ms", "1.2 s", "48 s", "5 min", "3.5 h", "12 d")
    ]
    assert [count(number, short=True) for number in (9999, 33_275, 505_000, 2_100_000, 5 * 10**9)] == [
        *("9,999", "33.3k", "505k", "2.1M", "5.0G")
    ]
    assert count(2_100_000, short=False) == "2,100,000"


def frontend(*workers: WorkerHealth, name: str = "f-1") -> FrontendView:
    return FrontendView(f"{name}:1", GetWorkerHealthResponse(workers=workers))


def found_in(worker_id: int, state: WorkerHealthState, **fields: Any) -> WorkerHealth:
    return WorkerHealth(component=component(), worker_id=worker_id, state=state, **fields)


def test_workers_that_frontends_find_unhealthy_are_marked() -> None:
    failing = found_in(
        2,
        WorkerHealthState.WORKER_HEALTH_STATE_BACKED_OFF,
        consecutive_failures=3,
        last_failure="worker 2 failed",
        calls=1,
    )
    sound = found_in(2, WorkerHealthState.WORKER_HEALTH_STATE_HEALTHY, calls=2)
    silent = found_in(1, WorkerHealthState.WORKER_HEALTH_STATE_SUSPECTED)
    view = System(
        NOW,
        [scheduler(pool(rank(1), rank(2), rank(3)))],
        frontends=[
            frontend(silent, failing),
            frontend(silent, sound, name="f-2"),
            FrontendView("f-3:1", failure="refused"),
        ],
    )
    found = lines(view)
    assert "f-1:1  1 call at workers, 1 worker suspected, 1 worker backed off" in line(found, "Frontend")
    assert any("f-2:1  2 calls at workers, 1 worker suspected" in each for each in found)
    assert any("Frontend  at f-3:1 does not answer: refused" in each for each in found)
    assert line(found, "1:0").rstrip().endswith("suspected by 2 of 2 Frontends")
    assert line(found, "2:0").rstrip().endswith("backed off by 1 of 2 Frontends: worker 2 failed")
    assert line(found, "3:0").rstrip().endswith("ok")


def test_the_line_of_a_disaggregated_component_has_its_role() -> None:
    first = pool(rank(1), name="first", role=Role.ROLE_PREFILL)
    found = lines(system([scheduler(first, pool(rank(2), name="second", role=Role.ROLE_DECODE))]))
    assert "model m, prefill workers, mode kv" in line(found, "ns/first")
    assert "model m, decode workers, mode kv" in line(found, "ns/second")


def test_a_lost_worker_is_named_though_its_component_has_no_rank_of_it() -> None:
    lost = found_in(1, WorkerHealthState.WORKER_HEALTH_STATE_LOST, endpoint="a:1")
    sound = found_in(2, WorkerHealthState.WORKER_HEALTH_STATE_HEALTHY)
    found = lines(System(NOW, [scheduler(pool(rank(2)))], frontends=[frontend(lost, sound)]))
    assert "1 worker lost" in line(found, "Frontend")
    assert line(found, "lost: ").rstrip() == "lost: worker 1 at a:1; not registered any more, and no answer to probes"
