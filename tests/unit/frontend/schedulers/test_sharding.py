"""When the requests of a component are sharded."""

from __future__ import annotations

from kvrouter.frontend.schedulers.sharding import FIRST_S, LONGEST_S, Sharding


def test_advice_holds_for_a_while() -> None:
    sharding = Sharding(None)
    assert not sharding.active(0.0)
    sharding.advise(10.0)
    sharding.advise(20.0)
    assert sharding.active(20.0 + FIRST_S - 0.1)
    assert not sharding.active(20.0 + FIRST_S)


def test_it_does_not_swing_to_and_fro() -> None:
    sharding, now, lengths = Sharding(None), 0.0, []
    for _ in range(9):
        sharding.advise(now)
        began = now
        while sharding.active(now):
            now += 1.0
        lengths.append(now - began)
    assert lengths[:4] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S]
    assert lengths[-1] == LONGEST_S
    now += 2 * LONGEST_S
    sharding.advise(now)
    assert not sharding.active(now + FIRST_S)


def test_an_operator_has_the_last_word() -> None:
    always, never = Sharding(True), Sharding(False)
    never.advise(0.0)
    assert (always.active(0.0), never.active(1.0)) == (True, False)
