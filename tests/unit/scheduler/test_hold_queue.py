"""Requests held: who goes first, who passes whom, and that nobody waits for ever."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from kvrouter.scheduler.hold_queue import INTERVAL_S, PATIENCE_S, HoldQueue
from kvrouter.scheduler.pace import Pace
from kvrouter.scheduler.policies.interface import Choice, Explanation, Hold
from kvrouter.scheduler.prefill_queues import Head, PrefillQueues

WHY = Explanation("")


def hold(work_ms: float) -> Hold:
    return Hold(0, WHY, work_ms=work_ms)


def go(_: str) -> Choice:
    return Choice(0, WHY)


def names(queue: HoldQueue[str], now: float, works: dict[str, float] | None = None) -> list[str]:
    """Those that go; all where no works are given, else only those that are forced."""
    return [name for name, _ in queue.release(now, go if works is None else lambda name: hold(works[name]))]


def test_short_ones_go_first_and_waiting_counts() -> None:
    queue: HoldQueue[str] = HoldQueue()
    queue.add("long", hold(500), 0.0)
    queue.add("short", hold(100), 0.0)
    queue.add("older", hold(550), -1.0)
    assert names(queue, 1.0) == ["short", "older", "long"]
    assert not len(queue)


def test_those_that_fit_pass_those_that_do_not() -> None:
    queue: HoldQueue[str] = HoldQueue()
    queue.add("first", hold(1), 0.0)
    queue.add("second", hold(2), 0.0)
    decided = queue.release(0.1, lambda name: hold(1) if name == "first" else Choice(0, WHY))
    assert [name for name, _ in decided] == ["second"]
    assert len(queue) == 1


def test_each_is_decided_on_after_those_before_it_went() -> None:
    queue: HoldQueue[str] = HoldQueue()
    queue.add("a", hold(1), 0.0)
    queue.add("b", hold(2), 0.0)
    sent: list[str] = []
    for name, _ in queue.release(0.1, lambda _: hold(1) if sent else Choice(0, WHY)):
        sent.append(name)
    assert sent == ["a"]


def test_the_oldest_loses_its_patience_one_at_a_time() -> None:
    queue: HoldQueue[str] = HoldQueue()
    works = {"a": 9.0, "b": 1.0}
    queue.add("a", hold(9), 0.0)
    queue.add("b", hold(1), 0.5)
    assert queue.next_due() == PATIENCE_S
    assert names(queue, PATIENCE_S - 0.1, works) == []
    assert names(queue, PATIENCE_S, works) == ["a"]
    assert queue.next_due() == math.inf
    assert names(queue, PATIENCE_S + 1, works) == []
    queue.started("a")
    assert queue.next_due() == PATIENCE_S + 1 + INTERVAL_S
    assert names(queue, PATIENCE_S + 2, works) == ["b"]


def test_one_that_was_forced_and_ends_makes_way() -> None:
    queue: HoldQueue[str] = HoldQueue()
    for name in "ab":
        queue.add(name, hold(1), 0.0)
    assert names(queue, PATIENCE_S, {"a": 1, "b": 1}) == ["a"]
    assert not queue.remove("a")
    assert names(queue, PATIENCE_S + 1, {"b": 1}) == ["b"]


def test_a_look_that_comes_too_soon_is_made_up_for() -> None:
    queue: HoldQueue[str] = HoldQueue()
    queue.add("a", hold(1), 0.0)
    assert names(queue, 1.0, {"a": 1}) == []
    assert names(queue, 1.0 + INTERVAL_S / 2) == []
    assert queue.next_due() == 1.0 + INTERVAL_S
    assert names(queue, queue.next_due()) == ["a"]


def test_it_is_bounded_and_forgets_who_left() -> None:
    queue: HoldQueue[str] = HoldQueue(max_held=1)
    assert queue.add("a", hold(1), 0.0)
    assert not queue.add("b", hold(1), 0.0)
    assert queue.remove("a")
    assert queue.add("b", hold(1), 0.0)


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 1000)), max_size=20))
def test_nobody_waits_for_ever(arrivals: list[tuple[float, float]]) -> None:
    queue: HoldQueue[str] = HoldQueue()
    works = {str(number): work for number, (_, work) in enumerate(arrivals)}
    now = 0.0
    for number, (pause, work) in enumerate(arrivals):
        now += pause
        queue.add(str(number), hold(work), now)
    gone = 0
    while (due := queue.next_due()) < math.inf:
        now = max(now, due)
        for name in names(queue, now, works):
            gone += 1
            queue.started(name)
    assert gone == len(arrivals)


def test_the_head_of_a_prefill_queue_is_the_oldest_without_a_first_token() -> None:
    queues, rank = PrefillQueues(), (1, 0)
    a, b = ("a", 0, 1), ("b", 0, 1)
    assert queues.head(rank, 0.0) == Head()
    queues.enter(rank, a, 100, 1.0)
    queues.enter(rank, b, 200, 2.0)
    assert queues.head(rank, 3.0) == Head(100, 2.0, 2)
    queues.leave(rank, a, 4.0)
    assert queues.head(rank, 4.5) == Head(200, 0.5, 1)
    queues.leave(rank, a, 5.0)
    assert queues.head(rank, 5.0) == Head(200, 1.0, 1)
    queues.leave(rank, b, 6.0)
    assert queues.head(rank, 7.0) == Head()


def test_the_pace_follows_the_engines_and_one_outlier_moves_it_little() -> None:
    pace = Pace()
    for number in range(400):
        pace.expect(number, 100 * pace.value, 0.0)
        pace.first_token(number, 0.3)
    assert 2.9 < pace.value < 3.1
    pace.expect("late", 300.0, 0.0)
    pace.first_token("late", 1e6)
    assert pace.value < 3.2


def test_what_ends_without_a_first_token_teaches_nothing() -> None:
    pace = Pace()
    pace.expect("a", 100.0, 0.0)
    pace.forget("a")
    pace.first_token("a", 9.0)
    assert pace.value == 1.0
