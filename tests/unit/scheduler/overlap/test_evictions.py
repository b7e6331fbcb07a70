"""Evictions by engines without events show in the cached tokens that they report."""

from __future__ import annotations

from kvrouter.scheduler.overlap.evictions import EvictionCheck
from kvrouter.scheduler.overlap.predictions import PredictionLimits

from ..harness import Parts, routing, selecting, view, worker

ONE, TWO = (1, 0), (2, 0)


def key(number: int) -> tuple[str, int, int]:
    return (f"r{number}", 0, 1)


def missed(check: EvictionCheck, number: int, last_use: float, cached_tokens: int | None = 0) -> float | None:
    """Runs a request by itself, whose prefix of 100 tokens was last used at a time."""
    check.begin(key(number), ONE, number, last_use, 100)
    return check.end(key(number), ONE, cached_tokens, 125)


def test_two_misses_in_a_row_show_an_eviction() -> None:
    check = EvictionCheck()
    assert missed(check, 10, 1.0) is None
    assert missed(check, 11, 2.0) == 2.0
    assert missed(check, 12, 3.0, 49) == 3.0
    assert missed(check, 13, 4.0, 50) is None
    assert missed(check, 14, 5.0) is None, "a hit came between"
    assert missed(check, 15, 6.0, None) is None, "unknown is neither"
    assert missed(check, 16, 7.0) == 7.0


def test_between_misses_only_what_was_used_less_recently_contradicts_them() -> None:
    check = EvictionCheck()
    assert missed(check, 20, 2.0) is None
    assert missed(check, 21, 4.0, 100) is None
    assert missed(check, 22, 3.0) == 3.0, "what was found is more recent"
    assert missed(check, 23, 3.0, 100) is None
    assert missed(check, 24, 1.0) is None, "what was found contradicts the misses before it"
    assert missed(check, 25, 2.0) == 2.0


def test_of_misses_in_a_row_the_one_after_most_tokens_shows_the_limit() -> None:
    check = EvictionCheck()
    for number, used in ((10, 0), (11, 300), (12, 900), (13, 100)):
        if missed(check, number, number - 9.0) is not None:
            check.limit(ONE, used, 60.0)
    assert check.most_tokens(ONE, 59.0) == 900, "the rank cleared its cache"
    assert check.most_tokens(ONE, 60.0) is None
    missed(check, 14, 5.0, cached_tokens=100)
    missed(check, 15, 6.0)
    assert missed(check, 16, 7.0) is not None
    check.limit(ONE, 200, 60.0)
    assert check.most_tokens(ONE, 59.0) == 200


def test_the_share_found_is_the_chance_of_reuse_while_evictions_show_a_full_cache() -> None:
    check = EvictionCheck()
    for number in range(500):
        missed(check, number, number - 1.0, 100)
    assert check.reuse_chance(ONE, 500.0) == 0
    check.limit(ONE, 900, 560.0)
    assert 0.79 < check.reuse_chance(ONE, 559.0) <= 0.8, "100 of 125 tokens"
    assert check.reuse_chance(ONE, 560.0) == check.reuse_chance(TWO, 0.0) == 0


def test_a_rank_that_finds_little_has_the_chance_of_the_others() -> None:
    # With a chance of its own it would be the cheapest to evict from, get every new prompt, and find ever less.
    check = EvictionCheck()
    for number in range(500):
        check.begin(key(number), TWO, number, number - 1.0, 100)
        check.end(key(number), TWO, 100, 125)
        missed(check, number, number - 1.0, 0)
    check.limit(ONE, 900, 560.0)
    check.limit(TWO, 900, 560.0)
    assert check.reuse_chance(ONE, 559.0) == check.reuse_chance(TWO, 559.0)
    assert 0.35 < check.reuse_chance(ONE, 559.0) < 0.45, "100 of 250 tokens"


def test_a_prefix_may_not_be_computed_while_another_request_with_it_runs() -> None:
    check = EvictionCheck()
    check.begin(key(10), ONE, 10.0, None, 0)
    for number in (11, 12, 13):
        assert missed(check, number, 10.0) is None
    assert missed(check, 14, 9.0) is None
    assert missed(check, 15, 9.0) == 9.0, "it was used before any that runs"
    assert check.end(key(10), ONE, 0, 125) is None


