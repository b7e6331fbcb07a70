"""What selections make of overlaps: when an Indexer is asked, and what it costs where none answers."""

from __future__ import annotations

from typing import Any

import pytest
import structlog.testing
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.v1.errors import DependencyAway, Internal, NotReady
from kvrouter.v1.scheduler_pb2 import MarkPrefillCompleteRequest

from ..harness import Parts, ResidentBlocks, constraints, key, overrides, routing, selecting, view, worker


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (NotReady("restoring"), "unavailable"),
        (DependencyAway("gone"), "unavailable"),
        (Internal("broken"), "internal"),
        (ValueError("a bug"), "internal"),
    ],
)
async def test_a_failing_indexer_costs_the_overlap_only(failure: Exception, reason: str) -> None:
    parts = Parts(view(worker(1)), indexer=ResidentBlocks({(1, 0): 4}, failure=failure))
    chosen = await parts.select(selecting("a"))
    assert chosen.load_only
    assert chosen.overlap_blocks == 0
    assert not chosen.HasField("cursor")
    assert parts.figure("kvrouter_scheduler_load_only_total", reason=reason) == 1
    assert parts.decisions.by_request("a").load_only  # type: ignore[union-attr]


async def test_a_missing_indexer_costs_the_overlap_only() -> None:
    parts = Parts(view(worker(1)))
    assert (await parts.select(selecting("a"))).load_only
    assert parts.figure("kvrouter_scheduler_load_only_total", reason="no_indexer") == 1


async def test_a_silent_indexer_is_not_waited_for() -> None:
    indexer = ResidentBlocks.held()
    parts = Parts(view(worker(1)), indexer=indexer, indexer_timeout=0.01)
    assert (await parts.select(selecting("a"))).load_only
    assert parts.figure("kvrouter_scheduler_load_only_total", reason="timeout") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"overlap_score_weight": 0},
        {"mode": "random"},
        {"mode": "round-robin"},
        {"mode": "power-of-two"},
    ],
)
async def test_no_indexer_is_queried_if_overlaps_do_not_matter(changes: dict[str, Any]) -> None:
    indexer = ResidentBlocks({(1, 0): 4})
    parts = Parts(view(worker(1)), indexer=indexer)
    chosen = await parts.select(selecting("a", routing(overrides=overrides(**changes))))
    assert (chosen.load_only, chosen.overlap_blocks, indexer.queries) == (False, 0, [])


async def test_an_override_may_query_the_indexer_although_the_option_does_not() -> None:
    indexer = ResidentBlocks({(1, 0): 4})
    parts = Parts(view(worker(1)), indexer=indexer, options=RoutingOptions("kv", overlap_score_weight=0))
    chosen = await parts.select(selecting("a", routing(tail=1, overrides=overrides(overlap_score_weight=1))))
    assert chosen.overlap_blocks == 4


async def test_the_weight_of_one_request_is_for_that_request_alone() -> None:
    parts = Parts(view(worker(1), worker(2)), indexer=ResidentBlocks({(1, 0): 4}))
    await parts.select(selecting("a", routing(6, seed=1, constraints=constraints(worker_id=1))))
    parts.bookings.mark_prefill_complete(MarkPrefillCompleteRequest(booking=key("a")))
    # By weight 1 it is 0 + 10 blocks against 4 + 4; by weight 2 the cached ones count for more.
    light, heavy = routing(tail=1), routing(tail=1, overrides=overrides(overlap_score_weight=2))
    chosen = [(await parts.select(selecting(None, each))).rank.worker_id for each in (light, heavy, light)]
    assert chosen == [2, 1, 2]


async def test_the_temperature_of_one_request_is_for_that_request_alone() -> None:
    parts = Parts(view(worker(1), worker(2)), indexer=ResidentBlocks({(1, 0): 4}))
    hot = routing(overrides=overrides(router_temperature=10))
    drawn = {(await parts.select(selecting(None, hot))).rank.worker_id for _ in range(50)}
    lowest = {(await parts.select(selecting(None))).rank.worker_id for _ in range(50)}
    assert (drawn, lowest) == ({1, 2}, {1})


async def test_blocks_of_an_earlier_incarnation_do_not_count() -> None:
    parts = Parts(view(worker(1, incarnation=5)), indexer=ResidentBlocks({(1, 0): 4}, incarnation=4))
    assert (await parts.select(selecting("a"))).overlap_blocks == 0


async def test_blocks_of_an_incarnation_that_nobody_registered_do_not_count() -> None:
    parts = Parts(view(worker(1, incarnation=5)), indexer=ResidentBlocks({(1, 0): 4}, incarnation=(1 << 64) - 1))
    assert (await parts.select(selecting("a"))).overlap_blocks == 0


async def test_blocks_of_a_worker_whose_incarnation_is_unknown_count() -> None:
    parts = Parts(view(worker(1, incarnation=0)), indexer=ResidentBlocks({(1, 0): 4}, incarnation=7))
    assert (await parts.select(selecting("a", routing(tail=1)))).overlap_blocks == 4


async def test_the_block_with_the_last_token_is_computed_even_if_it_is_cached() -> None:
    for mode in ("kv", "forecast"):
        indexer = ResidentBlocks({(1, 0): 4})
        parts = Parts(view(worker(1)), indexer=indexer, options=RoutingOptions(mode))
        for tail, overlap in ((0, 3), (1, 4)):
            chosen = await parts.select(selecting(None, routing(4, tail=tail)))
            assert (chosen.overlap_blocks, chosen.prompt_blocks) == (overlap, 4)
        await parts.select(selecting(None, routing(1)))
        assert len(indexer.queries) == 2, "a prompt of one block has none that can be reused"


async def test_overrides_without_effect_are_named_in_the_response_and_once_in_the_log() -> None:
    parts = Parts(view(worker(1)), options=RoutingOptions("forecast"))
    weighed = routing(overrides=overrides(overlap_score_weight=2, active_decode_blocks_threshold=0.9))
    with structlog.testing.capture_logs() as logs:
        for name in ("a", "b"):
            answer = await parts.select(selecting(name, weighed))
            assert list(answer.ignored_overrides) == ["overlap_score_weight"]
        heeded = await parts.select(selecting("c", routing(overrides=overrides(overlap_score_weight=2, mode="kv"))))
    assert not heeded.ignored_overrides
    warnings = [entry for entry in logs if entry["event"] == "overrides.ignored"]
    assert [(entry["mode"], entry["overrides"]) for entry in warnings] == [("forecast", ["overlap_score_weight"])]


async def test_formulas_are_logged_for_every_candidate_where_configured() -> None:
    for configured in (False, True):
        parts = Parts(view(worker(1), worker(2)), log_formulas=configured)
        with structlog.testing.capture_logs() as logs:
            await parts.select(selecting("a"))
        formulas = [entry["formula"] for entry in logs if entry["event"] == "decision.formula"]
        assert [formula.split(":")[0] for formula in formulas] == (
            ["Formula for worker_1", "Formula for worker_2"] if configured else []
        )
        assert all(entry["log_level"] == "info" for entry in logs if entry["event"] == "decision.formula")
