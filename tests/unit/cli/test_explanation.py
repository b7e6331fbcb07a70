"""What `kvrouter explain` says of a decision, and by which ids it finds one."""

from __future__ import annotations

import io

import pytest
from kvrouter.cli.explain import candidates_table, comparison_table, lookups, matching_ids, remainder, summary
from kvrouter.cli.terminal import PlainConsole
from kvrouter.cli.top.tables import request_name, why
from kvrouter.v1.common_pb2 import KvSource, Rank, Tier
from kvrouter.v1.scheduler_pb2 import CandidateTerms, Decision
from rich.table import Table


def candidate(worker: int, cost: float, overlap: int = 0, excluded: str = "", **terms: float) -> CandidateTerms:
    return CandidateTerms(
        rank=Rank(worker_id=worker), cost=cost, overlap_blocks=overlap, excluded=excluded, terms=terms
    )


@pytest.mark.parametrize(
    ("which", "requests"),
    [
        ("ab12", ["ab12"]),
        ("ab12~9f", ["ab12~9f"]),
        ("chatcmpl-ab12", ["chatcmpl-ab12", "ab12"]),
        ("cmpl-ab12-3", ["cmpl-ab12-3", "ab12-3", "cmpl-ab12", "ab12"]),
        ("my-request-7", ["my-request-7", "my-request"]),
        ("cmpl-", ["cmpl-"]),
    ],
)
def test_an_id_is_tried_as_it_is_and_without_what_apis_add(which: str, requests: list[str]) -> None:
    assert [each.request_id for each in lookups(which)] == requests


def test_a_number_may_name_a_decision_or_a_request() -> None:
    assert [each.WhichOneof("which") for each in lookups("17")] == ["request_id", "decision_id"]


def test_an_id_is_found_as_top_shortens_it() -> None:
    ids = ["9451b3e637a999dd992183166eb59003", "9451b3e637a999dd000000000eb59003", "short", "gateway~1"]
    booked = [f"{ids[0]}~a1", f"{ids[0]}~b2", f"{ids[1]}~c3", "short", "gateway~1"]
    for wide in (True, False):
        assert matching_ids(request_name(booked[0], wide=wide), booked[:2] + booked[3:]) == [ids[0]]
    assert matching_ids("9451…eb59003", booked) == ids[:2], "all that it may stand for"
    assert matching_ids("short…short", booked) == [], "head and tail do not overlap"


def test_the_chosen_and_the_next_three_are_compared_in_80_columns() -> None:
    decision = Decision(
        mode="forecast",
        chosen=Rank(worker_id=123_456_789_012),
        prompt_blocks=6_000,
        reason="lowest cost",
        candidates=[
            candidate(1, 90_000.0, forecast_ms=80_000.0, work_ms=9_900.0),
            candidate(123_456_789_012, 100.0, 5_000, forecast_ms=100.0, work_ms=0.0, new_tokens=16_000),
            candidate(2, 50_000.0, 6_000, forecast_ms=50.0, work_ms=49_950.0),
            candidate(3, 95_000.0),
            candidate(4, 99_000.0),
            candidate(5, 0.0, excluded="draining"),
            candidate(6, 0.0, excluded="draining"),
        ],
    )
    out = io.StringIO()
    PlainConsole(80, file=out).print(comparison_table(decision))
    shown = [line.rstrip() for line in out.getvalue().splitlines()]
    assert all(len(line) <= 80 for line in shown)
    text = " ".join(" ".join(shown).split())
    assert "123456789012:0 *" in shown[1]
    assert "computes 16,000 tokens of the prompt" in text
    assert "1,000 more blocks cached, but" in text
    assert "5,000 fewer blocks cached" in text
    assert "4:0" not in text
    assert remainder(decision) == ["1 more rank", "2 ranks left out: draining"]
    assert summary(decision)[-2] == "prompt of 6,000 full blocks"


