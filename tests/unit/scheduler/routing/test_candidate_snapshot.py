"""The columns of a survey say of each candidate what the rules say of it alone."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from kvrouter.scheduler.load.booked_load import Accounting, RankLoad
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.overlap.indexer_query import NOT_QUERIED
from kvrouter.scheduler.request.options import RoutingOptions, Thresholds
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.scheduler.routing.context import RequestContext
from kvrouter.scheduler.routing.decide import decide
from kvrouter.scheduler.routing.snapshot import CandidateSnapshot, context_of, snapshot
from kvrouter.scheduler.workers.candidates import (
    Candidate,
    Places,
    WorkerConstraints,
    WorkerSet,
    candidates_of,
    why_unfit,
)
from kvrouter.v1.common_pb2 import Rank, Role, RoutingRequest, Stage
from kvrouter.v1.errors import AllBusy, NoWorkers
from kvrouter.v1.events_pb2 import LoadReport

from ..harness import BLOCK, overlaps_of, prompt, view, worker


def is_busy(candidate: Candidate, thresholds: Thresholds, load: RankLoad, report: LoadReport | None) -> bool:
    """Whether the greater of booked and reported load is above a threshold."""
    shares = [load.active_blocks / candidate.total_blocks] if candidate.total_blocks else []
    if report is not None and report.total_blocks:
        shares.append(report.active_blocks / report.total_blocks)
    tokens = max(load.prefill_tokens, 0 if report is None else report.prefill_tokens)
    blocks, most = thresholds.decode_blocks, thresholds.prefill_tokens
    return (blocks is not None and max(shares, default=0.0) > blocks) or (most is not None and tokens > most)


class Load(NamedTuple):
    """Load of a rank, with the blocks of the request to place."""

    active_blocks: int
    prefill_tokens: int
    requests: int
    leading_active_blocks: int
    head_tokens: int
    head_requests: int


def load_of(booked: list[Prompt], request: Prompt, stage: Stage, accounting: Accounting) -> Load:
    """The load of a rank with these bookings, each of which computes 7 tokens for each of its full blocks."""
    tracks = accounting.track_active_blocks
    prompts = [*booked, request] if stage != Stage.STAGE_PREFILL else booked
    hashes = [[each.sequence_hashes[at : at + 8] for at in range(0, 8 * each.blocks, 8)] for each in prompts]
    active = sum(-(-each.tokens // BLOCK) for each in prompts)
    leading = 0
    if accounting.assume_kv_reuse:
        active += len(set().union(*hashes)) - sum(map(len, hashes))
        if stage != Stage.STAGE_PREFILL:
            known = set().union(*hashes[:-1])
            leading = next((at for at, each in enumerate(hashes[-1]) if each not in known), len(hashes[-1]))
    prefill = [7 * each.blocks for each in booked]
    waiting = [tokens for tokens in prefill if tokens]
    return Load(
        active if tracks else 0,
        sum(prefill),
        len(booked),
        leading if tracks else 0,
        waiting[0] if waiting else 0,
        len(waiting),
    )


class Row(NamedTuple):
    """A snapshot's columns at one candidate."""

    candidate: Candidate
    load: Load
    overlap_blocks: int
    new_prefill_tokens: int
    busy: str


def rows_of(found: CandidateSnapshot, places: Places) -> list[Row]:
    return [
        Row(
            found.worker_set.candidates[place],
            Load(
                int(found.loads.active_blocks[place]),
                int(found.loads.prefill_tokens[place]),
                int(found.loads.requests[place]),
                int(found.loads.leading_active_blocks[place]),
                int(found.loads.head_prefill_tokens[place]),
                int(found.loads.prefill_requests[place]),
            ),
            int(found.overlap_blocks[place]),
            int(found.new_prefill_tokens[place]),
            found.why_busy(place),
        )
        for place in places.tolist()
    ]


IDS = st.sets(st.integers(1, 5), max_size=3)
ROLES = st.sampled_from([Role.ROLE_UNSPECIFIED, Role.ROLE_BOTH, Role.ROLE_PREFILL, Role.ROLE_DECODE])
LABELS = st.dictionaries(st.sampled_from(["zone", "disk"]), st.sampled_from(["a", "b"]))
LORAS = st.sampled_from(["", "x", "y"])

WORKERS = st.lists(
    st.builds(
        worker,
        st.integers(1, 5),
        ranks=st.integers(1, 3),
        total_blocks=st.sampled_from([None, 10, 100]),
        incarnation=st.integers(1, 3),
        role=ROLES,
        draining=st.booleans(),
        labels=LABELS,
        lora_names=st.sets(st.sampled_from(["x", "y"])),
    ),
    unique_by=lambda each: each.worker_id,
    max_size=5,
)

WANTED = st.builds(
    WorkerConstraints,
    stage=st.sampled_from([Stage.STAGE_WHOLE, Stage.STAGE_PREFILL, Stage.STAGE_DECODE]),
    worker_id=st.none() | st.integers(1, 6),
    dp_rank=st.none() | st.integers(0, 3),
    allowed=IDS.map(frozenset),
    excluded=IDS.map(frozenset),
    labels=LABELS,
    lora_name=LORAS,
)


