"""An unchanged load is published again only before Schedulers forget it."""

from __future__ import annotations

from kvrouter.publisher.publishing.published_loads import SAME_LOAD_SECONDS, PublishedLoads
from kvrouter.scheduler.settings import SchedulerSettings
from kvrouter.v1.events_pb2 import LoadReport

IDLE, BUSY = LoadReport(), LoadReport(running_requests=1)


def test_only_a_changed_load_is_news() -> None:
    loads = PublishedLoads()
    assert loads.is_news(0, IDLE, 10.0)
    loads.published(0, IDLE, 10.0)
    assert not loads.is_news(0, LoadReport(), 11.0)
    assert loads.is_news(0, BUSY, 12.0)
    loads.published(0, BUSY, 12.0)
    assert loads.is_news(0, IDLE, 13.0)


def test_each_rank_has_a_load_of_its_own() -> None:
    loads = PublishedLoads()
    loads.published(0, IDLE, 10.0)
    assert loads.is_news(1, IDLE, 10.0)


def test_a_load_that_was_not_published_stays_news() -> None:
    loads = PublishedLoads()
    assert loads.is_news(0, IDLE, 10.0)
    assert loads.is_news(0, IDLE, 11.0)


def test_an_unchanged_load_is_repeated_before_it_stops_counting() -> None:
    loads = PublishedLoads()
    loads.published(0, IDLE, 10.0)
    assert loads.is_news(0, IDLE, 10.0 + SAME_LOAD_SECONDS)
    # A report is late by an interval of the worker at most.
    assert SchedulerSettings.model_fields["load_report_age_seconds"].default > SAME_LOAD_SECONDS + 1.0
