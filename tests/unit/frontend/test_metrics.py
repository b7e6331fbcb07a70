"""Metrics by model: which series there are, and what a histogram says."""

from __future__ import annotations

from kvrouter.frontend.metrics import MetricsByModel
from kvrouter.runtime.telemetry.metrics import MAX_MODELS, OTHER_MODELS
from prometheus_client import CollectorRegistry


def test_models_beyond_the_limit_share_one_series() -> None:
    registry = CollectorRegistry()
    metrics = MetricsByModel(registry)
    for number in range(MAX_MODELS + 50):
        metrics.of(f"model-{number}").output_tokens.value += 1
    samples = [
        sample
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "kvrouter_frontend_output_tokens_total"
    ]
    assert len(samples) == MAX_MODELS + 1
    by_model = {sample.labels["model"]: sample.value for sample in samples}
    assert by_model[OTHER_MODELS] == 50
    assert by_model["model-0"] == 1
    assert metrics.label("model-0") == "model-0"
    assert metrics.label("yet another") == OTHER_MODELS


def test_tokens_that_arrive_together_share_the_time_equally() -> None:
    registry = CollectorRegistry()
    latency = MetricsByModel(registry).of("llama").token_latency
    latency.observe(0.04, 4)
    latency.observe(0.03, 1)

    def of(suffix: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvrouter_frontend_inter_token_seconds_{suffix}", {"model": "llama"} | labels)

    assert of("count") == 5
    assert of("sum") == 0.07
    assert of("bucket", le="0.01") == 4
    assert of("bucket", le="0.02") == 4
    assert of("bucket", le="0.03") == 5
    assert of("bucket", le="+Inf") == 5
