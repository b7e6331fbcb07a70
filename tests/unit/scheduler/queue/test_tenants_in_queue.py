"""Tenants that share a queue: they take turns, by weight, and a tenant that floods it leaves others room."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from kvrouter.scheduler.policies.interface import Choice, Explanation, Wait
from kvrouter.scheduler.queue.request_queue import INTERVAL_S, PATIENCE_S, RequestQueue
from kvrouter.scheduler.request.options import Tenant

WHY = Explanation("")
FLOOD, QUIET = Tenant("flood"), Tenant("quiet")
Queue = RequestQueue[tuple[str, int]]


def add(queue: Queue, tenant: Tenant, numbers: range, now: float = 0.0, tokens: int = 1000, priority: int = 0) -> int:
    """Adds requests until one is refused, and returns how many were added."""
    for count, number in enumerate(numbers):
        wait = Wait(0, WHY, prefill_ms=1.0, room_tokens=tokens)
        if not queue.add((tenant.name, number), wait, now, tenant=tenant, priority=priority):
            return count
    return len(numbers)


def released(queue: Queue, now: float, most: int) -> list[str]:
    """Tenants of the first requests that leave, with room for only so many."""
    left = most

    def decide(_: tuple[str, int]) -> Choice | Wait:
        nonlocal left
        left -= 1
        return Choice(0, WHY) if left >= 0 else Wait(0, WHY, room_tokens=1000)

    return [tenant for (tenant, _), _ in queue.release(now, decide)]


def test_a_tenant_that_comes_later_does_not_wait_for_the_queue_of_another() -> None:
    queue = Queue()
    add(queue, FLOOD, range(500))
    add(queue, QUIET, range(3), 1.0)
    assert released(queue, 2.0, 7).count("quiet") == 3


def test_tenants_receive_room_by_weight_and_tokens() -> None:
    queue = Queue()
    add(queue, Tenant("heavy", 3.0), range(100))
    add(queue, Tenant("light", 1.0), range(100))
    assert Counter(released(queue, 1.0, 40)) == {"heavy": 30, "light": 10}
    queue = Queue()
    add(queue, Tenant("large"), range(100), tokens=4000)
    add(queue, Tenant("small"), range(100), tokens=1000)
    assert Counter(released(queue, 1.0, 50)) == {"small": 40, "large": 10}


def test_a_tenant_that_uses_less_is_next_until_both_use_as_much() -> None:
    queue = Queue()
    add(queue, FLOOD, range(100))
    running = [request for request, _ in itertools.islice(queue.release(1.0, lambda _: Choice(0, WHY)), 20)]
    for request in running[:10]:
        queue.ended(request, 1.0)
    add(queue, QUIET, range(100), 1.0)
    order = [released(queue, 2.0 + step * 2 * INTERVAL_S, 1)[0] for step in range(30)]
    assert order[:10] == ["quiet"] * 10
    assert Counter(order[10:]) == {"flood": 10, "quiet": 10}


def test_what_was_used_before_counts_no_more() -> None:
    queue = Queue()
    add(queue, QUIET, range(50))
    assert len(released(queue, 1.0, 50)) == 50
    for number in range(50):
        queue.ended(("quiet", number), 1.0)
    add(queue, QUIET, range(100, 150), 2.0)
    add(queue, FLOOD, range(50), 2.0)
    assert Counter(released(queue, 3.0, 20)) == {"flood": 10, "quiet": 10}


def test_requests_that_did_not_wait_count_for_their_tenant() -> None:
    queue = Queue()
    for number in range(10):
        queue.dispatched(("flood", number), FLOOD, 1000, 0.0)
    add(queue, FLOOD, range(10, 50))
    add(queue, QUIET, range(50), 1.0)
    assert released(queue, 2.0, 10) == ["quiet"] * 10


def test_priority_goes_before_turns() -> None:
    queue = Queue()
    add(queue, QUIET, range(10))
    add(queue, FLOOD, range(10), priority=-1)
    assert released(queue, 1.0, 10) == ["flood"] * 10


def test_a_tenant_that_fills_the_queue_leaves_others_their_share() -> None:
    queue = Queue(max_queued_requests=100)
    assert add(queue, FLOOD, range(200)) == 100, "one that is alone may use everything"
    assert not queue.add(("quiet", 0), Wait(0, WHY), 0.0, tenant=QUIET)
    released(queue, 1.0, 40)
    assert add(queue, QUIET, range(200), 1.0) == 40
    assert add(queue, FLOOD, range(200, 300), 1.0) == 0


def test_requests_without_room_leave_by_turns() -> None:
    queue = Queue()
    add(queue, FLOOD, range(50))
    add(queue, QUIET, range(50), 1.0)
    now, order = 1.0 + PATIENCE_S, []
    for _ in range(6):
        now += 2 * INTERVAL_S
        ((request, _),) = queue.release(now, lambda _: Wait(0, WHY, room_tokens=1000))
        order.append(request)
        queue.started(request)
    assert order == [("flood", 0), ("quiet", 0), ("flood", 1), ("quiet", 1), ("flood", 2), ("quiet", 2)]


@pytest.mark.parametrize("ahead", [0, 3])
def test_the_expected_wait_counts_turns_and_not_the_queue_of_another_tenant(ahead: int) -> None:
    queue = Queue()
    add(queue, FLOOD, range(100))
    for step in range(1, 61):
        assert len(released(queue, float(step), 1)) == 1  # One request leaves each second.
    add(queue, FLOOD, range(100, 1000), 60.0)
    add(queue, QUIET, range(ahead), 60.0)
    for number, seconds, late in ((ahead, 30.0, False), (ahead + 1, 1.0, True)):
        request = ("quiet", number)
        wait = Wait(0, WHY, prefill_ms=1.0, room_tokens=1000)
        queue.add(request, wait, 60.0, tenant=QUIET, deadline=60.0 + seconds)
        assert queue.is_late(request, 60.0) == late
        assert (request in queue.late(60.0)) == late
        queue.remove(request)


def test_a_pass_that_ends_early_continues_with_the_requests_of_every_tenant() -> None:
    queue = Queue()
    add(queue, FLOOD, range(200))
    add(queue, QUIET, range(200))
    tried: list[tuple[str, int]] = []

    def decide(request: tuple[str, int]) -> Wait:
        tried.append(request)
        return Wait(0, WHY, room_tokens=1000)

    for step in range(1, 8):
        assert not list(queue.release(step * 2 * INTERVAL_S, decide))
    assert len(set(tried)) == 400


def test_a_tenant_that_leaves_room_for_others_is_asked_once_in_a_pass() -> None:
    queue = Queue()
    add(queue, FLOOD, range(50))
    add(queue, QUIET, range(3))
    asked: list[str] = []

    def decide(request: tuple[str, int]) -> Choice | Wait:
        asked.append(request[0])
        return Choice(0, WHY) if request[0] == "quiet" else Wait(0, WHY, for_slot=True, keeps_room=True)

    assert [tenant for (tenant, _), _ in queue.release(1.0, decide)] == ["quiet"] * 3
    assert Counter(asked) == {"quiet": 3, "flood": 1}


def join(queue: Queue, session: str, numbers: range, now: float) -> None:
    """Adds requests of a session of one tenant."""
    for number in numbers:
        wait = Wait(0, WHY, room_tokens=1000)
        assert queue.add((session, number), wait, now, tenant=QUIET, conversation=session.encode())


def test_a_session_that_comes_later_does_not_wait_for_the_many_requests_of_another() -> None:
    queue = Queue()
    join(queue, "many", range(50), 0.0)
    join(queue, "one", range(1), 0.1)
    join(queue, "two", range(2), 0.1)
    assert released(queue, 0.2, 4) == ["many", "one", "two", "many"]


def test_requests_on_ranks_count_for_their_session_until_they_end() -> None:
    queue = Queue()
    for number in range(3):
        queue.dispatched(("many", number), QUIET, 1000, 0.0, conversation=b"many")
    join(queue, "many", range(3, 4), 0.0)
    join(queue, "one", range(1), 0.1)
    assert released(queue, 0.2, 1) == ["one"]
    for number in range(4):
        queue.ended(("many", number), 1.0)
    queue.remove(("many", 3))
    queue.ended(("one", 0), 1.0)
    join(queue, "many", range(5, 6), 1.0)
    join(queue, "one", range(1, 2), 1.1)
    assert released(queue, 1.2, 1) == ["many"], "nothing is kept of what has ended"


def test_requests_without_a_session_keep_their_order() -> None:
    queue = Queue()
    join(queue, "", range(10), 0.0)
    join(queue, "one", range(1), 0.1)
    assert released(queue, 0.2, 11) == [""] * 10 + ["one"]
