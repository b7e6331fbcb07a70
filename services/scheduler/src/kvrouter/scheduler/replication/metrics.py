"""Metrics of replica sync."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class SyncMetrics:
    """Counters and gauges of one Scheduler with replica sync."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.sent = Counter(
            "kvrouter_scheduler_sync_sent", "Replication events given to NATS, without heartbeats.", registry=registry
        )
        self.unsent = Counter(
            "kvrouter_scheduler_sync_unsent",
            "Replication events that NATS did not take; other Schedulers notice the gap and fetch the state.",
            registry=registry,
        )
        self.received = Counter(
            "kvrouter_scheduler_sync_received",
            "Replication events received from other Schedulers, without heartbeats.",
            registry=registry,
        )
        self.quarantined = Counter(
            "kvrouter_scheduler_sync_quarantined",
            "Replication messages, or bookings in them, that were not used, by reason.",
            ["reason"],
            registry=registry,
        )
        self.gaps = Counter(
            "kvrouter_scheduler_sync_gaps", "Gaps noticed in the events of other Schedulers.", registry=registry
        )
        self.digest_mismatches = Counter(
            "kvrouter_scheduler_sync_digest_mismatches",
            "Digests of other Schedulers that differed at equal sequence; should be 0.",
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
            "Bookings dropped because their Scheduler was gone for the grace period and no other owned them.",
            registry=registry,
        )
        self.remote_bookings = Gauge(
            "kvrouter_scheduler_remote_bookings", "Bookings that only other Schedulers own.", registry=registry
        )
        self.replicas = Gauge(
            "kvrouter_scheduler_replicas", "Other live Schedulers, summed over components.", registry=registry
        )
        self.incomplete = Gauge(
            "kvrouter_scheduler_replicas_incomplete",
            "Other Schedulers whose state is being fetched.",
            registry=registry,
        )
        self.unsent_waiting = Gauge(
            "kvrouter_scheduler_sync_outgoing", "Replication events that wait to be sent.", registry=registry
        )
