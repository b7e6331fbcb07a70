import random

from kvrouter.indexer.wanted import Wanted

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
