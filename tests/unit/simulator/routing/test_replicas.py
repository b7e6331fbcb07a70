"""Replicas of the Scheduler: what one knows of another, when, and what becomes of load when it does not."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, strategies as st
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.simulator.results.outcome import Outcome, RunStatistics, run_statistics
from kvrouter.simulator.routing.replicas import HEARTBEAT_S, Link, Sync
from kvrouter.simulator.routing.router import Announcement
from kvrouter.simulator.simulation import Setting, simulate
from kvrouter.simulator.workloads.workload import Prompts, Request, Workload


def announcement(number: int) -> Announcement:
    return Announcement((str(number), 0, 0), 1)


def known(link: Link, now: float) -> list[tuple[float, str]]:
    return [(at, message.key[0]) for at, message in link.known_by(now)]


def test_a_message_is_known_after_the_lag_and_not_before() -> None:
    link = Link(Sync(lag_s=0.5))
    link.announce(announcement(1), 1.0, is_lost=False)
    assert known(link, 1.4) == []
    assert known(link, 1.6) == [(1.5, "1")]


def test_a_lost_message_is_known_a_repair_after_the_next_one_came() -> None:
    link = Link(Sync(lag_s=0.01, repair_s=0.1))
    link.announce(announcement(1), 1.0, is_lost=True)
    link.announce(announcement(2), 1.5, is_lost=False)
    link.announce(announcement(3), 1.55, is_lost=False)  # held back until the state is there
    link.announce(announcement(4), 1.7, is_lost=False)
    times, names = zip(*known(link, 2.0), strict=True)
    assert names == ("1", "2", "3", "4")
    assert times == pytest.approx((1.61, 1.61, 1.61, 1.71))


def test_without_a_next_message_a_heartbeat_shows_the_gap() -> None:
    link = Link(Sync(lag_s=0.0, repair_s=0.1))
    link.announce(announcement(1), 1.0, is_lost=True)
    assert known(link, 1.0 + HEARTBEAT_S) == []
    assert known(link, 1.2 + HEARTBEAT_S) == [(pytest.approx(1.1 + HEARTBEAT_S), "1")]


@given(
    st.lists(st.tuples(st.floats(0, 2), st.booleans()), max_size=30),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
)
def test_all_is_known_in_order_and_in_time(sent: list[tuple[float, bool]], lag: float, repair: float) -> None:
    link = Link(Sync(lag_s=lag, repair_s=repair))
    now, at = 0.0, []
    found: list[tuple[float, str]] = []
    for number, (pause, is_lost) in enumerate(sent):
        now += pause
        at.append(now)
        found += known(link, now)
        link.announce(announcement(number), now, is_lost=is_lost)
    found += known(link, now + 100)
    assert [name for _, name in found] == [str(number) for number in range(len(sent))]
    assert all(one[0] <= other[0] for one, other in pairwise(found))
    for (known_at, _), sent_at in zip(found, at, strict=True):
        assert sent_at + lag <= known_at + 1e-9
        assert known_at <= sent_at + lag + HEARTBEAT_S + repair + 1e-9
    if not any(is_lost for _, is_lost in sent):
        assert [known_at for known_at, _ in found] == [sent_at + lag for sent_at in at]


ENGINES = [EngineConfig(num_blocks=4000, hash_seed=number) for number in range(8)]
BURST = 16


def bursts(apart_s: float) -> Workload:
    """Sixteen requests at a time, of unlike lengths, that share nothing. ``apart_s``: between those of a burst."""
    rng = Random(3)
    requests = [
        Request(3.0 * burst + apart_s * place, rng.choice([500, 2000, 6000]), 60, (BURST * burst + place,))
        for burst in range(20)
        for place in range(BURST)
    ]
    return Workload("bursts", requests, 6000)


AT_ONCE, APART = bursts(0.0), bursts(0.005)
PROMPTS = Prompts(AT_ONCE, 16)  # those of both


def run(
    schedulers: int,
    sync: Sync | None = None,
    mode: str = "kv",
    seed: int = 0,
    workload: Workload = AT_ONCE,
    sharded: bool = False,
) -> Outcome:
    setting = Setting(ENGINES, RoutingOptions(mode), seed, schedulers=schedulers, sync=sync, sharded=sharded)
    return simulate(workload, setting, PROMPTS)


def summed(outcome: Outcome) -> RunStatistics:
    return run_statistics(outcome, slo_ttft_s=2.0, slo_itl_s=0.05)


@pytest.mark.parametrize("sync", [None, Sync(0.005), Sync(0.05, loss=0.3)])
@pytest.mark.parametrize("mode", ["kv", "forecast"])
def test_every_request_is_served_and_runs_repeat(mode: str, sync: Sync | None) -> None:
    once = run(3, sync, mode)
    assert all(served.first_at > served.sent_at for served in once.served)
    assert once == run(3, sync, mode)


def test_replicas_that_know_nothing_of_each_other_meet_on_the_same_engines() -> None:
    one, two, four = (summed(run(count)) for count in (1, 2, 4))
    assert 1.1 * one.longest_prefill_tokens < two.longest_prefill_tokens < four.longest_prefill_tokens
    assert 1.1 * one.ttft_ms.p99 < two.ttft_ms.p99 < four.ttft_ms.p99


def test_a_sync_without_lag_is_as_good_as_one_scheduler() -> None:
    one, synced = summed(run(1)), summed(run(4, Sync()))
    assert synced.longest_prefill_tokens == pytest.approx(one.longest_prefill_tokens, rel=0.02)
    assert synced.ttft_ms.p99 == pytest.approx(one.ttft_ms.p99, rel=0.02)


def test_simultaneous_announcements_are_not_known_with_any_lag() -> None:
    assert run(4, Sync(0.001)).served == run(4).served


def test_announcements_are_known_after_the_lag_unless_they_are_lost() -> None:
    one, synced, lossy, apart = (
        summed(run(count, sync, workload=APART))
        for count, sync in ((1, None), (4, Sync(0.001)), (4, Sync(0.001, loss=0.3, repair_s=0.02)), (4, None))
    )
    assert synced.block_peak == pytest.approx(one.block_peak, rel=0.03)
    assert synced.ttft_ms.mean == pytest.approx(one.ttft_ms.mean, rel=0.03)
    assert 1.04 * one.block_peak < lossy.block_peak < apart.block_peak
    assert 1.04 * one.ttft_ms.mean < lossy.ttft_ms.mean < apart.ttft_ms.mean


def test_sharded_requests_of_one_prompt_meet_at_one_replica() -> None:
    """Of caches nothing is known here: only who booked a prompt before knows where it is."""
    requests = [Request(0.2 * number, 6000, 600, (number % 8,)) for number in range(32)]
    workload = Workload("again", requests, 6000)

    def reuse(schedulers: int, *, sharded: bool) -> float:
        options = RoutingOptions("forecast")
        setting = Setting(ENGINES, options, event_lag_s=1e6, schedulers=schedulers, sharded=sharded)
        return summed(simulate(workload, setting, Prompts(workload, 16))).reuse

    one, sharded, random = reuse(1, sharded=False), reuse(4, sharded=True), reuse(4, sharded=False)
    assert sharded == pytest.approx(one, abs=0.1)
    assert random < one - 0.2
