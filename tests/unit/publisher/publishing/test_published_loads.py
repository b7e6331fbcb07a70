"""An unchanged load is published again only before Schedulers forget it."""

from __future__ import annotations

from kvrouter.publisher.publishing.published_loads import SAME_LOAD_SECONDS, PublishedLoads
from kvrouter.scheduler.settings import SchedulerSettings
from kvrouter.v1.common_pb2 import Rank
from kvrouter.v1.events_pb2 import LoadReport


def report(sequence: int, *, dp_rank: int = 0, running: int = 0) -> LoadReport:
    rank = Rank(worker_id=1, dp_rank=dp_rank)
    return LoadReport(rank=rank, sequence=sequence, measured_unix_ns=sequence, running_requests=running)


def test_only_a_changed_load_is_news() -> None:
    loads = PublishedLoads()
    assert loads.is_news(report(1), 10.0)
    loads.published(report(1), 10.0)
    assert not loads.is_news(report(2), 11.0)
    assert loads.is_news(report(3, running=1), 12.0)
    loads.published(report(3, running=1), 12.0)
    assert loads.is_news(report(4), 13.0)


def test_each_rank_has_a_load_of_its_own() -> None:
    loads = PublishedLoads()
    loads.published(report(1), 10.0)
    assert loads.is_news(report(1, dp_rank=1), 10.0)


def test_a_load_that_was_not_published_stays_news() -> None:
    loads = PublishedLoads()
    assert loads.is_news(report(1), 10.0)
    assert loads.is_news(report(2), 11.0)


def test_an_unchanged_load_is_repeated_before_it_stops_counting() -> None:
    loads = PublishedLoads()
    loads.published(report(1), 10.0)
    assert loads.is_news(report(2), 10.0 + SAME_LOAD_SECONDS)
    # A report is late by an interval of the worker at most.
    assert SchedulerSettings.model_fields["load_report_age_seconds"].default > SAME_LOAD_SECONDS + 1.0
