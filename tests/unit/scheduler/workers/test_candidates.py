"""Who may be chosen, who is busy, and what a request may not ask."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from kvrouter.runtime.requests import serves
from kvrouter.scheduler.load.reported_load import LoadReports
from kvrouter.scheduler.load.thresholds import Load
from kvrouter.scheduler.request.options import RoutingOptions, Thresholds, overridden
from kvrouter.scheduler.request.prompt import read_prompt
from kvrouter.scheduler.workers.candidates import (
    Candidate,
    WorkerConstraints,
    candidates_of,
    check_pinned,
    why_unfit,
)
from kvrouter.v1.common_pb2 import Rank, Role, Stage, TokenIds
from kvrouter.v1.errors import BadRequest, BlockSizeMismatch, PromptTooLong, UnknownWorker
from kvrouter.v1.events_pb2 import LoadReport

from ..harness import BLOCK, constraints, hashed, overrides, prompt, routing, worker


def candidate(worker_id: int = 1, **fields: Any) -> Candidate:
    return candidates_of([worker(worker_id, **fields)])[0]


def test_every_rank_is_a_candidate_in_order() -> None:
    found = candidates_of([worker(9), worker(2, ranks=3)])
    assert [each.rank for each in found] == [(2, 0), (2, 1), (2, 2), (9, 0)]
    assert {each.endpoint for each in found} == {"host:2", "host:9"}


@pytest.mark.parametrize(
    ("constraints", "why"),
    [
        (WorkerConstraints(), ""),
        (WorkerConstraints(worker_id=1, dp_rank=0, allowed=frozenset({1, 2}), excluded=frozenset({2})), ""),
        (WorkerConstraints(labels={"zone": "a"}, lora_name="ad"), ""),
        (WorkerConstraints(worker_id=2), "another worker is named"),
        (WorkerConstraints(dp_rank=1), "another rank is named"),
        (WorkerConstraints(allowed=frozenset({2})), "not among the allowed workers"),
        (WorkerConstraints(excluded=frozenset({1})), "excluded by the request"),
        (WorkerConstraints(labels={"zone": "b"}), "label zone is 'a', not 'b'"),
        (WorkerConstraints(labels={"disk": "x"}), "label disk is '', not 'x'"),
        (WorkerConstraints(lora_name="other"), "does not serve the adapter 'other'"),
        (WorkerConstraints(stage=Stage.STAGE_PREFILL), "its role ROLE_DECODE does not serve STAGE_PREFILL"),
    ],
)
def test_why_a_rank_is_left_out(constraints: WorkerConstraints, why: str) -> None:
    registered = candidate(labels={"zone": "a"}, lora_names=["ad"], role=Role.ROLE_DECODE)
    assert why_unfit(registered, constraints) == why


def test_a_draining_worker_is_left_out_even_when_it_is_named() -> None:
    assert why_unfit(candidate(draining=True), WorkerConstraints(worker_id=1)) == "draining"


def test_roles_by_stage() -> None:
    whole, prefill, decode = Stage.STAGE_WHOLE, Stage.STAGE_PREFILL, Stage.STAGE_DECODE
    assert [serves(Role.ROLE_BOTH, stage) for stage in (whole, prefill, decode)] == [True, True, True]
    assert [serves(Role.ROLE_DECODE, stage) for stage in (whole, prefill, decode)] == [True, False, True]
    assert [serves(Role.ROLE_PREFILL, stage) for stage in (whole, prefill, decode)] == [False, True, False]
    assert serves(Role.ROLE_UNSPECIFIED, whole)


def test_a_pinned_worker_has_to_be_there() -> None:
    found = candidates_of([worker(3, ranks=2), worker(5)])
    check_pinned(found, WorkerConstraints(worker_id=3, dp_rank=1))
    with pytest.raises(UnknownWorker) as unknown:
        check_pinned(found, WorkerConstraints(worker_id=4))
    assert list(unknown.value.info.known_values) == ["3", "5"]
    with pytest.raises(UnknownWorker, match="rank 2 of worker 3"):
        check_pinned(found, WorkerConstraints(worker_id=3, dp_rank=2))


def busy(
    thresholds: Thresholds, *, blocks: int = 0, tokens: int = 0, report: LoadReport | None = None, total: int = 100
) -> bool:
    reports = LoadReports(10.0)
    reports.set_ranks([((0, 0), 0)])
    if report is not None:
        assert reports.take(report.SerializeToString(), 0.0) == ""
    load = Load.of(np.array([blocks]), np.array([tokens]), np.array([total or np.inf]), reports.columns(0.0))
    assert bool(load.above(thresholds)[0]) == bool(load.why(thresholds, 0))
    return bool(load.why(thresholds, 0))


def test_busy_is_strictly_above_the_greater_of_booked_and_reported() -> None:
    blocks, prefill = Thresholds(decode_blocks=0.8), Thresholds(prefill_tokens=1000)
    assert not busy(blocks, blocks=80)
    assert busy(blocks, blocks=81)
    assert not busy(blocks, report=LoadReport(active_blocks=40, total_blocks=50))
    assert busy(blocks, blocks=1, report=LoadReport(active_blocks=41, total_blocks=50))
    assert busy(blocks, blocks=81, report=LoadReport(active_blocks=0, total_blocks=50))
    assert not busy(prefill, tokens=1000)
    assert busy(prefill, tokens=1001)
    assert busy(prefill, report=LoadReport(prefill_tokens=1001))
    assert busy(Thresholds(prefill_tokens=0), tokens=1)


def test_without_thresholds_nobody_is_busy() -> None:
    assert not busy(Thresholds(), blocks=10**6, tokens=10**9)


def test_a_rank_of_unknown_size_is_not_judged_by_blocks() -> None:
    assert not busy(Thresholds(decode_blocks=0.0), blocks=50, total=0)


def report(
    worker_id: int = 1, *, incarnation: int = 5, measured: int = 100, tokens: int = 0, sequence: int | None = None
) -> bytes:
    return LoadReport(
        rank=Rank(worker_id=worker_id),
        incarnation=incarnation,
        measured_unix_ns=measured,
        prefill_tokens=tokens,
        sequence=sequence,
    ).SerializeToString()


def test_the_newest_report_of_an_incarnation_counts_for_a_while() -> None:
    reports = LoadReports(max_age_seconds=10)
    reports.set_ranks([((1, 0), 5)])
    assert reports.of((1, 0), 0.0) is None
    assert reports.age_seconds((1, 0), 0.0) is None
    assert reports.take(report(tokens=1), 0.0) == ""
    assert reports.take(report(measured=99, tokens=2), 1.0) == "old"
    assert reports.take(report(incarnation=4, measured=200), 1.0) == "old"
    assert reports.take(report(2), 1.0) == "unknown_rank"
    assert reports.take(b"\xff\xff", 1.0) == "unparsable"
    assert reports.take(report(sequence=0), 1.0) == "invalid"
    assert reports.take(LoadReport(total_blocks=0).SerializeToString(), 1.0) == "invalid"
    found = reports.of((1, 0), 10.0)
    assert found is not None
    assert found.prefill_tokens == 1
    assert reports.of((1, 0), 10.5) is None
    assert reports.age_seconds((1, 0), 10.5) == 10.5, "one that counts no longer still has an age"
    # A new life that reports smaller time stamps counts all the same.
    assert reports.take(report(incarnation=6, measured=1, tokens=3), 11.0) == ""
    reports.set_ranks([((1, 0), 7)])
    assert reports.of((1, 0), 11.0) is None


def announced_tokens(reports: LoadReports, now: float) -> int:
    found = reports.of((1, 0), now)
    assert found is not None
    return found.prefill_tokens


def test_a_clock_that_was_set_back_silences_no_rank() -> None:
    reports = LoadReports(max_age_seconds=10)
    reports.set_ranks([((1, 0), 5)])
    hour = 3600 * 10**9
    reports.take(report(measured=hour, tokens=1, sequence=7), 0.0)
    assert reports.take(report(measured=1, tokens=2, sequence=8), 1.0) == ""
    assert reports.take(report(measured=2, tokens=9, sequence=7), 1.1) == "old"
    assert announced_tokens(reports, 1.0) == 2


def test_without_sequences_a_clock_that_was_set_back_costs_two_seconds() -> None:
    reports = LoadReports(max_age_seconds=10)
    reports.set_ranks([((1, 0), 5)])
    reports.take(report(measured=10**18, tokens=1), 0.0)
    assert reports.take(report(measured=1, tokens=2), 1.0) == "old"
    assert reports.take(report(measured=2, tokens=3), 2.1) == ""
    assert reports.take(report(measured=3, tokens=4), 2.2) == ""
    assert announced_tokens(reports, 2.2) == 4


def test_a_forged_report_counts_until_the_next_real_one() -> None:
    largest = (1 << 64) - 1
    reports = LoadReports(max_age_seconds=10)
    reports.set_ranks([((1, 0), 5)])
    assert reports.take(report(tokens=1, sequence=1), 0.0) == ""
    assert reports.take(report(incarnation=largest, tokens=9), 0.5) == "old", "the registered incarnation counts"
    assert reports.take(report(measured=largest, sequence=largest, tokens=9), 0.6) == ""
    assert reports.take(report(tokens=2, sequence=3), 2.7) == ""
    assert announced_tokens(reports, 2.7) == 2


def test_a_later_incarnation_counts_where_the_registered_one_is_silent() -> None:
    reports = LoadReports(max_age_seconds=10)
    reports.set_ranks([((1, 0), 5)])
    assert reports.take(report(incarnation=6, tokens=1), 0.0) == ""
    assert reports.take(report(incarnation=5, tokens=2), 0.1) == ""
    assert announced_tokens(reports, 0.1) == 2


def test_overrides_go_over_the_options() -> None:
    options = RoutingOptions(thresholds=Thresholds(0.5, 100))
    assert overridden(options, overrides()) == options
    changed = overridden(
        options,
        overrides(mode="random", overlap_score_weight=0, router_temperature=2.5, active_prefill_tokens_threshold=7),
    )
    assert changed == RoutingOptions("random", 0.0, 2.5, Thresholds(0.5, 7))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("router_temperature", -0.1),
        ("router_temperature", math.nan),
        ("router_temperature", math.inf),
        ("overlap_score_weight", -1.0),
        ("overlap_score_weight", math.nan),
        ("overlap_score_weight", math.inf),
        ("active_decode_blocks_threshold", 1.5),
        ("active_decode_blocks_threshold", -0.1),
        ("active_decode_blocks_threshold", math.nan),
    ],
)
def test_overrides_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(BadRequest) as refused:
        overridden(RoutingOptions(), overrides(**{field: value}))
    assert refused.value.info.field.endswith(field)
    assert refused.value.info.advice


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadRequest) as refused:
        overridden(RoutingOptions(), overrides(mode="best"))
    assert "round-robin" in refused.value.info.known_values


@given(st.integers(0, 5), st.integers(0, BLOCK - 1))
def test_tokens_and_hashes_name_the_same_prompt(blocks: int, tail: int) -> None:
    if blocks + tail == 0:
        return
    by_tokens = read_prompt(routing(blocks, tail=tail), block_size=BLOCK)
    assert by_tokens == read_prompt(hashed(blocks, tail=tail), block_size=BLOCK) == prompt(blocks, tail=tail)
    assert (by_tokens.tokens, by_tokens.blocks) == (blocks * BLOCK + tail, blocks)


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"token_ids": TokenIds()}, BadRequest, "token_ids"),
        ({"token_ids": None}, BadRequest, "token_ids"),
        ({"prompt_tokens": 3}, BadRequest, "prompt_tokens"),
        ({"block_size": 32}, BlockSizeMismatch, "block_size"),
        ({"sequences": 0}, BadRequest, "sequences"),
        ({"sequences": 1025}, BadRequest, "sequences"),
    ],
)
def test_bad_prompts_of_tokens(fields: dict[str, Any], error: type[Exception], field: str) -> None:
    with pytest.raises(error) as refused:
        read_prompt(routing(**fields), block_size=BLOCK)
    assert refused.value.info.field == field  # type: ignore[attr-defined]


@pytest.mark.parametrize("tokens", [0, 3 * BLOCK, 5 * BLOCK, 4 * BLOCK - 1])
def test_hashes_have_to_fit_the_tokens(tokens: int) -> None:
    with pytest.raises(BadRequest):
        read_prompt(hashed(4, prompt_tokens=tokens), block_size=BLOCK)


def test_a_prompt_leaves_room_for_a_token() -> None:
    read_prompt(routing(4), block_size=BLOCK, max_model_len=65)
    with pytest.raises(PromptTooLong):
        read_prompt(routing(4), block_size=BLOCK, max_model_len=64)


def test_constraints_are_read() -> None:
    request = routing(
        constraints=constraints(
            worker_id=0, dp_rank=0, allowed_worker_ids=[1], excluded_worker_ids=[2], required_labels={"a": "b"}
        )
    )
    read = WorkerConstraints.of(request, Stage.STAGE_DECODE)
    assert read == WorkerConstraints(Stage.STAGE_DECODE, 0, 0, frozenset({1}), frozenset({2}), {"a": "b"})
    assert WorkerConstraints.of(routing(), Stage.STAGE_WHOLE) == WorkerConstraints()
