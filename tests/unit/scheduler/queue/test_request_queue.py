"""The order of queued requests: which go first, which pass others, and that no request waits forever."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from hypothesis import given, strategies as st
from kvrouter.core import LatencyCalibration
from kvrouter.scheduler.policies.interface import Choice, Explanation, Wait
from kvrouter.scheduler.queue.request_queue import (
    INTERVAL_S,
    LEAST,
    PATIENCE_S,
    STALL_S,
    TRIES,
    TRIES_PER_RANK,
    RequestQueue,
)

WHY = Explanation("")


def hold(prefill_ms: float, room_tokens: int | None = None) -> Wait:
    return Wait(
        0, WHY, prefill_ms=prefill_ms, room_tokens=round(20 * prefill_ms) if room_tokens is None else room_tokens
    )


def go(_: str) -> Choice:
    return Choice(0, WHY)


def names(queue: RequestQueue[str], now: float, works: dict[str, float] | None = None) -> list[str]:
    """Those that go; all where no works are given, else only those that are forced."""
    return [name for name, _ in queue.release(now, go if works is None else lambda name: hold(works[name]))]


def test_requests_that_need_little_room_go_first_and_waiting_counts() -> None:
    queue: RequestQueue[str] = RequestQueue()
    queue.add("large", hold(1, 10_000), 0.0)
    queue.add("small", hold(9, 2_000), 0.0)
    queue.add("older", hold(5, 11_000), -1.0)
    assert names(queue, 1.0) == ["small", "older", "large"]
    assert not len(queue)


def test_requests_that_fit_pass_those_that_do_not() -> None:
    queue: RequestQueue[str] = RequestQueue()
    queue.add("first", hold(1), 0.0)
    queue.add("second", hold(2), 0.0)
    decided = queue.release(0.1, lambda name: hold(1) if name == "first" else Choice(0, WHY))
    assert [name for name, _ in decided] == ["second"]
    assert len(queue) == 1


def test_the_largest_request_queued_for_a_rank_is_known() -> None:
    queue: RequestQueue[str] = RequestQueue()
    rank, other = (1, 0), (2, 0)
    queue.add("first", Wait(0, WHY, room_tokens=300, rank=rank), 0.0)
    queue.add("second", Wait(0, WHY, room_tokens=500, rank=rank), 0.0)
    queue.add("for a slot", Wait(0, WHY, room_tokens=700, rank=rank, for_slot=True), 0.0)
    assert queue.queued_tokens() == {rank: 500}
    moved = {"first": Choice(0, WHY), "second": Wait(0, WHY, room_tokens=400, rank=other)}
    assert [name for name, _ in queue.release(0.1, lambda name: moved.get(name, hold(1)))] == ["first"]
    assert queue.queued_tokens() == {other: 400}
    queue.remove("second")
    assert not queue.queued_tokens()


def test_each_request_is_decided_after_the_previous_ones_left() -> None:
    queue: RequestQueue[str] = RequestQueue()
    queue.add("a", hold(1), 0.0)
    queue.add("b", hold(2), 0.0)
    sent: list[str] = []
    for name, _ in queue.release(0.1, lambda _: hold(1) if sent else Choice(0, WHY)):
        sent.append(name)
    assert sent == ["a"]


def test_the_oldest_loses_its_patience_one_at_a_time() -> None:
    queue: RequestQueue[str] = RequestQueue()
    works = {"a": 9.0, "b": 1.0}
    queue.add("a", hold(9), 0.0)
    queue.add("b", hold(1), 0.5)
    assert queue.next_due() == PATIENCE_S
    assert names(queue, PATIENCE_S - 0.1, works) == []
    assert names(queue, PATIENCE_S, works) == ["a"]
    assert queue.next_due() == PATIENCE_S + STALL_S
    assert names(queue, PATIENCE_S + 1, works) == []
    queue.started("a")
    assert queue.next_due() == PATIENCE_S + 1 + INTERVAL_S
    assert names(queue, PATIENCE_S + 2, works) == ["b"]


def test_one_that_never_starts_keeps_the_next_for_a_while_only() -> None:
    queue: RequestQueue[str] = RequestQueue()
    works = {"a": 1.0, "b": 1.0}
    for name in works:
        queue.add(name, hold(1), 0.0)
    assert names(queue, PATIENCE_S, works) == ["a"]
    assert names(queue, PATIENCE_S + STALL_S - 0.1, works) == []
    assert names(queue, PATIENCE_S + STALL_S, works) == ["b"]


def test_a_smaller_priority_goes_first() -> None:
    queue: RequestQueue[str] = RequestQueue()
    queue.add("short", hold(1), 0.0)
    queue.add("urgent", hold(1000), 0.0, priority=-1)
    queue.add("idle", hold(0), 0.0, priority=1)
    assert names(queue, 1.0) == ["urgent", "short", "idle"]


def test_a_request_from_another_scheduler_keeps_its_age() -> None:
    queue: RequestQueue[str] = RequestQueue()
    queue.add("here", hold(1), 20.0)
    queue.add("moved", hold(1), 20.5, since=12.0)
    assert queue.oldest == "moved"
    assert queue.next_due() == 12.0 + PATIENCE_S
    assert names(queue, 12.0 + PATIENCE_S, {"here": 1, "moved": 1}) == ["moved"]


def test_requests_for_a_rank_without_room_do_not_delay_others() -> None:
    queue: RequestQueue[int] = RequestQueue()
    for number in range(100):
        queue.add(number, Wait(0, WHY, room_tokens=number, rank=(1, 0)), 0.0)
    queue.add(100, Wait(1, WHY, room_tokens=100, rank=(2, 0)), 0.0)
    booking_context: list[int] = []

    def decide(number: int) -> Choice | Wait:
        booking_context.append(number)
        return Choice(1, WHY) if number == 100 else Wait(0, WHY, room_tokens=number, rank=(1, 0))

    assert [number for number, _ in queue.release(1.0, decide)] == [100]
    assert booking_context == [*range(TRIES_PER_RANK), 100]


def test_a_pass_is_bounded_and_the_next_continues_where_it_ended() -> None:
    queue: RequestQueue[int] = RequestQueue()
    waiting = [Wait(number, WHY, room_tokens=number, rank=(number, 0)) for number in range(TRIES + 10)]
    for number, each in enumerate(waiting):
        queue.add(number, each, 0.0)
    looks: list[list[int]] = []
    for now in (1.0, 2.0, 3.0):
        looks.append([])

        def decide(number: int) -> Wait:
            looks[-1].append(number)
            return waiting[number]

        assert not list(queue.release(now, decide))
        assert queue.next_due() == now + INTERVAL_S
    assert looks[0] == [*range(TRIES)]
    assert looks[1] == [*range(TRIES, TRIES + 10), *range(TRIES - 10)]
    assert looks[2] == [*range(TRIES - 10, TRIES + 10), *range(TRIES - 20)]


def test_one_that_would_be_late_is_found_at_once() -> None:
    queue: RequestQueue[str] = RequestQueue()
    queue.add("slow", hold(3000), 0.0, deadline=2.0)
    queue.add("quick", hold(100), 0.0, deadline=2.0)
    assert queue.late(0.0) == ["slow"]
    assert queue.remove("slow")
    assert queue.late(1.8) == []
    assert queue.late(2.0) == ["quick"]


def test_the_interval_of_releases_predicts_which_requests_are_late() -> None:
    queue: RequestQueue[int] = RequestQueue()
    for number in range(LEAST + 4):
        queue.add(number, hold(number), 0.0, deadline=LEAST + 2.5)
    for second in range(1, LEAST + 1):  # one each second
        assert queue.late(second) == []
        queued = {number: hold(number) for number in range(LEAST + 4)}
        go_on = iter([Choice(0, WHY)])
        assert len(list(queue.release(second, lambda number: next(go_on, queued[number])))) == 1  # noqa: B023
    assert queue.late(LEAST) == [LEAST + 2, LEAST + 3]


class Arrival(NamedTuple):
    pause: float
    prefill_ms: float
    priority: int
    starts_after: float
    waited: float


ARRIVALS = st.builds(
    Arrival, st.floats(0, 20), st.floats(0, 1e6), st.integers(-5, 5), st.floats(0, 2 * STALL_S), st.floats(0, 30)
)


@given(st.lists(ARRIVALS, min_size=1, max_size=25))
def test_the_bound_on_the_wait_holds_though_nothing_ever_fits(arrivals: list[Arrival]) -> None:
    queue: RequestQueue[int] = RequestQueue()
    latest: dict[int, float] = {}
    since: dict[int, float] = {}
    starts: list[tuple[float, int]] = []
    comes = list(itertools.accumulate(each.pause for each in arrivals))
    coming = list(enumerate(comes))
    now = 0.0
    while coming or len(queue):
        events = [queue.next_due(), *(at for _, at in coming[:1]), *(at for at, _ in starts)]
        now = max(now, min(events))
        for at, number in [each for each in starts if each[0] <= now]:
            starts.remove((at, number))
            queue.started(number)
        while coming and coming[0][1] <= now:
            number, _ = coming.pop(0)
            since[number] = now - arrivals[number].waited
            older = sum(since[other] <= since[number] for other in since if other in queue)
            latest[number] = now + PATIENCE_S + (older + 1) * (STALL_S + INTERVAL_S)
            # One that comes from elsewhere may be older than those that are here: they make way for it.
            for other in since:
                if other in queue and since[other] > since[number]:
                    latest[other] += STALL_S + INTERVAL_S
            each = arrivals[number]
            queue.add(number, hold(each.prefill_ms), now, since=since[number], priority=each.priority)
        for number, _ in queue.release(now, lambda number: hold(arrivals[number].prefill_ms)):
            assert now <= latest[number]
            starts.append((now + arrivals[number].starts_after, number))


def test_one_that_was_forced_and_ends_makes_way() -> None:
    queue: RequestQueue[str] = RequestQueue()
    for name in "ab":
        queue.add(name, hold(1), 0.0)
    assert names(queue, PATIENCE_S, {"a": 1, "b": 1}) == ["a"]
    assert not queue.remove("a")
    assert names(queue, PATIENCE_S + 1, {"b": 1}) == ["b"]


def test_a_look_that_comes_too_soon_is_made_up_for() -> None:
    queue: RequestQueue[str] = RequestQueue()
    queue.add("a", hold(1), 0.0)
    assert names(queue, 1.0, {"a": 1}) == []
    assert not queue.is_behind
    assert names(queue, 1.0 + INTERVAL_S / TRIES / 2) == []
    assert queue.is_behind
    assert queue.next_due() == 1.0 + INTERVAL_S / TRIES
    assert names(queue, queue.next_due()) == ["a"]
    assert not queue.is_behind


def test_without_a_free_slot_nothing_goes_and_nothing_is_tried() -> None:
    queue: RequestQueue[str] = RequestQueue()
    for name in "ab":
        queue.add(name, hold(1), 0.0)
    free = {(1, 0)}
    assert not list(queue.release(PATIENCE_S + 1, go, set))
    assert queue.next_due() == math.inf, "only a slot that becomes free helps"
    for name, _ in queue.release(PATIENCE_S + 1, go, lambda: free):
        assert name == "a"
        free.clear()
    assert len(queue) == 1


def test_a_slot_goes_to_a_request_whose_cheapest_rank_it_is() -> None:
    queue: RequestQueue[str] = RequestQueue()
    for name, rank in (("a", 1), ("b", 2), ("c", 1)):
        queue.add(name, Wait(0, WHY, rank=(rank, 0), for_slot=True), 0.0)
    free = {(2, 0)}
    order: list[str] = []
    for name, _ in queue.release(1.0, go, lambda: free):
        order.append(name)
        if len(order) == 2:
            free.clear()
    assert order == ["b", "a"], "without one that fits the first goes"


def test_long_waits_for_a_slot_change_the_order_once_in_a_while_only() -> None:
    queue: RequestQueue[str] = RequestQueue()
    for name in ("old", "older"):
        queue.add(name, Wait(0, WHY, room_tokens=10**9, for_slot=True), 0.0)
    for number in range(20):
        queue.add(f"new{number}", Wait(0, WHY, for_slot=True), PATIENCE_S)
    order: list[str] = []
    for tenth in range(15):
        for name, _ in queue.release(
            PATIENCE_S + 0.1 * tenth, go, lambda step=tenth: {(1, 0)} if len(order) <= step else set()
        ):
            order.append(name)
    assert order.index("old") == 0
    assert order.index("older") == 10


def test_it_is_bounded_and_forgets_who_left() -> None:
    queue: RequestQueue[str] = RequestQueue(max_queued_requests=1)
    assert queue.add("a", hold(1), 0.0)
    assert not queue.add("b", hold(1), 0.0)
    assert queue.remove("a")
    assert queue.add("b", hold(1), 0.0)


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 1000)), max_size=20))
def test_nobody_waits_for_ever(arrivals: list[tuple[float, float]]) -> None:
    queue: RequestQueue[str] = RequestQueue()
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


def test_the_latency_calibration_follows_the_engines_and_one_outlier_moves_it_little() -> None:
    latency_calibration = LatencyCalibration()
    speed = latency_calibration.speed((1, 0), 0.0)
    for _ in range(400):
        latency_calibration.learn(300.0, 100 * latency_calibration.value, speed, 0.3)
    assert 2.9 < latency_calibration.value < 3.1
    latency_calibration.learn(1e9, 300.0, speed, 1e6)
    assert latency_calibration.value < 3.2
