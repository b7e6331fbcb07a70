import random

from hypothesis import given
from hypothesis import strategies as st
from kvrouter.indexer.index.repair import PERSISTENT_DRIFT
from kvrouter.indexer.resync.resync_queue import Wanted

RANK, OTHER = (1, 0), (2, 0)


def test_ranks_come_in_order_and_one_at_a_time() -> None:
    wanted = Wanted()
    wanted.add(RANK, "gap", 1.0)
    wanted.add(RANK, "drift", 1.1)
    wanted.add(OTHER, "registered", 2.0)
    assert wanted.take(1.5) == (RANK, "gap")
    assert wanted.take(1.5) is None
    wanted.add(RANK, "drift", 1.6)
    assert wanted.take(3.0) == (OTHER, "registered"), "a rank that is being repaired waits"
    wanted.done(RANK)
    assert wanted.take(3.0) == (RANK, "drift"), "what came meanwhile is not lost"


def test_a_rank_that_failed_while_it_was_wanted_again_waits_and_comes_once() -> None:
    wanted = Wanted(random.Random(1))
    wanted.add(RANK, "gap", 0.0)
    wanted.take(0.0)
    wanted.add(RANK, "drift", 0.1)
    wanted.failed(RANK, 0.2)
    assert wanted.take(0.2) is None
    assert wanted.take(10.0) == (RANK, "gap")
    assert wanted.take(10.0) is None
    assert len(wanted) == 1
    wanted.done(RANK)
    assert (len(wanted), wanted.pause(10.0)) == (0, None)


def test_failures_wait_longer_each_time_within_bounds() -> None:
    wanted = Wanted(random.Random(1))
    wanted.add(RANK, "gap", 0.0)
    now, pauses = 0.0, []
    for _ in range(12):
        assert wanted.take(now) == (RANK, "gap")
        wanted.failed(RANK, now)
        pause = wanted.pause(now)
        assert pause is not None
        pauses.append(pause)
        assert wanted.take(now + 0.99 * pause) is None
        now += pause
    assert pauses[0] < 0.5
    assert 15 <= pauses[-1] <= 45
    assert wanted.failures(RANK) == 12


def test_a_worker_that_registers_while_its_former_address_is_tried_does_not_wait_for_that() -> None:
    wanted = Wanted(random.Random(1))
    wanted.add(RANK, "gap", 0.0)
    wanted.take(0.0)
    wanted.add(RANK, "gap", 0.1)
    wanted.add(RANK, "registered", 0.1)
    wanted.failed(RANK, 0.2)
    assert wanted.take(0.2) is not None
    wanted.failed(RANK, 0.2)
    assert wanted.take(0.2) is None, "it does not answer there either"


def test_a_worker_that_registers_again_is_not_held_to_its_past() -> None:
    wanted = Wanted()
    wanted.add(RANK, "gap", 0.0)
    wanted.take(0.0)
    wanted.failed(RANK, 0.0)
    wanted.add(RANK, "registered", 0.01)
    assert wanted.take(0.01) is not None


def test_whole_states_of_a_rank_are_spaced() -> None:
    wanted = Wanted()
    assert wanted.may_fetch_state(RANK, 10.0)
    assert not wanted.may_fetch_state(RANK, 11.0)
    assert wanted.may_fetch_state(OTHER, 11.0)
    assert wanted.may_fetch_state(RANK, 12.1)


def test_false_alarms_wait_longer_each_time_and_do_not_delay_other_reasons() -> None:
    wanted = Wanted(random.Random(1))
    now, pauses = 0.0, []
    for _ in range(12):
        wanted.add(RANK, "gap", now)
        assert wanted.take(now) == (RANK, "gap")
        pauses.append(wanted.unfounded(RANK, "gap", now))
        wanted.add(RANK, "gap", now)
        assert wanted.take(now + 0.99 * pauses[-1]) is None
        assert wanted.deferred(RANK, "gap", now + 0.99 * pauses[-1])
        assert wanted.backing_off() == 1
        now += pauses[-1]
    assert pauses[0] < 0.5
    assert 15 <= pauses[-1] <= 45
    assert wanted.false_alarms(RANK) == 12
    wanted.add(RANK, "incarnation", now)
    assert wanted.take(now) is not None


def test_a_reason_that_is_due_sooner_goes_before_one_that_backs_off() -> None:
    wanted = Wanted(random.Random(1))
    wanted.add(RANK, "behind", 0.0)
    wanted.take(0.0)
    wanted.unfounded(RANK, "behind", 0.0)
    wanted.add(RANK, "behind", 0.01)
    wanted.add(RANK, "gap", 0.01)
    assert wanted.take(0.01) == (RANK, "gap")


def test_what_is_raised_again_while_the_worker_is_asked_backs_off_too() -> None:
    wanted = Wanted(random.Random(1))
    wanted.add(RANK, "gap", 0.0)
    wanted.take(0.0)
    wanted.add(RANK, "gap", 0.01)
    pause = wanted.unfounded(RANK, "gap", 0.02)
    assert wanted.take(0.02) is None
    assert wanted.take(0.02 + pause) == (RANK, "gap")


def test_false_alarms_are_forgiven_after_a_quiet_time_once() -> None:
    wanted = Wanted(random.Random(1))
    wanted.add(RANK, "gap", 0.0)
    wanted.take(0.0)
    pause = wanted.unfounded(RANK, "gap", 0.0)
    assert wanted.forgive(pause + 59.0) == []
    assert wanted.forgive(pause + 60.0) == [(RANK, "gap", 1)]
    assert wanted.forgive(pause + 61.0) == []
    assert wanted.false_alarms(RANK) == 0


def test_drift_that_persists_is_tried_again_later_and_does_not_count_as_pending() -> None:
    wanted = Wanted(random.Random(1))
    wanted.add(RANK, PERSISTENT_DRIFT, 0.0)
    assert (len(wanted), wanted.backing_off()) == (0, 1)
    assert wanted.take(14.0) is None
    assert wanted.take(46.0) == (RANK, PERSISTENT_DRIFT)


def test_a_state_that_was_fetched_a_moment_ago_is_awaited_without_counting_as_a_failure() -> None:
    wanted = Wanted(random.Random(1))
    assert wanted.may_fetch_state(RANK, 10.0)
    wanted.add(RANK, "drift", 10.5)
    wanted.take(10.5)
    assert not wanted.may_fetch_state(RANK, 10.5)
    wanted.postponed(RANK, 10.5)
    assert not wanted.failing(RANK)
    assert wanted.take(11.9) is None
    assert wanted.take(12.0) == (RANK, "drift")


@given(
    st.lists(st.tuples(st.sampled_from(["gap", "behind", "incarnation", "drift"]), st.floats(0, 2)), max_size=200),
    st.integers(0, 1000),
)
def test_alarms_that_are_never_true_cost_a_bounded_number_of_questions(
    alarms: list[tuple[str, float]], seed: int
) -> None:
    wanted, now, asked = Wanted(random.Random(seed)), 0.0, 0
    for reason, later in alarms:
        now += later
        wanted.add(RANK, reason, now)
        taken = wanted.take(now)
        if taken is not None:
            asked += 1
            wanted.unfounded(*taken, now)
    # Of each of four reasons: doubling pauses of 0.125 s at least up to one of 15 s, then one in 15 s.
    assert asked <= 4 * (9 + now / 15)
