"""When a failing worker is backed off, for how long, and what ends it."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings, strategies as st
from kvrouter.frontend.workers.observed_worker import BackOff, CircuitBreaker

BACK_OFF = BackOff(failures=3, first_seconds=1.0, max_seconds=8.0)
LONGEST = 8.0 * 1.25


def circuit() -> CircuitBreaker:
    return CircuitBreaker(BACK_OFF, Random(1))


def opened(now: float = 0.0) -> CircuitBreaker:
    found = circuit()
    for _ in range(3):
        found.failed(now)
    return found


def test_fewer_failures_in_a_row_change_nothing() -> None:
    found = circuit()
    for _ in range(5):
        found.failed(0)
        found.failed(0)
        assert found.admits(0)
        found.completed()
    assert found.is_closed


def test_failures_in_a_row_exclude_the_worker_for_a_growing_time() -> None:
    found, now, waits = opened(), 0.0, []
    for _ in range(6):
        assert not found.admits(now)
        waits.append(found.retry_in(now))
        now += waits[-1]
        assert found.admits(now)
        found.failed(now)
    for wait, nominal in zip(waits, [1, 2, 4, 8, 8, 8], strict=True):
        assert 0.75 * nominal <= wait <= 1.25 * nominal


def test_requests_that_were_under_way_when_it_opened_do_not_prolong_it() -> None:
    found = opened()
    wait = found.retry_in(0)
    for _ in range(40):
        found.failed(0.1)
    assert found.retry_in(0) == wait


def test_one_request_at_a_time_tries_the_worker_again() -> None:
    found = opened()
    now = found.retry_in(0)
    assert found.admits(now)
    assert found.began(now)
    assert not found.admits(now)
    found.trial_ended()  # Its client went away: nothing is known of the worker.
    assert found.admits(now)
    assert not found.is_closed


def test_a_first_output_ends_the_back_off_and_a_completed_request_forgets_the_failures() -> None:
    found = opened()
    found.responded()
    assert found.admits(0)
    found.failed(1.0)
    assert not found.admits(1.0), "it had completed nothing since"
    found.completed()
    assert found.is_closed
    found.failed(2.0)
    assert found.is_closed


EVENTS = st.lists(
    st.tuples(st.sampled_from(["begin", "fail", "respond", "complete", "leave"]), st.floats(0, 20)), max_size=60
)


@settings(max_examples=200)
@given(EVENTS)
def test_a_worker_is_always_tried_again(events: list[tuple[str, float]]) -> None:
    """Failures only ever come from requests that were sent, and each request ends."""
    found, now = circuit(), 0.0
    running: list[bool] = []
    for event, pause in events:
        now += pause
        if event == "begin":
            running.append(found.began(now))
        elif running:
            is_trial = running.pop()
            match event:
                case "fail":
                    found.failed(now)
                case "respond":
                    found.responded()
                case "complete":
                    found.completed()
            if is_trial:
                found.trial_ended()
    while running:
        if running.pop():
            found.trial_ended()
    assert found.retry_in(now) <= LONGEST
    assert found.admits(now + LONGEST)
