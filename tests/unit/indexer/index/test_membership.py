from __future__ import annotations

from kvrouter.indexer.index.incarnations import Departures, NewIncarnation, new_incarnations

A, B, C = (1, 0), (1, 1), (2, 0)


def test_a_rank_that_is_registered_with_a_later_incarnation_starts_empty() -> None:
    assert new_incarnations({A: 5, B: 5, C: 5}, {A: 4, B: 5, C: 6}) == [NewIncarnation(A, 5)]


def test_a_registered_rank_that_the_index_lacks_begins_empty() -> None:
    assert new_incarnations({A: 5}, {}) == [NewIncarnation(A, 5)]


def test_a_rank_without_registration_goes_after_the_grace() -> None:
    departures = Departures(60)
    assert departures.expired([A, C], [C], now=100.0) == []
    assert departures.expired([A, C], [C], now=159.9) == []
    assert departures.expired([A, C], [C], now=160.0) == [A]


def test_a_lease_that_lapsed_and_came_back_costs_nothing() -> None:
    departures = Departures(60)
    departures.expired([A], [], now=0.0)
    departures.expired([A], [A], now=50.0)
    assert departures.expired([A], [], now=70.0) == []
    assert departures.expired([A], [], now=130.0) == [A]


def test_each_rank_has_its_own_grace_period_and_leaves_once() -> None:
    departures = Departures(10)
    departures.expired([A, B], [B], now=0.0)
    departures.expired([A, B], [], now=5.0)
    assert departures.expired([A, B], [], now=10.0) == [A]
    assert departures.expired([B], [], now=15.0) == [B]
    assert departures.expired([], [], now=16.0) == []
