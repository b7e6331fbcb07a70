"""The budget of a peer that moves nothing forward."""

from __future__ import annotations

from kvrouter.net.budgets import FloodBudget


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_peer_that_keeps_below_the_rate_may_go_on_for_ever() -> None:
    clock = Clock()
    budget = FloodBudget(10, 5.0, clock)
    for _ in range(1_000):
        assert budget.spend()
        clock.now += 0.51


def test_a_peer_above_the_rate_is_flooding_until_the_interval_is_over() -> None:
    clock = Clock()
    budget = FloodBudget(10, 5.0, clock)
    assert all(budget.spend() for _ in range(10))
    assert not budget.spend()
    clock.now += 5.0
    assert budget.spend(10)
    assert not budget.spend()


def test_more_than_the_budget_at_once_is_a_flood() -> None:
    clock = Clock()
    budget = FloodBudget(10, 5.0, clock)
    clock.now += 60.0
    assert not budget.spend(11)


def test_progress_restores_the_budget_and_saves_nothing_up() -> None:
    budget = FloodBudget(10, 5.0, Clock())
    for _ in range(100):
        assert budget.spend(2)
        budget.earn(2)
    budget.earn(1_000)
    assert not budget.spend(11)


def test_items_that_restore_more_than_they_take_save_nothing_up() -> None:
    budget = FloodBudget(10, 5.0, Clock())
    assert budget.spend(8)
    assert budget.spend(-3)
    assert budget.spend(5)
    assert budget.spend(-1_000)
    assert not budget.spend(11)
