"""Metrics of the Frontend, and those of each model."""

from __future__ import annotations

from functools import partial

from kvrouter.runtime.telemetry.counter import LoopCounter
from kvrouter.runtime.telemetry.histogram import LoopHistogram
from kvrouter.runtime.telemetry.metrics import model_label
from kvrouter.v1.texts import LOWER_TIER_NAMES
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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
        self.prompt_tokens = metrics.prompt_tokens.of(model)
        self.predicted_cached_tokens = metrics.predicted_cached_tokens.of(model)
        self.cached_tokens = metrics.cached_tokens.of(model)
        self.lower_cached_tokens = {tier: counter.of(model) for tier, counter in metrics.lower_cached_tokens.items()}
        """By name of the tier."""
        self.output_tokens = metrics.output_tokens.of(model)

    def found_cached(self, cached_tokens: int, predicted: int, prompt_tokens: int) -> None:
        """Counts a prompt, its cached tokens as the worker reported them, and those that were predicted."""
        self.cached_tokens.value += cached_tokens
        self.predicted_cached_tokens.value += predicted
        self.prompt_tokens.value += prompt_tokens


class MetricsByModel:
    """Histograms and counters with a label ``model``, of at most ``MAX_MODELS`` models."""

    def __init__(self, registry: CollectorRegistry) -> None:
        histogram = partial(LoopHistogram, labels=["model"], registry=registry)
        counter = partial(LoopCounter, labels=["model"], registry=registry)
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
        self.lower_cached_tokens = {
            tier: counter(
                f"kvrouter_frontend_{tier}_cached_tokens", f"Those of the cached tokens that came from {where}."
            )
            for tier, where in zip(LOWER_TIER_NAMES, ("host memory", "disk", "shared storage"), strict=True)
        }
        self.output_tokens = counter("kvrouter_frontend_output_tokens", "Output tokens sent to clients.")
        self.labelled: dict[str, ModelMetrics] = {}
        """Metrics by label."""

    def label(self, model: str) -> str:
        """Returns the label of a served model: its name, or ``OTHER_MODELS`` if there are too many."""
        return model_label(model, self.labelled)

    def of(self, model: str) -> ModelMetrics:
        """Returns the metrics of a served model."""
        found = self.labelled.get(model)
        if found is None:
            label = self.label(model)
            found = self.labelled.get(label) or ModelMetrics(self, label)
            self.labelled[label] = found
        return found


_ADDED_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5)
_PREFILL_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class FrontendMetrics:
    """Counters, gauges and histograms of one Frontend."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.requests = LoopCounter(
            "kvrouter_frontend_requests", "Requests by outcome, a gRPC code.", ["model", "code"], registry=registry
        )
        self.http_errors = counter(
            "kvrouter_frontend_http_errors",
            "Failed HTTP responses by status and by the code of the error, empty if an engine sent the response.",
            ["status", "code"],
        )
        self.in_flight = gauge("kvrouter_frontend_requests_in_flight", "Running requests.")
        self.ignored_sessions = counter(
            "kvrouter_frontend_ignored_sessions",
            "Session ids that were ignored because they are longer than 256 bytes or not plain text, by source.",
            ["source"],
        )
        self.retries = counter("kvrouter_frontend_retries", "Attempts without output that failed and were retried.")
        self.migrations = counter(
            "kvrouter_frontend_migrations",
            "Requests that continued on another worker after output, by cause: as for worker failures, or drained.",
            ["cause"],
        )
        self.worker_failures = counter(
            "kvrouter_frontend_worker_failures",
            "Attempts that a worker failed, by cause: a gRPC code, malformed, unfinished, error, silent or stalled.",
            ["cause"],
        )
        self.worker_deaths = counter(
            "kvrouter_frontend_worker_deaths",
            "Deaths of workers with a request in flight that this process has seen, for each prompt.",
        )
        self.poison_prompts = counter(
            "kvrouter_frontend_poison_prompts",
            "Requests that were refused or ended because two workers died while they ran their prompt.",
        )
        self.output_overruns = counter(
            "kvrouter_frontend_output_overruns", "Responses ended at max_tokens because the worker sent more."
        )
        self.suspected_workers = gauge(
            "kvrouter_frontend_suspected_workers", "Workers that do not answer liveness probes."
        )
        self.stalled_workers = gauge(
            "kvrouter_frontend_stalled_workers",
            "Workers that answer liveness probes but generate nothing, or far less than before.",
        )
        self.backed_off_workers = gauge(
            "kvrouter_frontend_backed_off_workers",
            "Workers that get no requests, or one at a time, because their requests fail.",
        )
        self.added_seconds = LoopHistogram(
            "kvrouter_frontend_added_seconds",
            "Time from the arrival of a request to its dispatch to a worker.",
            buckets=_ADDED_BUCKETS,
            registry=registry,
        ).of()
        self.models = MetricsByModel(registry)
        self.live_bookings = gauge("kvrouter_frontend_live_bookings", "Bookings not yet freed.")
        self.sharded_components = gauge(
            "kvrouter_frontend_sharded_components", "Components whose requests are sharded over several Schedulers."
        )
        self.prefills = counter(
            "kvrouter_frontend_prefills",
            "Attempts in disaggregated pools: remote (a prefill worker computed the prompt), or why the decode worker "
            "did: local (by decision), absent, busy or failed (the prefill workers).",
            ["outcome"],
        )
        self.prefill_seconds = Histogram(
            "kvrouter_frontend_prefill_seconds",
            "Time from the selection of a decode worker until its prefill worker handed the request over.",
            buckets=_PREFILL_BUCKETS,
            registry=registry,
        )
        self.abandoned_prefills = counter(
            "kvrouter_frontend_abandoned_prefills",
            "Prefills aborted after they were computed, since no decode worker received their blocks.",
        )
        self.worker_channels = gauge("kvrouter_frontend_worker_channels", "Open gRPC channels to workers.")

    def ended(self, model: str, code: str) -> None:
        """Counts a request for a served model, with an outcome."""
        self.requests.of(model if model in self.models.labelled else self.models.label(model), code).value += 1
