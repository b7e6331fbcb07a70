from __future__ import annotations

from kvrouter.runtime.deadline import Deadline


def test_what_remains_is_never_negative() -> None:
    past = Deadline.after(-5)
    assert past.remaining() == 0.0
    assert past.expired
    ahead = Deadline.after(1000)
    assert 900 < (ahead.remaining() or 0) <= 1000
    assert not ahead.expired


def test_without_a_deadline_nothing_expires() -> None:
    assert Deadline.never().remaining() is None
    assert not Deadline.never().expired


def test_a_bound_only_ever_brings_a_deadline_nearer() -> None:
    soon, late = Deadline.after(10), Deadline.after(1000)
    assert soon.within(100) == soon
    assert (late.within(100).at or 0) < (late.at or 0)
    assert Deadline.never().within(100).at is not None


def test_a_default_applies_only_if_the_option_is_not_set() -> None:
    soon = Deadline.after(10)
    assert soon.or_after(1) == soon
    assert Deadline.never().or_after(1).at is not None
