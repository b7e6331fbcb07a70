"""A bound that tenants share."""

from __future__ import annotations

from hypothesis import given, strategies as st
from kvrouter.runtime.bounds import FREE, WANTING_S, FairBound


def fill(bound: FairBound, tenant: str, weight: float = 1.0) -> int:
    """Adds until the tenant is refused, and returns how much was added."""
    added = 0
    while bound.try_add(tenant, weight, 1):
        added += 1
    return added


def test_one_tenant_alone_may_use_everything() -> None:
    assert fill(FairBound(100), "a") == 100


def test_a_tenant_that_floods_leaves_room_for_another() -> None:
    bound = FairBound(100)
    bound.try_add("b", 1.0, 1)
    assert fill(bound, "a") == 100 * FREE - 1
    assert fill(bound, "b") == 100 * (1 - FREE)


def test_a_tenant_that_comes_late_gets_the_places_that_become_free_until_it_has_its_share() -> None:
    bound = FairBound(100)
    used = {"a": fill(bound, "a"), "b": 0}
    assert used["a"] == 100
    assert not bound.try_add("b", 1.0, 1)
    for _ in range(60):
        bound.remove("a", 1)
        used["a"] -= 1
        # The one that floods always comes first.
        used["a"] += fill(bound, "a")
        used["b"] += fill(bound, "b")
    assert used == {"a": 50, "b": 50}


def test_a_refused_tenant_that_does_not_come_back_is_forgotten() -> None:
    now = 0.0
    bound = FairBound(100, clock=lambda: now)
    fill(bound, "a")
    assert not bound.try_add("b", 1.0, 1)
    bound.remove("a", 1)
    assert not bound.try_add("a", 1.0, 1)
    now = WANTING_S + 1
    assert bound.try_add("a", 1.0, 1)


def test_shares_follow_weights() -> None:
    bound = FairBound(100)
    added = {"a": 0, "b": 0}
    while True:
        grown = [tenant for tenant, weight in (("a", 3.0), ("b", 1.0)) if bound.try_add(tenant, weight, 1)]
        for tenant in grown:
            added[tenant] += 1
        if not grown:
            break
    assert added["a"] > added["b"]
    assert sum(added.values()) <= 100


def test_an_amount_above_the_bound_fits_if_nothing_is_in_use() -> None:
    bound = FairBound(10)
    assert bound.try_add("a", 1.0, 50)
    assert not bound.try_add("b", 1.0, 1)
    bound.remove("a", 50)
    assert bound.try_add("b", 1.0, 1)


def test_no_limit_admits_all() -> None:
    bound = FairBound(0)
    assert all(bound.try_add("a", 1.0, 1e9) for _ in range(100))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40), st.booleans()), max_size=200))
def test_what_is_in_use_never_exceeds_the_bound_and_ends_at_zero(steps: list[tuple[str, int, bool]]) -> None:
    bound = FairBound(100)
    added: list[tuple[str, int]] = []
    for tenant, amount, removes in steps:
        if removes and added:
            bound.remove(*added.pop())
        elif bound.try_add(tenant, 1.0, amount):
            added.append((tenant, amount))
        assert bound.used == sum(amount for _, amount in added) <= 100
    for each in added:
        bound.remove(*each)
    assert bound.used == 0
