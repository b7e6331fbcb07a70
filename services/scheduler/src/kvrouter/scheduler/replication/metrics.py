"""Figures of replica sync."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class SyncMetrics:
    """Counters and gauges; one object for each Scheduler that syncs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.sent = Counter(
            "kvrouter_scheduler_sync_sent", "Sync events handed to NATS, heartbeats left out.", registry=registry
        )
        self.unsent = Counter(
            "kvrouter_scheduler_sync_unsent",
            "Sync events that NATS could not take; the other Schedulers find them missing and fetch the state.",
            registry=registry,
        )
        self.received = Counter(
            "kvrouter_scheduler_sync_received",
            "Sync events of other Schedulers that came, heartbeats left out.",
            registry=registry,
        )
        self.quarantined = Counter(
            "kvrouter_scheduler_sync_quarantined",
            "Sync messages, or bookings in them, that were not used, by reason.",
            ["reason"],
            registry=registry,
        )
        self.gaps = Counter(
            "kvrouter_scheduler_sync_gaps", "Times that events of a Scheduler were missing.", registry=registry
        )
        self.digest_mismatches = Counter(
            "kvrouter_scheduler_sync_digest_mismatches",
            "Times that a Scheduler's digest differed at equal sequence: drift, which should not be.",
            registry=registry,
        )
        self.repairs = Counter(
            "kvrouter_scheduler_sync_repairs",
            "States fetched from other Schedulers, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.orphans = Counter(
            "kvrouter_scheduler_sync_orphans_dropped",
            "Bookings dropped because their Scheduler was gone for the grace and none took them over.",
            registry=registry,
        )
        self.remote_bookings = Gauge(
            "kvrouter_scheduler_remote_bookings", "Bookings that only other Schedulers hold.", registry=registry
        )
        self.replicas = Gauge(
            "kvrouter_scheduler_replicas", "Other Schedulers that are heard, over all components.", registry=registry
        )
        self.incomplete = Gauge(
            "kvrouter_scheduler_replicas_incomplete", "Those of them whose state is being fetched.", registry=registry
        )
        self.unsent_waiting = Gauge(
            "kvrouter_scheduler_sync_outgoing", "Sync events that wait to be sent.", registry=registry
        )
