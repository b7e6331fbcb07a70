"""Metrics of a Scheduler."""

from __future__ import annotations

from kvrouter.runtime.telemetry.metrics import MAX_MODELS, OTHER_MODELS
from kvrouter.scheduler.metrics import ReachableTokens, SchedulerMetrics
from prometheus_client import CollectorRegistry


def test_models_without_end_share_one_series() -> None:
    metrics = SchedulerMetrics(CollectorRegistry())
    for number in range(MAX_MODELS + 50):
        metrics.audit(f"m-{number}", 2, 1)
        metrics.count_cached(f"m-{number}", ReachableTokens(1, 2, 3))
    (family,) = metrics.predicted_blocks.collect()
    by_model = {each.labels["model"]: each.value for each in family.samples if each.name.endswith("_total")}
    assert len(by_model) == MAX_MODELS + 1
    assert (by_model["m-0"], by_model[OTHER_MODELS]) == (2, 100)
    (cached,) = metrics.cached_tokens.collect()
    others = [each for each in cached.samples if each.labels["model"] == OTHER_MODELS]
    assert {each.labels["rank"]: each.value for each in others if each.name.endswith("_total")} == {
        "chosen": 50,
        "eligible": 100,
        "any": 150,
    }
