"""Ranks without recent evidence: which are silent or stale, and when they are compared."""

from __future__ import annotations

import itertools
import random

import pytest
from kvrouter.core import Rank
from kvrouter.indexer.index.known_ranks import Evidence, RankTally, SilenceWatch, age, exceeds, silence_limit

RANK: Rank = (1, 0)
LIMIT = 15.0


class Clocked:
    """A watch over one rank."""

    def __init__(self) -> None:
        self.evidence = Evidence()
        self.watch = SilenceWatch(random.Random(1))
        self.limits = {RANK: LIMIT}
        self.looks = 0

    def due(self, now: float) -> bool:
        def evidence(_: Rank) -> Evidence:
            self.looks += 1
            return self.evidence

        return self.watch.due(self.limits, evidence, now) == [RANK]


def test_the_limit_is_several_heartbeats_and_never_tiny() -> None:
    assert silence_limit(5000) == 15.0
    assert silence_limit(None) == 15.0, "a worker that does not say has the publisher's default"
    assert silence_limit(3_600_000) == 10_800.0, "rare heartbeats are no silence"
    assert silence_limit(100) == 3.0


def test_a_rank_that_is_heard_is_never_compared() -> None:
    clocked = Clocked()
    for now in range(0, 200, 10):
        clocked.evidence.heard_at = float(now)
        assert not clocked.due(now + 5.0)
    assert not clocked.watch.silent


def test_a_rank_is_compared_once_its_heartbeats_are_missing() -> None:
    clocked = Clocked()
    clocked.evidence.heard_at = 100.0
    assert not clocked.due(115.0)
    assert clocked.due(115.1)
    assert RANK in clocked.watch.silent
    assert not clocked.due(116.0), "it was asked a moment ago"
    clocked.evidence.heard_at = 117.0
    assert not clocked.due(118.0)
    assert not clocked.watch.silent


def test_ranks_are_looked_at_only_when_one_may_be_silent() -> None:
    clocked = Clocked()
    clocked.evidence.heard_at = 100.0
    for now in range(100, 116):
        assert not clocked.due(float(now))
    assert clocked.looks == 1
    clocked.limits = {RANK: LIMIT}
    assert not clocked.due(115.0)
    assert clocked.looks == 2


def test_a_rank_that_was_never_heard_has_the_same_time() -> None:
    clocked = Clocked()
    assert not clocked.due(0.0)
    assert not clocked.due(LIMIT)
    assert clocked.due(LIMIT + 0.1)


@pytest.mark.parametrize("news", [True, False])
def test_comparisons_go_on_in_step_with_news_and_become_rare_without(news: bool) -> None:
    clocked = Clocked()
    clocked.evidence.heard_at = 0.0
    times = []
    for tick in range(2000):
        now = float(tick)
        if clocked.due(now):
            times.append(now)
            clocked.evidence.compared_at = now + 0.1
            if news:
                clocked.evidence.news_at = now + 0.1
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    if news:
        assert max(pauses) <= 1.2 * LIMIT + 1
    else:
        assert max(pauses) > 4 * LIMIT
        assert max(pauses) <= 1.2 * 8 * LIMIT + 1, "and never rarer than that"


def test_the_newest_evidence_counts() -> None:
    evidence = RankTally().evidence
    assert evidence.at is None
    assert age(evidence.at, 5.0) is None
    assert not exceeds(evidence.at, 5.0, 1.0), "what was never compared is unverified, not stale"
    evidence.heard_at, evidence.compared_at = 3.0, 7.0
    assert evidence.at == 7.0
    assert age(evidence.at, 10.0) == 3.0
    assert exceeds(evidence.at, 10.0, 2.9)
