"""Metrics of several processes as one exposition."""

from __future__ import annotations

from kvrouter.frontend.processes.parent import MergedMetrics
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families


class Process:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("requests", "Requests.", ["code"], registry=self.registry)
        self.running = Gauge("running", "Running.", registry=self.registry)
        self.seconds = Histogram("seconds", "Seconds.", buckets=(1, 2), registry=self.registry)

    def text(self) -> str:
        return generate_latest(self.registry).decode()


def samples(merged: MergedMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(merged.exposition().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_counters_and_histograms_are_summed_and_gauges_are_kept_apart() -> None:
    merged, first, second = MergedMetrics(), Process(), Process()
    first.requests.labels("OK").inc(3)
    second.requests.labels("OK").inc(4)
    second.requests.labels("NOT_FOUND").inc()
    first.running.set(5)
    second.running.set(6)
    for seconds in (0.5, 1.5):
        first.seconds.observe(seconds)
        second.seconds.observe(seconds)
    merged.report("0", first.text())
    merged.report("1", second.text())
    found = samples(merged)
    assert found["requests_total", (("code", "OK"),)] == 7
    assert found["requests_total", (("code", "NOT_FOUND"),)] == 1
    assert found["running", (("process", "0"),)] == 5
    assert found["running", (("process", "1"),)] == 6
    assert found["seconds_count", ()] == 4
    assert found["seconds_sum", ()] == 4
    assert found["seconds_bucket", (("le", "1.0"),)] == 2
    assert found["seconds_bucket", (("le", "+Inf"),)] == 4


def test_a_report_replaces_the_one_before() -> None:
    merged, process = MergedMetrics(), Process()
    process.requests.labels("OK").inc()
    merged.report("0", process.text())
    process.requests.labels("OK").inc()
    merged.report("0", process.text())
    assert samples(merged)["requests_total", (("code", "OK"),)] == 2


def test_what_a_dead_process_counted_is_kept_and_its_gauges_are_not() -> None:
    merged, dead, successor = MergedMetrics(), Process(), Process()
    dead.requests.labels("OK").inc(3)
    dead.running.set(5)
    merged.report("0", dead.text())
    merged.end("0")
    merged.end("0")
    assert samples(merged)["requests_total", (("code", "OK"),)] == 3
    assert ("running", (("process", "0"),)) not in samples(merged)
    successor.requests.labels("OK").inc()
    merged.report("0", successor.text())
    assert samples(merged)["requests_total", (("code", "OK"),)] == 4
