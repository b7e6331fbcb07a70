"""Metrics of the Frontend."""

from __future__ import annotations

from functools import partial

from kvrouter.frontend.model_metrics import MetricsByModel
from kvrouter.runtime.telemetry.histogram import LoopHistogram
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_ADDED_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5)
_PREFILL_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class FrontendMetrics:
    """Counters, gauges and histograms of one Frontend."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.requests = counter("kvrouter_frontend_requests", "Requests by outcome, a gRPC code.", ["model", "code"])
        self.http_errors = counter(
            "kvrouter_frontend_http_errors",
            "Failed HTTP responses by status and by the code of the error, empty if an engine sent the response.",
            ["status", "code"],
        )
        self._ended: dict[tuple[str, str], Counter] = {}
        self.in_flight = gauge("kvrouter_frontend_requests_in_flight", "Running requests.")
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

    def ended(self, model: str, code: str) -> Counter:
        """Returns the counter of requests for a served model, with an outcome.

        To look it up by its labels takes longer.
        """
        key = self.models.label(model), code
        counter = self._ended.get(key)
        if counter is None:
            counter = self._ended[key] = self.requests.labels(*key)
        return counter