def test_requests_that_move_and_ranks_that_leave_show_nothing() -> None:
    check = EvictionCheck()
    missed(check, 10, 1.0)
    check.begin(key(11), ONE, 11.0, 2.0, 100)
    check.move(key(11))
    assert check.end(key(11), TWO, 0, 125) is None
    assert check.end(key(11), ONE, 0, 125) is None
    check.forget(ONE)
    assert missed(check, 12, 3.0) is None


async def test_what_a_rank_evicted_is_no_longer_predicted() -> None:
    parts = Parts(view(worker(1)), predicts=PredictionLimits())

    async def run(name: str, seed: int, cached_tokens: int) -> int:
        parts.now += 1
        selected = await parts.select(selecting(name, routing(6, seed=seed)))
        parts.booking_table.free((name, 0, 1), cached_tokens=cached_tokens)
        return selected.overlap_blocks

    for seed in range(1, 6):
        assert await run(f"first-{seed}", seed, 0) == 0
    assert await run("hit", 5, 80) == 5
    assert await run("miss", 2, 0) == 5
    assert await run("again", 3, 0) == 5
    assert await run("newer", 4, 80) == 5
    assert await run("older", 1, 0) == 0
    assert await run("missed once, and recorded since", 2, 80) == 5


def reuse_chances(parts: Parts) -> list[float]:
    """Returns the chances of reuse after the next regular look at them."""
    load = parts.pools.named("ns", "pool").booked_load
    assert parts.router.predictions is not None
    parts.router.predictions.expire()
    return load.reuse_chance().tolist()


async def test_for_a_while_a_rank_holds_no_more_than_when_it_evicted() -> None:
    parts = Parts(view(worker(1, total_blocks=None)), predicts=PredictionLimits(ttl_seconds=60.0))

    async def run(name: str, seed: int, cached_tokens: int = 0) -> int:
        parts.now += 1
        selected = await parts.select(selecting(name, routing(6, seed=seed, tail=1)))
        parts.booking_table.free((name, 0, 1), cached_tokens=cached_tokens)
        return selected.overlap_blocks

    for seed in range(6):
        await run(f"first-{seed}", seed)
    assert [await run(f"miss-{seed}", seed) for seed in (1, 2)] == [6, 6]
    # Of 3, 4, 5, 1 and 2, used since then, the next prompt evicts the oldest one.
    assert await run("new", 6) == 0
    assert reuse_chances(parts) == [0], "nothing was found yet"
    assert [await run(f"held-{seed}", seed, 96) for seed in (4, 5, 1, 2, 6)] == [6] * 5
    chances = reuse_chances(parts)
    assert chances[0] > 0
    parts.registered.register(view(worker(1, total_blocks=None), worker(2, total_blocks=None)))
    assert reuse_chances(parts) == [*chances, 0], "another worker has come"
    parts.registered.register(view(worker(1, total_blocks=None, incarnation=2)))
    assert reuse_chances(parts) == [0], "it has restarted"
    parts.registered.register(view(worker(1, total_blocks=None)))
    assert await run("evicted", 3) == 0
    assert await run("held, but not predicted", 4, 96) == 0
    assert [await run(f"more-{seed}", seed, 96) for seed in (5, 1)] == [0, 6], "one more since then"
    parts.now += 60
    assert reuse_chances(parts) == [0], "no longer limited"
    assert [await run(f"later-{seed}", seed) for seed in range(10, 20)] == [0] * 10
    assert await run("no longer limited", 10, 96) == 6


async def test_a_rank_s_first_request_may_still_compute_the_prefix_of_others() -> None:
    parts = Parts(view(worker(1)), predicts=PredictionLimits())
    await parts.select(selecting("first", routing(6, seed=1)))
    for name, seed in (("other", 2), ("second", 1), ("third", 1)):
        parts.now += 1
        await parts.select(selecting(name, routing(6, seed=seed)))
        parts.booking_table.free((name, 0, 1), cached_tokens=0)
    assert (await parts.select(selecting("again", routing(6, seed=2)))).overlap_blocks == 5
