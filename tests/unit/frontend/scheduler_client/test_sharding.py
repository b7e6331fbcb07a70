"""When a component is spread."""

from __future__ import annotations

from kvrouter.frontend.scheduler_client.sharding import FIRST_S, LONGEST_S, Spreading


def test_advice_holds_for_a_while() -> None:
    spreading = Spreading(None)
    assert not spreading.active(0.0)
    spreading.advise(10.0)
    spreading.advise(20.0)
    assert spreading.active(20.0 + FIRST_S - 0.1)
    assert not spreading.active(20.0 + FIRST_S)


def test_it_does_not_swing_to_and_fro() -> None:
    spreading, now, lengths = Spreading(None), 0.0, []
    for _ in range(9):
        spreading.advise(now)
        began = now
        while spreading.active(now):
            now += 1.0
        lengths.append(now - began)
    assert lengths[:4] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S]
    assert lengths[-1] == LONGEST_S
    now += 2 * LONGEST_S
    spreading.advise(now)
    assert not spreading.active(now + FIRST_S)


def test_an_operator_has_the_last_word() -> None:
    always, never = Spreading(True), Spreading(False)
    never.advise(0.0)
    assert (always.active(0.0), never.active(1.0)) == (True, False)
