"""A bounded number of decisions is kept, each with all its candidates."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random
from typing import cast

from kvrouter.core import Rank
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.routing.decide import Decision, Decisions
from kvrouter.scheduler.routing.snapshot import CandidateSnapshot
from kvrouter.v1.common_pb2 import Stage
from kvrouter.v1.names import ComponentName
from msgspec.structs import replace

from ..context_maker import context
from ..harness import POOL


@dataclass
class Ranks:
    """A set of candidates of which only the ranks are known."""

    ranks: tuple[Rank, ...]

    def __len__(self) -> int:
        return len(self.ranks)


class Draining:
    """A snapshot of candidates of which the last one was excluded."""

    prefill: None = None

    def __init__(self, weighed: tuple[Rank, ...]) -> None:
        self.worker_set = Ranks((*weighed, (1, 5)))
        self.free = range(len(weighed))
        self.overlap_blocks = [*[1] * len(weighed), 3]

    def excluded(self, weighed: Collection[Rank]) -> dict[int, str]:
        return {len(weighed): "draining"}

    def lower_of(self, place: int) -> None:
        assert place >= 0

    def kv_source(self, place: int) -> None:
        assert place >= 0

    def conversation_terms(self, rank: Rank) -> dict[str, float]:
        return {}


def decided(decisions: Decisions, request_id: str = "r", *, candidates: int = 2) -> Decision:
    weighed = context(candidates, active_blocks=list(range(candidates)), overlap_blocks=[1] * candidates)
    choice = POLICIES["kv"].decide(weighed, Random(1))
    return Decision(
        decision_id=next(decisions.ids),
        component=POOL,
        key=(request_id, 0, Stage.STAGE_WHOLE),
        mode="kv",
        chosen=weighed.ranks[choice.index],
        place=choice.index,
        context=weighed,
        explanation=choice.explanation,
        snapshot=cast(CandidateSnapshot, Draining(weighed.ranks)),
        verdict=choice,
        prompt_blocks=4,
        load_only=False,
        decided_unix_ns=1,
    )


def test_a_decision_tells_every_candidate_in_order() -> None:
    message = decided(Decisions(10)).to_message()
    assert [(each.rank.worker_id, each.rank.dp_rank, each.excluded) for each in message.candidates] == [
        (1, 0, ""),
        (1, 5, "draining"),
        (2, 0, ""),
    ]
    assert [each.overlap_blocks for each in message.candidates] == [1, 3, 1], "of those left out as well"
    assert (message.chosen.worker_id, message.chosen.dp_rank) == (1, 0)
    assert message.candidates[2].cost == 1.0
    assert dict(message.candidates[2].terms) == {"prefill_blocks": 0.0, "decode_blocks": 1.0}
    assert message.candidates[2].formula == "Formula for worker_2: 1.0 = 1.0 * 0.0 + 1.0 (cached_blocks: 1)"
    assert message.reason == "lowest cost"


def test_the_oldest_go_first() -> None:
    decisions = Decisions(2)
    kept = [decided(decisions, name) for name in ("a", "b", "c")]
    for each in kept:
        decisions.add(each)
    assert decisions.by_id(kept[0].decision_id) is None
    assert decisions.by_request("a") is None
    assert decisions.by_id(kept[2].decision_id) is kept[2]
    assert len(decisions) == 2


def test_the_newest_decision_of_a_request_is_found_while_it_is_kept() -> None:
    decisions = Decisions(2)
    kept = [decided(decisions, name) for name in ("a", "a", "b")]
    for each in kept:
        decisions.add(each)
    assert decisions.by_request("a") is kept[1]


def test_candidates_are_bounded_over_all_decisions() -> None:
    decisions = Decisions(100, max_rows=10)
    for _ in range(20):
        decisions.add(decided(decisions, candidates=4))
    assert len(decisions) == 2


def test_ids_are_not_repeated_by_the_next_incarnation_of_a_scheduler() -> None:
    first, second = Decisions(1), Decisions(1)
    earlier = [next(first.ids) for _ in range(3)]
    assert next(second.ids) > earlier[0]
    assert earlier == sorted(set(earlier))


def test_a_decision_is_found_by_the_id_that_the_client_gave() -> None:
    decisions = Decisions(2)
    first, second = decided(decisions, "client~id~5f3a"), decided(decisions, "client~id~77b1")
    decisions.add(first)
    decisions.add(second)
    assert decisions.by_request("client~id") is second
    assert decisions.by_request("client~id~5f3a") is first
    decisions.add(decided(decisions, "other"))
    # The first has gone, and took no name with it that the second goes by.
    assert decisions.by_request("client~id") is second
    assert decisions.by_request("client~id~5f3a") is None


def test_the_newest_decisions_name_the_chosen_rank_and_the_next_cheapest() -> None:
    decisions = Decisions(10)
    for request_id in ("a", "b", "c"):
        decisions.add(decided(decisions, request_id, candidates=4))
    newest = decisions.newest(2)
    assert [each.request_id for each in newest] == ["c", "b"]
    message = newest[0].to_short_message()
    assert message.component.name == POOL.name
    assert [each.cost for each in message.candidates] == sorted(newest[0].explanation.costs)[:2]
    assert message.chosen == message.candidates[0].rank
    assert decisions.newest(2, ComponentName("ns", "other")) == []


def test_the_decision_on_a_prefill_worker_is_shown_only_if_there_is_no_other() -> None:
    decisions = Decisions(3)
    first = decided(decisions, "a")
    prefill = replace(decided(decisions), key=("a", 0, Stage.STAGE_PREFILL))
    alone = replace(decided(decisions), key=("b", 0, Stage.STAGE_PREFILL))
    for each in (first, prefill, alone):
        decisions.add(each)
    assert decisions.by_request("a") is first
    assert decisions.by_request("b") is alone
    assert decisions.by_id(prefill.decision_id) is prefill
