"""A message is new, repeated, after a gap, or of a restarted engine."""

from __future__ import annotations

from hypothesis import given, strategies as st
from kvrouter.engines.relay.sequence import CHECK_BITS, SequenceTracker, Verdict, check_of, from_position, position_of


def tracker(*checks: int, replayed: bool = False) -> SequenceTracker:
    """A tracker that has seen messages with these checks."""
    following = SequenceTracker()
    for sequence, check in enumerate(checks):
        following.applied(sequence, check, replayed=replayed)
    return following


def test_the_next_message_is_applied() -> None:
    assert tracker().judge(0, 5) == Verdict.APPLY
    assert tracker(5, 6).judge(2, 7) == Verdict.APPLY
    assert tracker(5, 6).last_check == 6


def test_a_later_message_shows_a_gap() -> None:
    assert tracker().judge(1, 5) == Verdict.GAP
    assert tracker(5, 6).judge(9, 7) == Verdict.GAP


def test_an_earlier_message_with_the_same_content_is_repeated() -> None:
    assert tracker(5, 6, 7).judge(1, 6) == Verdict.DUPLICATE
    assert tracker(5, 6, 7).judge(2, 7) == Verdict.DUPLICATE


def test_an_earlier_message_with_other_content_shows_a_restart() -> None:
    assert tracker(5, 6, 7).judge(0, 8) == Verdict.RESTART
    assert tracker(5, 6, 7).judge(2, 8) == Verdict.RESTART


def test_what_waited_during_a_long_replay_is_repeated() -> None:
    following = tracker(*range(10_000), replayed=True)
    assert following.judge(3, 77) == Verdict.DUPLICATE
    following.applied(10_000, 1)
    assert following.judge(3, 77) == Verdict.RESTART


def test_a_restarted_tracker_begins_again() -> None:
    following = tracker(5, 6)
    following.restart()
    assert following.judge(0, 9) == Verdict.APPLY
    assert following.last_check is None


@given(st.integers(0, (1 << (63 - CHECK_BITS)) - 1), st.binary(max_size=50))
def test_a_position_has_sequence_and_check(sequence: int, payload: bytes) -> None:
    position = position_of(sequence, check_of(payload))
    assert 0 <= position < 1 << 63
    assert from_position(position) == (sequence, check_of(payload))
