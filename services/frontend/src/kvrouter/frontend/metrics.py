"""Metrics of the Frontend."""

from __future__ import annotations

from kvrouter.frontend.model_metrics import MetricsByModel
from kvrouter.runtime.telemetry.histogram import LoopHistogram
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_ADDED_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5)
_PREFILL_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class FrontendMetrics:
    """Counters, gauges and histograms of one Frontend."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "kvrouter_frontend_requests", "Requests by outcome, a gRPC code.", ["model", "code"], registry=registry
        )
        self.http_errors = Counter(
            "kvrouter_frontend_http_errors",
            "Failed HTTP responses by status and by the code of the error, empty if an engine sent the response.",
            ["status", "code"],
            registry=registry,
        )
        self._ended: dict[tuple[str, str], Counter] = {}
        self.in_flight = Gauge("kvrouter_frontend_requests_in_flight", "Running requests.", registry=registry)
        self.retries = Counter(
            "kvrouter_frontend_retries", "Attempts without output that failed and were retried.", registry=registry
        )
        self.migrations = Counter(
            "kvrouter_frontend_migrations",
            "Requests that continued on another worker after output, by cause: as for worker failures, or drained.",
            ["cause"],
            registry=registry,
        )
        self.worker_failures = Counter(
            "kvrouter_frontend_worker_failures",
            "Attempts that a worker failed, by cause: a gRPC code, malformed, unfinished, error, silent or stalled.",
            ["cause"],
            registry=registry,
        )
        self.worker_deaths = Counter(
            "kvrouter_frontend_worker_deaths",
            "Deaths of workers with a request in flight that this process has seen, for each prompt.",
            registry=registry,
        )
        self.poison_prompts = Counter(
            "kvrouter_frontend_poison_prompts",
            "Requests that were refused or ended because two workers died while they ran their prompt.",
            registry=registry,
        )
        self.output_overruns = Counter(
            "kvrouter_frontend_output_overruns",
            "Responses ended at max_tokens because the worker sent more.",
            registry=registry,
        )
        self.suspected_workers = Gauge(
            "kvrouter_frontend_suspected_workers", "Workers that do not answer liveness probes.", registry=registry
        )
        self.stalled_workers = Gauge(
            "kvrouter_frontend_stalled_workers",
            "Workers that answer liveness probes but generate nothing, or far less than before.",
            registry=registry,
        )
        self.backed_off_workers = Gauge(
            "kvrouter_frontend_backed_off_workers",
            "Workers that get no requests, or one at a time, because their requests fail.",
            registry=registry,
        )
        self.added_seconds = LoopHistogram(
            "kvrouter_frontend_added_seconds",
            "Time from the arrival of a request to its dispatch to a worker.",
            buckets=_ADDED_BUCKETS,
            registry=registry,
        ).of()
        self.models = MetricsByModel(registry)
        self.live_bookings = Gauge("kvrouter_frontend_live_bookings", "Bookings not yet freed.", registry=registry)
        self.sharded_components = Gauge(
            "kvrouter_frontend_sharded_components",
            "Components whose requests are sharded over several Schedulers.",
            registry=registry,
        )
        self.prefills = Counter(
            "kvrouter_frontend_prefills",
            "Attempts in disaggregated pools: remote (a prefill worker computed the prompt), or why the decode worker "
            "did: local (by decision), absent, busy or failed (the prefill workers).",
            ["outcome"],
            registry=registry,
        )
        self.prefill_seconds = Histogram(
            "kvrouter_frontend_prefill_seconds",
            "Time from the selection of a decode worker until its prefill worker handed the request over.",
            buckets=_PREFILL_BUCKETS,
            registry=registry,
        )
        self.abandoned_prefills = Counter(
            "kvrouter_frontend_abandoned_prefills",
            "Prefills aborted after they were computed, since no decode worker received their blocks.",
            registry=registry,
        )
        self.worker_channels = Gauge(
            "kvrouter_frontend_worker_channels", "Open gRPC channels to workers.", registry=registry
        )

    def ended(self, model: str, code: str) -> Counter:
        """Returns the counter of requests for a served model, with an outcome.

        To look it up by its labels takes longer.
        """
        key = self.models.label(model), code
        counter = self._ended.get(key)
        if counter is None:
            counter = self._ended[key] = self.requests.labels(*key)
        return counter
