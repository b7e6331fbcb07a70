from __future__ import annotations

import random

from hypothesis import given, strategies as st
from kvrouter.indexer.index.rank_reset import PERSISTENT_DRIFT
from kvrouter.indexer.resync.resync_queue import ResyncQueue

RANK, OTHER = (1, 0), (2, 0)


def test_ranks_come_in_order_and_one_at_a_time() -> None:
    resync_queue = ResyncQueue()
    resync_queue.add(RANK, "gap", 1.0)
    resync_queue.add(RANK, "drift", 1.1)
    resync_queue.add(OTHER, "registered", 2.0)
    assert resync_queue.take(1.5) == (RANK, "gap")
    assert resync_queue.take(1.5) is None
    resync_queue.add(RANK, "drift", 1.6)
    assert resync_queue.take(3.0) == (OTHER, "registered"), "a rank that is being repaired waits"
    resync_queue.done(RANK)
    assert resync_queue.take(3.0) == (RANK, "drift"), "what came meanwhile is not lost"


def test_a_rank_that_failed_while_it_was_requested_again_waits_and_is_queued_once() -> None:
    resync_queue = ResyncQueue(random.Random(1))
    resync_queue.add(RANK, "gap", 0.0)
    resync_queue.take(0.0)
    resync_queue.add(RANK, "drift", 0.1)
    resync_queue.failed(RANK, 0.2)
    assert resync_queue.take(0.2) is None
    assert resync_queue.take(10.0) == (RANK, "gap")
    assert resync_queue.take(10.0) is None
    assert len(resync_queue) == 1
    resync_queue.done(RANK)
    assert (len(resync_queue), resync_queue.pause(10.0)) == (0, None)


def test_failures_wait_longer_each_time_within_bounds() -> None:
    resync_queue = ResyncQueue(random.Random(1))
    resync_queue.add(RANK, "gap", 0.0)
    now, pauses = 0.0, []
    for _ in range(12):
        assert resync_queue.take(now) == (RANK, "gap")
        resync_queue.failed(RANK, now)
        pause = resync_queue.pause(now)
        assert pause is not None
        pauses.append(pause)
        assert resync_queue.take(now + 0.99 * pause) is None
        now += pause
    assert pauses[0] < 0.5
    assert 15 <= pauses[-1] <= 45
    assert resync_queue.failures(RANK) == 12


def test_a_worker_that_registers_while_its_former_address_is_tried_does_not_wait_for_that() -> None:
    resync_queue = ResyncQueue(random.Random(1))
    resync_queue.add(RANK, "gap", 0.0)
    resync_queue.take(0.0)
    resync_queue.add(RANK, "gap", 0.1)
    resync_queue.add(RANK, "registered", 0.1)
    resync_queue.failed(RANK, 0.2)
    assert resync_queue.take(0.2) is not None
    resync_queue.failed(RANK, 0.2)
    assert resync_queue.take(0.2) is None, "it does not answer there either"


def test_a_worker_that_registers_again_starts_without_back_off() -> None:
    resync_queue = ResyncQueue()
    resync_queue.add(RANK, "gap", 0.0)
    resync_queue.take(0.0)
    resync_queue.failed(RANK, 0.0)
    resync_queue.add(RANK, "registered", 0.01)
    assert resync_queue.take(0.01) is not None


def test_whole_states_of_a_rank_are_spaced() -> None:
    resync_queue = ResyncQueue()
    assert resync_queue.may_fetch_state(RANK, 10.0)
    assert not resync_queue.may_fetch_state(RANK, 11.0)
    assert resync_queue.may_fetch_state(OTHER, 11.0)
    assert resync_queue.may_fetch_state(RANK, 12.1)