@settings(max_examples=300)
@given(WORKERS, WANTED)
def test_a_candidate_fits_if_no_rule_excludes_it(workers: list[Any], constraints: WorkerConstraints) -> None:
    worker_set = WorkerSet(candidates_of(workers))
    fit = [place for place, each in enumerate(worker_set.candidates) if not why_unfit(each, constraints)]
    assert worker_set.fit(constraints).tolist() == fit
    anywhere = WorkerConstraints(stage=constraints.stage)
    assert worker_set.fit(anywhere).tolist() == [
        place for place, each in enumerate(worker_set.candidates) if not why_unfit(each, anywhere)
    ]


REPORTS = st.dictionaries(
    st.tuples(st.integers(1, 5), st.integers(0, 2)),
    st.builds(
        LoadReport,
        active_blocks=st.integers(0, 60),
        total_blocks=st.sampled_from([None, 50]),
        prefill_tokens=st.sampled_from([0, 31, 32, 33, 2**64 - 1]),
    ),
)


@settings(max_examples=200)
@given(
    workers=WORKERS,
    bookings=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2), st.integers(0, 20)), max_size=6),
    reports=REPORTS,
    resident=st.dictionaries(
        st.tuples(st.integers(1, 6), st.integers(0, 2)), st.tuples(st.integers(0, 9), st.integers(1, 3))
    ),
    thresholds=st.builds(
        Thresholds, st.none() | st.sampled_from([0.0, 0.2, 0.8, 1.0]), st.none() | st.sampled_from([0, 32, 2**64 - 1])
    ),
    constraints=WANTED,
    accounting=st.builds(Accounting, st.booleans(), st.booleans()),
)
def test_every_column_agrees_with_the_rules(
    workers: list[Any],
    bookings: list[tuple[int, int, int]],
    reports: dict[tuple[int, int], LoadReport],
    resident: dict[tuple[int, int], tuple[int, int]],
    thresholds: Thresholds,
    constraints: WorkerConstraints,
    accounting: Accounting,
) -> None:
    now = 100.0
    pool = Pool(view(*workers), accounting, report_age_seconds=10, clock=lambda: now)
    for number, (worker_id, dp_rank, blocks) in enumerate(bookings):
        booked = prompt(blocks, seed=number % 2, tail=1)
        pool.booked_load.book((str(number), 0, 1), (worker_id, dp_rank), booked, 7 * blocks)
    for number, (rank, report) in enumerate(reports.items()):
        report.rank.CopyFrom(Rank(worker_id=rank[0], dp_rank=rank[1]))
        report.incarnation = 3
        pool.reports.take(report.SerializeToString(), now - 5 * (number % 4))
    request = RequestContext(pool, prompt(9, tail=3), constraints, RoutingOptions(thresholds=thresholds))
    found = snapshot(request, overlaps_of(resident), now=now)
    rows = rows_of(found, found.fit)
    before = pool.booked_load.load_by_rank()
    fit = [each for each in pool.candidates if not why_unfit(each, constraints)]
    assert [row.candidate for row in rows] == fit
    for row in rows:
        rank = row.candidate.rank
        booked_here = [
            prompt(blocks, seed=number % 2, tail=1)
            for number, (worker_id, dp_rank, blocks) in enumerate(bookings)
            if (worker_id, dp_rank) == rank
        ]
        assert row.load == load_of(booked_here, request.prompt, constraints.stage, accounting)
        assert before[rank][1:3] == row.load[1:3]
        blocks, incarnation = resident.get(rank, (0, 0))
        assert row.overlap_blocks == (blocks if incarnation == row.candidate.incarnation else 0)
        uncached = max(0, request.prompt.tokens - row.overlap_blocks * BLOCK)
        assert row.new_prefill_tokens == (0 if constraints.stage == Stage.STAGE_DECODE else uncached)
        assert bool(row.busy) == is_busy(row.candidate, thresholds, before[rank], pool.reports.of(rank, now))
    free = [row for row in rows if not row.busy]
    assert rows_of(found, found.free) == free
    excluded = found.excluded([row.candidate.rank for row in free])
    assert {pool.candidates[place].rank for place in excluded} == {each.rank for each in pool.candidates} - {
        row.candidate.rank for row in free
    }
    if not free:
        assert isinstance(found.refusal("pool"), AllBusy if fit else NoWorkers)
        return
    context = context_of(found, found.free, request, now=0.0)
    assert context.ranks == tuple(row.candidate.rank for row in free)
    in_decode = constraints.stage == Stage.STAGE_DECODE
    columns = {
        # A prefill worker computes the whole prompt of a request in stage decode.
        "overlap_blocks": [request.prompt.tokens // BLOCK if in_decode else row.overlap_blocks for row in free],
        "new_prefill_tokens": [row.new_prefill_tokens for row in free],
        "prefill_tokens": [row.load.prefill_tokens for row in free],
        "active_blocks": [row.load.active_blocks for row in free],
        "leading_active_blocks": [row.load.leading_active_blocks for row in free],
        "active_requests": [row.load.requests for row in free],
        "total_blocks": [row.candidate.total_blocks for row in free],
        "max_batched_tokens": [row.candidate.max_batched_tokens for row in free],
        "head_prefill_tokens": [row.load.head_tokens for row in free],
        "head_prefill_seconds": [0.0 for _ in free],
        "prefill_requests": [row.load.head_requests for row in free],
    }
    assert {name: getattr(context, name).tolist() for name in columns} == columns
    # The native core reads the bytes of these columns.
    whole = (context.overlap_blocks, context.queued_blocks, context.total_blocks, context.max_batched_tokens)
    real = (context.request_limits, context.relative_latency, context.reuse_chance)
    assert {column.dtype for column in whole} == {np.dtype(np.int64)}
    assert {column.dtype for column in real} == {np.dtype(np.float64)}


def test_the_snapshot_of_a_decision_does_not_change_afterwards() -> None:
    pool = Pool(view(worker(1), worker(2)), Accounting(), report_age_seconds=10, clock=lambda: 1.0)
    options = RoutingOptions("forecast")
    pool.booked_load.book(("a", 0, 1), (1, 0), prompt(4), 64)
    decision = decide(
        RequestContext(pool, prompt(4), WorkerConstraints(), options), NOT_QUERIED, rng=Random(1), now=1.0
    )
    found = decision.snapshot
    seen = [str(decision.context), str(rows_of(found, found.fit)[0])]
    pool.booked_load.book(("b", 0, 1), (1, 0), prompt(9, seed=1), 144)
    pool.booked_load.free(("a", 0, 1))
    pool.follow(view(worker(2)))
    assert [str(decision.context), str(rows_of(found, found.fit)[0])] == seen


@pytest.mark.parametrize("ranks", [[(2, 0), (1, 0)], [(1, 0)], [(9, 9), (2, 0), (1, 0), (3, 0)], []])
def test_overlaps_are_assigned_to_ranks_in_any_order(ranks: list[tuple[int, int]]) -> None:
    worker_set = WorkerSet(candidates_of([worker(1), worker(2)]))
    for _ in range(2):  # the second answer rests on the first
        resident = overlaps_of({rank: (10 * rank[0], 1) for rank in ranks})
        expected = [10 * worker_id if (worker_id, 0) in ranks else 0 for worker_id in (1, 2)]
        assert resident.on(worker_set).tolist() == expected
    assert NOT_QUERIED.on(worker_set).tolist() == [0, 0]
    assert not np.any(overlaps_of({(1, 0): (5, 0), (2, 0): (5, 0)}).on(worker_set)), (
        "of lives before the registered ones"
    )


@given(WORKERS, WANTED, IDS)
def test_avoided_workers_give_way_only_to_others_that_fit(
    workers: list[Any], constraints: WorkerConstraints, avoided: set[int]
) -> None:
    worker_set = WorkerSet(candidates_of(workers))
    fit = worker_set.fit(constraints)
    others = [place for place in fit.tolist() if worker_set.ranks[place][0] not in avoided]
    assert worker_set.preferred(fit, avoided).tolist() == (others or fit.tolist())


def test_a_candidate_that_gave_way_says_why() -> None:
    pool = Pool(view(worker(1), worker(2)), Accounting(), report_age_seconds=10, clock=lambda: 1.0)
    message = RoutingRequest()
    message.constraints.avoided_workers.add(worker_id=1, reason="its requests fail")
    message.constraints.avoided_workers.add(worker_id=1)
    constraints = WorkerConstraints.of(message, Stage.STAGE_WHOLE)
    found = snapshot(RequestContext(pool, prompt(4), constraints, RoutingOptions()), NOT_QUERIED, now=1.0)
    assert [row.candidate.rank for row in rows_of(found, found.free)] == [(2, 0)]
    why = "the caller avoids this worker (its requests fail), and another one fits"
    assert found.excluded([(2, 0)]) == {0: why}
    pinned = WorkerConstraints(worker_id=1, avoided={1: ""})
    alone = snapshot(RequestContext(pool, prompt(4), pinned, RoutingOptions()), NOT_QUERIED, now=1.0)
    assert [row.candidate.rank for row in rows_of(alone, alone.free)] == [(1, 0)]


def test_new_prefill_tokens() -> None:
    pool = Pool(view(worker(1), worker(2), worker(3)), Accounting(), report_age_seconds=10)
    overlaps = overlaps_of({(1, 0): (0, 1), (2, 0): (3, 1), (3, 0): (5, 1)})

    def new_tokens(stage: Stage) -> list[int]:
        request = RequestContext(pool, prompt(4, tail=1), WorkerConstraints(stage), RoutingOptions())
        return list(snapshot(request, overlaps, now=0.0).new_prefill_tokens.tolist())

    assert new_tokens(Stage.STAGE_WHOLE) == [65, 17, 0]
    assert new_tokens(Stage.STAGE_PREFILL) == [65, 17, 0]
    assert new_tokens(Stage.STAGE_DECODE) == [0, 0, 0]
