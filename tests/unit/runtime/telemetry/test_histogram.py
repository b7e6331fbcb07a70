"""Histograms of the event loop say what those of the client library say."""

from __future__ import annotations

from hypothesis import given, strategies as st
from kvrouter.runtime.telemetry.histogram import LoopHistogram
from prometheus_client import CollectorRegistry, Histogram, generate_latest

_BUCKETS = (1e-05, 0.5, 1, 2.5)


def _lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created{" not in line]


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([0.0, 1e-05, 0.3, 0.5, 1.0, 2.0, 2.5, 7.0]))))
def test_it_exposes_what_a_histogram_of_the_client_library_exposes(observed: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = LoopHistogram("x_seconds", "A time.", ["model"], buckets=_BUCKETS, registry=ours)
    reference = Histogram("x_seconds", "A time.", ["model"], buckets=_BUCKETS, registry=theirs)
    for model, value in observed:
        histogram.of(model).observe(value)
        reference.labels(model).observe(value)
    assert _lines(ours) == _lines(theirs)
    if observed:
        assert (ours.get_sample_value("x_seconds_created", {"model": observed[0][0]}) or 0) > 0


def test_it_has_one_series_without_labels_from_the_start() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    LoopHistogram("x_seconds", "A time.", buckets=_BUCKETS, registry=ours).of()
    Histogram("x_seconds", "A time.", buckets=_BUCKETS, registry=theirs)
    assert _lines(ours)[:8] == _lines(theirs)[:8]


def test_equal_observations_are_added_at_once() -> None:
    registry = CollectorRegistry()
    LoopHistogram("x_seconds", "A time.", buckets=_BUCKETS, registry=registry).of().observe(2.0, 4)
    assert registry.get_sample_value("x_seconds_bucket", {"le": "0.5"}) == 4
    assert registry.get_sample_value("x_seconds_count") == 4
    assert registry.get_sample_value("x_seconds_sum") == 2.0


def test_parts_of_buckets_are_counted_here_and_not_exported() -> None:
    registry = CollectorRegistry()
    histogram = LoopHistogram("x_seconds", "A time.", buckets=(1.0, 3.0), registry=registry, parts=2)
    for seconds in (0.4, 0.6, 1.5, 2.5, 9.0):
        histogram.of().observe(seconds)
    assert histogram.bounds == (0.5, 1.0, 2.0, 3.0)
    assert histogram.counts() == (1, 1, 1, 1, 1)
    exported = {bound: registry.get_sample_value("x_seconds_bucket", {"le": bound}) for bound in ("1.0", "3.0", "+Inf")}
    assert exported == {"1.0": 2, "3.0": 4, "+Inf": 5}
    assert registry.get_sample_value("x_seconds_bucket", {"le": "0.5"}) is None
