"""Metrics of replica sync."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge


class SyncMetrics:
    """Counters and gauges of one Scheduler with replica sync."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.sent = counter("kvrouter_scheduler_sync_sent", "Replication events given to NATS, without heartbeats.")
        self.unsent = counter(
            "kvrouter_scheduler_sync_unsent",
            "Replication events that NATS did not take; other Schedulers notice the gap and fetch the state.",
        )
        self.received = counter(
            "kvrouter_scheduler_sync_received", "Replication events received from other Schedulers, without heartbeats."
        )
        self.quarantined = counter(
            "kvrouter_scheduler_sync_quarantined",
            "Replication messages, or bookings in them, that were not used, by reason.",
            ["reason"],
        )
        self.gaps = counter("kvrouter_scheduler_sync_gaps", "Gaps noticed in the events of other Schedulers.")
        self.digest_mismatches = counter(
            "kvrouter_scheduler_sync_digest_mismatches",
            "Digests of other Schedulers that differed at equal sequence; should be 0.",
        )
        self.repairs = counter(
            "kvrouter_scheduler_sync_repairs", "States fetched from other Schedulers, by outcome.", ["outcome"]
        )
        self.orphans = counter(
            "kvrouter_scheduler_sync_orphans_dropped",
            "Bookings dropped because their Scheduler was gone for the grace period and no other owned them.",
        )
        self.remote_bookings = gauge("kvrouter_scheduler_remote_bookings", "Bookings that only other Schedulers own.")
        self.replicas = gauge("kvrouter_scheduler_replicas", "Other live Schedulers, summed over components.")
        self.incomplete = gauge(
            "kvrouter_scheduler_replicas_incomplete", "Other Schedulers whose state is being fetched."
        )
        self.unsent_waiting = gauge("kvrouter_scheduler_sync_outgoing", "Replication events that wait to be sent.")
