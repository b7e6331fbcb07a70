from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvrouter.scheduler.replication.epochs import Epochs, Verdict


def test_the_first_epochs_count_as_they_are_heard_and_later_ones_fence_earlier_ones() -> None:
    epochs = Epochs()
    assert epochs.judge("a", 5, 0.0) is Verdict.APPLY
    assert epochs.judge("a", 6, 0.0) is Verdict.APPLY
    assert epochs.judge("a", 5, 0.0) is Verdict.OLD
    assert epochs.due(0.0) == ["a"]


def test_a_schedulers_own_answer_counts_and_forged_epochs_are_refused_from_then_on() -> None:
    epochs = Epochs()
    epochs.judge("a", 5, 0.0)
    epochs.judge("a", 1 << 63, 0.0)
    epochs.judge("a", 5, 0.0)
    assert epochs.settle("a", 5, 0.1)
    assert epochs.judge("a", 5, 0.2) is Verdict.APPLY
    assert epochs.judge("a", 1 << 63, 0.2) is Verdict.UNCONFIRMED
    assert not epochs.settle("a", 5, 0.3)
    assert epochs.judge("a", 5, 0.4) is Verdict.APPLY


def test_a_restart_after_a_dispute_counts_once_the_scheduler_says_so() -> None:
    epochs = Epochs()
    epochs.judge("a", 5, 0.0)
    epochs.settle("a", 5, 0.0)
    assert epochs.judge("a", 9, 1.0) is Verdict.UNCONFIRMED
    assert epochs.due(1.0) == ["a"]
    assert epochs.settle("a", 9, 1.0)
    assert epochs.judge("a", 9, 1.0) is Verdict.APPLY


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1)), max_size=200))
def test_disputes_that_change_nothing_are_settled_ever_more_rarely(steps: list[tuple[int, float]]) -> None:
    epochs, now, asked = Epochs(), 0.0, 0
    epochs.judge("a", 5, now)
    epochs.settle("a", 5, now)
    for epoch, later in steps:
        now += later
        epochs.judge("a", epoch, now)
        if epochs.due(now):
            asked += 1
            epochs.settle("a", 5, now)
        assert epochs.current("a") == 5
    assert asked <= 10 + now / 15


def test_disputes_about_strangers_are_bounded_and_forgotten() -> None:
    epochs = Epochs()
    for number in range(100):
        epochs.dispute(f"s{number}", 0.0)
    assert len(epochs.due(0.0)) == 64
    for router_id in epochs.due(0.0):
        epochs.unanswered(router_id, 0.0)
    epochs.forget_quiet(100.0)
    assert epochs.next_due() is None
