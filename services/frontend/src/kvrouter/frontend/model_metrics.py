"""Latency and tokens of requests by model."""

from __future__ import annotations

from functools import partial

from kvrouter.runtime.telemetry.histogram import LoopHistogram
from kvrouter.runtime.telemetry.metrics import model_label
from prometheus_client import CollectorRegistry, Counter

_REQUEST_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_PARTS = 16
"""Parts of a bucket, so the web page's quantiles are right within a few milliseconds."""
_TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)


class ModelMetrics:
    """The metrics of one model, looked up once for each request."""

    def __init__(self, metrics: MetricsByModel, model: str) -> None:
        self.ttft_seconds = metrics.ttft_seconds.of(model)
        self.migration_seconds = metrics.migration_seconds.of(model)
        self.request_seconds = metrics.request_seconds.of(model)
        self.token_latency = metrics.token_latency.of(model)
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.predicted_cached_tokens = metrics.predicted_cached_tokens.labels(model)
        self.cached_tokens = metrics.cached_tokens.labels(model)
        self.output_tokens = metrics.output_tokens.labels(model)


class MetricsByModel:
    """Histograms and counters with a label ``model``, of at most ``MAX_MODELS`` models."""

    def __init__(self, registry: CollectorRegistry) -> None:
        histogram = partial(LoopHistogram, labels=["model"], registry=registry)
        counter = partial(Counter, labelnames=["model"], registry=registry)
        self.ttft_seconds = histogram(
            "kvrouter_frontend_ttft_seconds",
            "Time from the arrival of a request to its first token.",
            buckets=_TTFT_BUCKETS,
            parts=_PARTS,
        )
        self.request_seconds = histogram(
            "kvrouter_frontend_request_seconds",
            "Time from the arrival of a request to the end of its output, of requests that succeeded.",
            buckets=_REQUEST_BUCKETS,
        )
        self.migration_seconds = histogram(
            "kvrouter_frontend_migration_seconds",
            "Time from the failure of a worker to the next token of a request that continues on another one.",
            buckets=_TTFT_BUCKETS,
        )
        self.token_latency = histogram(
            "kvrouter_frontend_inter_token_seconds",
            "Time between two tokens of a response; tokens that arrive together share it equally.",
            buckets=_TOKEN_BUCKETS,
            parts=_PARTS,
        )
        self.prompt_tokens = counter(
            "kvrouter_frontend_prompt_tokens", "Prompt tokens of requests whose worker reported its cached tokens."
        )
        self.predicted_cached_tokens = counter(
            "kvrouter_frontend_predicted_cached_tokens",
            "Prompt tokens of the same requests that the Scheduler expected in the cache of the chosen worker.",
        )
        self.cached_tokens = counter(
            "kvrouter_frontend_cached_tokens",
            "Prompt tokens of the same requests that were found in a cache and not computed, as reported by the"
            " workers.",
        )
        self.output_tokens = counter("kvrouter_frontend_output_tokens", "Output tokens sent to clients.")
        self._models: dict[str, ModelMetrics] = {}

    def label(self, model: str) -> str:
        """Returns the label of a served model: its name, or ``OTHER_MODELS`` if there are too many."""
        return model_label(model, self._models)

    def of(self, model: str) -> ModelMetrics:
        """Returns the metrics of a served model."""
        found = self._models.get(model)
        if found is None:
            label = self.label(model)
            found = self._models.get(label) or ModelMetrics(self, label)
            self._models[label] = found
        return found
