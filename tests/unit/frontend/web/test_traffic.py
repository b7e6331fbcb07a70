"""What the page shows of a Frontend's requests."""

from __future__ import annotations

import pytest
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.web.traffic import Traffic, quantile
from prometheus_client import CollectorRegistry


def serve(metrics: FrontendMetrics, *, ttft: float, tokens: int = 100) -> None:
    model = metrics.models.of("m")
    model.ttft_seconds.observe(ttft)
    model.token_latency.observe(0.004 * tokens, tokens)
    model.output_tokens.value += tokens
    metrics.ended("m", "OK")


def test_rates_are_those_of_the_last_minute() -> None:
    metrics = FrontendMetrics(CollectorRegistry())
    traffic = Traffic(metrics)
    assert traffic.rates(0.0) is None
    metrics.ended("m", "UNAVAILABLE")
    metrics.http_errors.labels(503, "service_unavailable").inc()
    for _ in range(100):
        serve(metrics, ttft=40.0)
    for second in range(0, 100, 10):
        traffic.take(float(second))
    for _ in range(30):
        serve(metrics, ttft=0.15)
    metrics.ended("other", "RESOURCE_EXHAUSTED")
    metrics.http_errors.labels(429, "rate_limit_exceeded").inc()

    rates = traffic.rates(100.0)
    assert rates is not None
    assert rates.seconds == 70, "since the last sample that is a minute old"
    assert rates.requests_per_second == pytest.approx(31 / 70)
    assert rates.output_tokens_per_second == pytest.approx(3000 / 70)
    assert all(each is not None and 0.1 < each <= 0.2 for each in rates.ttft_seconds.values())
    assert all(each is not None and 0.002 < each <= 0.005 for each in rates.inter_token_seconds.values())
    assert rates.errors == [
        {"code": "RESOURCE_EXHAUSTED", "recent": 1, "total": 1},
        {"code": "UNAVAILABLE", "recent": 0, "total": 1},
    ]
    assert rates.http_errors == [
        {"error": "429 rate_limit_exceeded", "recent": 1, "total": 1},
        {"error": "503 service_unavailable", "recent": 0, "total": 1},
    ]
    assert (rates.ttft_samples, rates.inter_token_samples) == (30, 3000)


def test_quantiles_are_right_within_a_sixteenth_of_a_bucket() -> None:
    metrics = FrontendMetrics(CollectorRegistry())
    traffic = Traffic(metrics)
    traffic.take(0.0)
    for milliseconds in range(220, 310):  # total times of requests, in tenths
        serve(metrics, ttft=milliseconds / 10_000)
    rates = traffic.rates(10.0)
    assert rates is not None
    expected = {"p50": 0.0265, "p95": 0.0306, "p99": 0.0309}
    assert rates.ttft_seconds == pytest.approx(expected, abs=0.002)


def test_a_quiet_minute_has_no_latency() -> None:
    metrics = FrontendMetrics(CollectorRegistry())
    traffic = Traffic(metrics)
    traffic.take(0.0)
    rates = traffic.rates(10.0)
    assert rates is not None
    assert (rates.requests_per_second, set(rates.ttft_seconds.values()), rates.errors) == (0, {None}, [])


def test_quantiles_are_interpolated_within_buckets() -> None:
    assert quantile((1.0, 2.0), (50, 50, 0), 0.5) == 1.0
    assert quantile((1.0, 2.0), (50, 50, 0), 0.75) == 1.5
    assert quantile((1.0, 2.0), (0, 0, 3), 0.5) == 2.0, "no more is known of the last bucket"
    assert quantile((1.0, 2.0), (0, 0, 0), 0.5) is None
