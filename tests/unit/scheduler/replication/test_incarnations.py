from __future__ import annotations

from hypothesis import given, strategies as st
from kvrouter.scheduler.replication.event_log import Incarnations, Verdict


def test_the_first_incarnations_count_as_they_are_heard_and_later_ones_fence_earlier_ones() -> None:
    incarnations = Incarnations()
    assert incarnations.judge("a", 5, 0.0) is Verdict.APPLY
    assert incarnations.judge("a", 6, 0.0) is Verdict.APPLY
    assert incarnations.judge("a", 5, 0.0) is Verdict.OLD
    assert incarnations.due(0.0) == ["a"]


def test_a_schedulers_own_answer_counts_and_forged_incarnations_are_refused_from_then_on() -> None:
    incarnations = Incarnations()
    incarnations.judge("a", 5, 0.0)
    incarnations.judge("a", 1 << 63, 0.0)
    incarnations.judge("a", 5, 0.0)
    assert incarnations.settle("a", 5, 0.1)
    assert incarnations.judge("a", 5, 0.2) is Verdict.APPLY
    assert incarnations.judge("a", 1 << 63, 0.2) is Verdict.UNCONFIRMED
    assert not incarnations.settle("a", 5, 0.3)
    assert incarnations.judge("a", 5, 0.4) is Verdict.APPLY


def test_a_restart_after_a_dispute_counts_once_the_scheduler_says_so() -> None:
    incarnations = Incarnations()
    incarnations.judge("a", 5, 0.0)
    incarnations.settle("a", 5, 0.0)
    assert incarnations.judge("a", 9, 1.0) is Verdict.UNCONFIRMED
    assert incarnations.due(1.0) == ["a"]
    assert incarnations.settle("a", 9, 1.0)
    assert incarnations.judge("a", 9, 1.0) is Verdict.APPLY


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1)), max_size=200))
def test_disputes_that_change_nothing_are_settled_ever_more_rarely(steps: list[tuple[int, float]]) -> None:
    incarnations, now, asked = Incarnations(), 0.0, 0
    incarnations.judge("a", 5, now)
    incarnations.settle("a", 5, now)
    for incarnation, later in steps:
        now += later
        incarnations.judge("a", incarnation, now)
        if incarnations.due(now):
            asked += 1
            incarnations.settle("a", 5, now)
        assert incarnations.current("a") == 5
    assert asked <= 10 + now / 15


def test_disputes_about_strangers_are_bounded_and_forgotten() -> None:
    incarnations = Incarnations()
    for number in range(100):
        incarnations.dispute(f"s{number}", 0.0)
    assert len(incarnations.due(0.0)) == 64
    for scheduler_id in incarnations.due(0.0):
        incarnations.unanswered(scheduler_id, 0.0)
    incarnations.forget_quiet(100.0)
    assert incarnations.next_due() is None