def shown(table: Table) -> str:
    """Returns what 80 columns show, with each space only once."""
    out = io.StringIO()
    PlainConsole(80, file=out).print(table)
    assert all(len(line.rstrip()) <= 80 for line in out.getvalue().splitlines())
    return " ".join(out.getvalue().split())


def retry() -> Decision:
    chosen = candidate(5, 16.7445, 1, forecast_ms=16.7445, batch_ms=0.0, new_tokens=16, free_slots=256, latency=1)
    chosen.formula = "Formula for worker_5: 16.7 ms = 16.7 to the first token + 0.0 in its step (16 tokens to compute)"
    other = candidate(1, 16.9877, 0, forecast_ms=16.9877, batch_ms=0.0, new_tokens=32, free_slots=9, latency=1)
    dead = candidate(6, 0.0, 2, excluded="excluded by the request")
    return Decision(
        mode="forecast", chosen=Rank(worker_id=5), prompt_blocks=2, attempt=1, candidates=[dead, other, chosen]
    )


def test_every_candidate_has_its_formula_and_the_further_terms_that_differ_in_80_columns() -> None:
    text = shown(candidates_table(retry()))
    assert text.startswith("rank cost, ms cached why 5:0 * 16.7 1 of 2 16.7 ms = 16.7 to the first token (16 tokens to")
    assert "free slots 256" in text
    assert "in its step" not in text, "it adds nothing"
    assert "latency" not in text, "it is the same everywhere"


def test_differences_are_those_of_the_rounded_costs_and_blocks_are_counted_in_english() -> None:
    assert "17.0 0 of 2 1 fewer block cached, +0.3 ms to its first token" in shown(comparison_table(retry()))


def test_a_retry_says_that_a_worker_failed_before_and_that_output_counts() -> None:
    assert remainder(retry()) == ["rank 6:0 left out: it failed in attempt 1, or the request excludes it"]
    assert "computes 16 tokens of the prompt and of the output so far" in shown(comparison_table(retry()))


def test_a_rank_left_out_that_has_most_blocks_cached_is_named() -> None:
    decision = Decision(
        chosen=Rank(worker_id=1),
        prompt_blocks=9,
        candidates=[
            candidate(1, 1.0, 4),
            candidate(2, 0.0, 3, excluded="draining"),
            candidate(3, 0.0, 7, excluded="busy"),
            candidate(4, 0.0, 2, excluded="busy"),
        ],
    )
    assert remainder(decision) == [
        "rank 2:0 left out: draining",
        "2 ranks left out: busy (rank 3:0 has most blocks cached: 7 of 9)",
    ]


def test_top_shows_what_evictions_add_to_the_cost() -> None:
    decision = Decision(mode="forecast", chosen=Rank(worker_id=1), reason="lowest cost")
    decision.candidates.extend([candidate(1, 40.0, 4, eviction_ms=12.0), candidate(2, 50.0, 0, eviction_ms=0.0)])
    assert why(decision) == "forecast: lowest cost 40.0, 12.0 of it for evictions; next 2:0 50.0 (0 cached)"
    decision.candidates[0].terms["eviction_ms"] = 0.0
    assert why(decision) == "forecast: lowest cost 40.0; next 2:0 50.0 (0 cached)"


def test_tiers_and_who_holds_more_are_shown() -> None:
    decision = Decision(
        mode="kv",
        chosen=Rank(worker_id=1),
        prompt_blocks=20,
        candidates=[candidate(1, 1.0, 10), candidate(2, 2.0, 12)],
        kv_source=KvSource(rank=Rank(worker_id=2), tier=Tier.TIER_HOST, blocks=12),
        expected_output_tokens=1234.5,
    )
    decision.candidates[1].lower_blocks.host = 5
    assert "expected to generate 1,234 tokens" in summary(decision)
    assert "rank 2:0 has more of the prompt: 12 blocks, down to tier host" in summary(decision)
    out = io.StringIO()
    PlainConsole(file=out, width=120).print(candidates_table(decision))
    assert "12 of 20, 5 host" in out.getvalue()
    assert "10 of 20," not in out.getvalue()
