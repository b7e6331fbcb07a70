"""Limits of keys and tenants, in one process and over several."""

from __future__ import annotations

import pytest
from kvrouter.frontend.access.caller import Caller, RateLimits
from kvrouter.frontend.access.quotas import LimitReached, LimitTable, Quotas, shared_file
from kvrouter.frontend.access.refusals import RefusalReason


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def refused(quotas: Quotas, caller: Caller, tokens: int = 1) -> tuple[RefusalReason, int] | None:
    try:
        ran(quotas, caller, tokens)
    except LimitReached as reached:
        return reached.why, reached.info.retry_after_ms
    return None


def ran(quotas: Quotas, caller: Caller, tokens: int) -> None:
    """Runs a request of so many tokens, all of which it uses."""
    grant = quotas.admit(caller, 0)
    try:
        grant.add_sequence(tokens)
    finally:
        grant.end()


def test_requests_per_second_may_arrive_at_once_and_then_at_the_rate() -> None:
    clock = Clock()
    quotas = Quotas(LimitTable(clock=clock))
    caller = Caller("a", limits=RateLimits(requests_per_second=4.0))
    assert [refused(quotas, caller) for _ in range(4)] == [None] * 4
    assert refused(quotas, caller) == (RefusalReason.REQUEST_RATE, 250)
    clock.now += 0.25
    assert refused(quotas, caller) is None
    assert refused(quotas, caller) == (RefusalReason.REQUEST_RATE, 250)


def test_a_rate_below_one_admits_the_first_request() -> None:
    clock = Clock()
    quotas = Quotas(LimitTable(clock=clock))
    caller = Caller("a", limits=RateLimits(requests_per_second=0.1))
    assert refused(quotas, caller) is None
    assert refused(quotas, caller) == (RefusalReason.REQUEST_RATE, 10_000)


def test_tokens_are_charged_as_estimated_and_then_as_used() -> None:
    clock = Clock()
    quotas = Quotas(LimitTable(clock=clock))
    caller = Caller("a", limits=RateLimits(tokens_per_minute=600.0))
    first = quotas.admit(caller, 250)
    assert refused(quotas, caller, 360) == (RefusalReason.TOKEN_RATE, 1000)
    first.add_sequence(600)
    assert refused(quotas, caller, 10) == (RefusalReason.TOKEN_RATE, 1000)
    first.end_sequence(500)
    first.end()
    assert refused(quotas, caller, 500) is None
    assert refused(quotas, caller, 1) == (RefusalReason.TOKEN_RATE, 100)


def test_an_estimate_counts_until_the_tokens_are_known_or_the_request_ends() -> None:
    quotas = Quotas(LimitTable(clock=Clock()))
    caller = Caller("a", limits=RateLimits(tokens_per_minute=600.0))
    grant = quotas.admit(caller, 100)
    grant.estimate(200)
    assert refused(quotas, caller, 401) is not None
    grant.end()
    grant.end()
    assert refused(quotas, caller, 600) is None


def test_an_estimate_counts_as_half_of_a_minutes_tokens_at_most() -> None:
    quotas = Quotas(LimitTable(clock=Clock()))
    caller = Caller("a", limits=RateLimits(tokens_per_minute=600.0))
    running = [quotas.admit(caller, 1_000_000) for _ in range(2)]
    with pytest.raises(LimitReached):
        quotas.admit(caller, 1_000_000)
    running[0].add_sequence(300)
    with pytest.raises(LimitReached):
        running[1].add_sequence(301)


def test_each_further_sequence_is_a_request() -> None:
    quotas = Quotas(LimitTable(clock=Clock()))
    caller = Caller("a", limits=RateLimits(tokens_per_minute=60.0, concurrency=2))
    grant = quotas.admit(caller, 0)
    for _ in range(2):
        grant.add_sequence(10)
    with pytest.raises(LimitReached) as reached:
        grant.add_sequence(10)
    assert reached.value.why is RefusalReason.CONCURRENCY
    assert refused(quotas, caller) == (RefusalReason.CONCURRENCY, 1000)
    grant.end()
    assert refused(quotas, caller, 40) is None
    assert refused(quotas, caller, 1) is not None


def test_a_request_larger_than_a_minutes_tokens_passes_when_none_are_used() -> None:
    clock = Clock()
    quotas = Quotas(LimitTable(clock=clock))
    caller = Caller("a", limits=RateLimits(tokens_per_minute=60.0))
    with pytest.raises(LimitReached):
        quotas.admit(caller, 0).add_sequence(120, passes_empty=False)
    ran(quotas, caller, 120)
    assert refused(quotas, caller, 120) == (RefusalReason.TOKEN_RATE, 60_000)
    clock.now += 120
    assert refused(quotas, caller, 120) is None


def test_running_requests_are_limited_and_end() -> None:
    quotas = Quotas(LimitTable())
    caller = Caller("a", limits=RateLimits(concurrency=2))
    grants = [quotas.admit(caller, 1) for _ in range(2)]
    assert refused(quotas, caller) == (RefusalReason.CONCURRENCY, 1000)
    grants[0].end()
    assert refused(quotas, caller) is None


def test_a_limit_of_a_tenant_holds_for_all_its_keys_and_for_no_other() -> None:
    quotas = Quotas(LimitTable())
    limits = RateLimits(concurrency=1)
    running = quotas.admit(Caller("a", tenant="t", tenant_limits=limits), 1)
    assert refused(quotas, Caller("b", tenant="t", tenant_limits=limits)) is not None
    assert refused(quotas, Caller("c", tenant="u", tenant_limits=limits)) is None
    running.end()
    assert refused(quotas, Caller("b", tenant="t", tenant_limits=limits)) is None


def test_a_refused_request_counts_nowhere() -> None:
    quotas = Quotas(LimitTable(clock=Clock()))
    caller = Caller(
        "a", limits=RateLimits(requests_per_second=1.0), tenant="t", tenant_limits=RateLimits(concurrency=1)
    )
    running = quotas.admit(Caller("b", tenant="t", tenant_limits=caller.tenant_limits), 1)
    assert refused(quotas, caller) == (RefusalReason.CONCURRENCY, 1000)
    running.end()
    assert refused(quotas, caller) is None


def test_limits_hold_over_all_processes_together() -> None:
    with shared_file(2) as file:
        quotas = [Quotas(LimitTable(file.fileno(), number, 2)) for number in range(2)]
        caller = Caller("a", limits=RateLimits(concurrency=3))
        for number in (0, 1, 0):
            quotas[number].admit(caller, 1)
        assert refused(quotas[1], caller) is not None
        assert refused(quotas[0], caller) is not None
        # A process that died and is replaced runs nothing any more.
        replaced = Quotas(LimitTable(file.fileno(), 0, 2))
        for _ in range(2):
            replaced.admit(caller, 1)
        with pytest.raises(LimitReached):
            replaced.admit(caller, 1)
        rate = Caller("r", limits=RateLimits(requests_per_second=1e-3))
        assert refused(quotas[1], rate) is None
        assert refused(replaced, rate) is not None


def test_a_caller_without_limits_touches_no_counter() -> None:
    quotas = Quotas(LimitTable())
    assert quotas.admit(Caller("a"), 1) is quotas.admit(Caller("b"), 1)
