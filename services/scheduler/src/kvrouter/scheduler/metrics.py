"""Figures of the Scheduler."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
_QUEUED_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_BLOCKS_OFF = (-256, -64, -16, -4, -1, 0, 1, 4, 16, 64, 256)


class SchedulerMetrics:
    """Counters and histograms; one object for each Scheduler."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.selections = Counter(
            "kvrouter_scheduler_selections", "Selections by outcome (a gRPC code).", ["mode", "code"], registry=registry
        )
        self.repeated = Counter(
            "kvrouter_scheduler_repeated_selections", "Selections answered as before.", registry=registry
        )
        self.select_seconds = Histogram(
            "kvrouter_scheduler_select_seconds",
            "Time of a selection, the query to the Indexer included, without its time in the queue, seconds.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.queued = Counter(
            "kvrouter_scheduler_queued_requests",
            "Requests that the policy held, by what became of them: room, patience (sent without), late, full,"
            " cancelled, refused.",
            ["outcome"],
            registry=registry,
        )
        self.queued_seconds = Histogram(
            "kvrouter_scheduler_queued_seconds",
            "Time in the queue of requests that were then sent, seconds.",
            buckets=_QUEUED_SECONDS,
            registry=registry,
        )
        self.late_ms = Gauge(
            "kvrouter_scheduler_loop_late_ms",
            "Mean lateness of the event loop, milliseconds: how far the Scheduler is from keeping up.",
            registry=registry,
        )
        self.behind = Gauge(
            "kvrouter_scheduler_sharding_advised",
            "Whether clients are told to spread their requests over all Schedulers.",
            registry=registry,
        )
        self.load_only = Counter(
            "kvrouter_scheduler_load_only",
            "Selections that rest on load alone because overlaps were not to be had, by reason.",
            ["reason"],
            registry=registry,
        )
        self.bookings = Gauge("kvrouter_scheduler_bookings", "Bookings that are not freed.", registry=registry)
        self.sessions = Gauge(
            "kvrouter_scheduler_sessions", "Sessions that are open or in their grace.", registry=registry
        )
        self.decisions = Gauge("kvrouter_scheduler_decisions_kept", "Decisions kept for Explain.", registry=registry)
        self.conversations = Gauge(
            "kvrouter_scheduler_conversations", "Conversations whose rank is remembered.", registry=registry
        )
        self.predicted_index_blocks = Gauge(
            "kvrouter_scheduler_predicted_index_blocks",
            "Blocks that ranks are predicted to hold, with --no-kv-events.",
            registry=registry,
        )
        self.expired_leases = Counter(
            "kvrouter_scheduler_expired_leases", "Bookings whose lease ran out.", registry=registry
        )
        self.lost_bookings = Counter(
            "kvrouter_scheduler_session_bookings_dropped", "Bookings that went with their session.", registry=registry
        )
        self.reasserted = Counter(
            "kvrouter_scheduler_reasserted_bookings", "Bookings taken over from another Scheduler.", registry=registry
        )
        self.unknown_frees = Counter(
            "kvrouter_scheduler_unknown_frees", "Frees of bookings that are not known.", registry=registry
        )
        self.reports_quarantined = Counter(
            "kvrouter_scheduler_load_reports_quarantined",
            "Load reports not used, by reason.",
            ["reason"],
            registry=registry,
        )
        self.predicted_blocks = Counter(
            "kvrouter_scheduler_predicted_cached_blocks",
            "Cached blocks predicted, at most all but the block of the last token, over requests whose worker told.",
            registry=registry,
        )
        self.actual_blocks = Counter(
            "kvrouter_scheduler_actual_cached_blocks", "Cached blocks that the workers reported.", registry=registry
        )
        self.blocks_off = Histogram(
            "kvrouter_scheduler_cached_blocks_off",
            "Cached blocks reported less those predicted, by request.",
            buckets=_BLOCKS_OFF,
            registry=registry,
        )
        self.predictions = Counter(
            "kvrouter_scheduler_predictions",
            "Requests whose prediction was exact, too low or too high.",
            ["verdict"],
            registry=registry,
        )

    def audit(self, predicted: int, actual: int) -> None:
        """Holds a prediction of cached blocks against what the worker reported."""
        self.predicted_blocks.inc(predicted)
        self.actual_blocks.inc(actual)
        self.blocks_off.observe(actual - predicted)
        verdict = "exact" if actual == predicted else "low" if actual > predicted else "high"
        self.predictions.labels(verdict=verdict).inc()