def test_false_alarms_wait_longer_each_time_and_do_not_delay_other_reasons() -> None:
    resync_queue = ResyncQueue(random.Random(1))
    now, pauses = 0.0, []
    for _ in range(12):
        resync_queue.add(RANK, "gap", now)
        assert resync_queue.take(now) == (RANK, "gap")
        pauses.append(resync_queue.unfounded(RANK, "gap", now))
        resync_queue.add(RANK, "gap", now)
        assert resync_queue.take(now + 0.99 * pauses[-1]) is None
        assert resync_queue.deferred(RANK, "gap", now + 0.99 * pauses[-1])
        assert resync_queue.backing_off() == 1
        now += pauses[-1]
    assert pauses[0] < 0.5
    assert 15 <= pauses[-1] <= 45
    assert resync_queue.false_alarms(RANK) == 12
    resync_queue.add(RANK, "incarnation", now)
    assert resync_queue.take(now) is not None


def test_a_reason_that_is_due_sooner_goes_before_one_that_backs_off() -> None:
    resync_queue = ResyncQueue(random.Random(1))
    resync_queue.add(RANK, "behind", 0.0)
    resync_queue.take(0.0)
    resync_queue.unfounded(RANK, "behind", 0.0)
    resync_queue.add(RANK, "behind", 0.01)
    resync_queue.add(RANK, "gap", 0.01)
    assert resync_queue.take(0.01) == (RANK, "gap")


def test_an_alarm_that_is_raised_again_during_the_call_backs_off_too() -> None:
    resync_queue = ResyncQueue(random.Random(1))
    resync_queue.add(RANK, "gap", 0.0)
    resync_queue.take(0.0)
    resync_queue.add(RANK, "gap", 0.01)
    pause = resync_queue.unfounded(RANK, "gap", 0.02)
    assert resync_queue.take(0.02) is None
    assert resync_queue.take(0.02 + pause) == (RANK, "gap")


def test_false_alarms_are_forgiven_after_a_quiet_time_once() -> None:
    resync_queue = ResyncQueue(random.Random(1))
    resync_queue.add(RANK, "gap", 0.0)
    resync_queue.take(0.0)
    pause = resync_queue.unfounded(RANK, "gap", 0.0)
    assert resync_queue.expire_false_alarms(pause + 59.0) == []
    assert resync_queue.expire_false_alarms(pause + 60.0) == [(RANK, "gap", 1)]
    assert resync_queue.expire_false_alarms(pause + 61.0) == []
    assert resync_queue.false_alarms(RANK) == 0


def test_drift_that_persists_is_tried_again_later_and_does_not_count_as_pending() -> None:
    resync_queue = ResyncQueue(random.Random(1))
    resync_queue.add(RANK, PERSISTENT_DRIFT, 0.0)
    assert (len(resync_queue), resync_queue.backing_off()) == (0, 1)
    assert resync_queue.take(14.0) is None
    assert resync_queue.take(46.0) == (RANK, PERSISTENT_DRIFT)


def test_a_state_that_was_fetched_a_moment_ago_is_awaited_without_counting_as_a_failure() -> None:
    resync_queue = ResyncQueue(random.Random(1))
    assert resync_queue.may_fetch_state(RANK, 10.0)
    resync_queue.add(RANK, "drift", 10.5)
    resync_queue.take(10.5)
    assert not resync_queue.may_fetch_state(RANK, 10.5)
    resync_queue.postponed(RANK, 10.5)
    assert not resync_queue.failing(RANK)
    assert resync_queue.take(11.9) is None
    assert resync_queue.take(12.0) == (RANK, "drift")


@given(
    st.lists(st.tuples(st.sampled_from(["gap", "behind", "incarnation", "drift"]), st.floats(0, 2)), max_size=200),
    st.integers(0, 1000),
)
def test_alarms_that_are_never_true_cost_a_bounded_number_of_questions(
    alarms: list[tuple[str, float]], seed: int
) -> None:
    resync_queue, now, requested = ResyncQueue(random.Random(seed)), 0.0, 0
    for reason, later in alarms:
        now += later
        resync_queue.add(RANK, reason, now)
        taken = resync_queue.take(now)
        if taken is not None:
            requested += 1
            resync_queue.unfounded(*taken, now)
    # Of each of four reasons: doubling pauses of 0.125 s at least up to one of 15 s, then one in 15 s.
    assert requested <= 4 * (9 + now / 15)
