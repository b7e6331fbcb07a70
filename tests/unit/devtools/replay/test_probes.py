from __future__ import annotations

import math

from kvrouter.devtools.replay.probes import bucket_counts, faulty_events, quantile_bound
from kvrouter.v1.indexer_pb2 import EventCounts
from prometheus_client import CollectorRegistry, Histogram, generate_latest


def test_buckets_of_several_labels_add_up() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("lateness_seconds", "doc", ["rank"], buckets=[0.1, 1.0], registry=registry)
    for rank, values in (("0", [0.05] * 98), ("1", [0.5, 7.0])):
        for value in values:
            histogram.labels(rank).observe(value)
    counts = bucket_counts(generate_latest(registry).decode(), "lateness_seconds")
    assert counts == {0.1: 98.0, 1.0: 99.0, math.inf: 100.0}
    assert quantile_bound(counts, 0.98) == 0.1
    assert quantile_bound(counts, 0.99) == 1.0
    assert quantile_bound(counts, 0.999) == math.inf


def test_what_was_not_observed_has_no_quantile() -> None:
    assert bucket_counts("", "lateness_seconds") == {}
    assert quantile_bound({}, 0.99) is None
    assert quantile_bound({1.0: 0.0, math.inf: 0.0}, 0.99) is None


def test_duplicates_are_no_fault_and_losses_are() -> None:
    assert faulty_events(EventCounts(applied=9, duplicates=3, fenced=1, unknown_removals=1)) == 0
    assert faulty_events(EventCounts(gaps=1, unknown_parents=2, rejected=3, unparsable=4)) == 10
