"""What `kvrouter explain` says of a decision, and by which ids it finds one."""

from __future__ import annotations

import io

import pytest
from kvrouter.cli.explain import lookups, matching_ids
from kvrouter.cli.explanation import comparison_table, remainder
from kvrouter.cli.terminal import PlainConsole
from kvrouter.cli.top.decisions_table import request_name
from kvrouter.v1.common_pb2 import Rank
from kvrouter.v1.scheduler_pb2 import CandidateTerms, Decision


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
