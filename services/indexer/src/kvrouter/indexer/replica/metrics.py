"""Prometheus metrics and bounds of an Indexer. A scrape reads the counts from their owners."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from kvrouter.core.interface import MemoryBudget
from kvrouter.indexer.index.known_ranks import age
from kvrouter.indexer.index.pending_buffers import MAX_ALL_BYTES
from kvrouter.indexer.ingest.live_events import MAX_PENDING_MESSAGES
from kvrouter.indexer.replica.component import ComponentIndex
from kvrouter.runtime.bounds import Bounds
from kvrouter.runtime.telemetry.histogram import LoopHistogram
from kvrouter.v1.names import ComponentName
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_FIND_MATCHES_BUCKETS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.1, 1.0)
_OUTCOMES = (
    "applied",
    "duplicates",
    "fenced",
    "gaps",
    "unknown_parents",
    "unknown_removals",
    "rejected",
    "misdirected",
    "unparsable",
    "drifts",
    "unconfirmed",
)


class IndexerMetrics(Collector):
    """The metrics of one replica over all its components."""

    def __init__(
        self, registry: CollectorRegistry, components: Mapping[ComponentName, ComponentIndex], budget: MemoryBudget
    ) -> None:
        self._components = components
        self._budget = budget
        self.find_matches_seconds = LoopHistogram(
            "kvrouter_indexer_find_matches_seconds",
            "Duration of FindMatches in the service.",
            buckets=_FIND_MATCHES_BUCKETS,
            registry=registry,
        ).of()
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics of all components."""
        events = CounterMetricFamily(
            "kvrouter_indexer_events", "Events by outcome.", labels=["namespace", "component", "outcome"]
        )
        counters = {
            "batches": "Batches applied to the index.",
            "repairs": "Ranks whose blocks were dropped because of a gap, a faulty event or drift.",
            "evictions": "Ranks emptied because the index exceeded a bound on its blocks or its memory.",
            "stored_blocks": "Blocks stored.",
            "removed_blocks": "Blocks removed.",
            "resyncs": "Ranks replaced by their worker's whole state.",
            "refetches": "Ranks whose missing events were fetched from their workers.",
            "false_alarms": "Alarms raised by events that the workers did not confirm.",
            "live_events_dropped": "Core NATS messages dropped because they arrived faster than they could be applied.",
            "snapshots_taken": "Snapshots taken by this replica.",
            "snapshots_unusable": "Snapshots that could not be read during a restore.",
            "streams_recreated": "Stopped streams that this replica created again.",
            "consumers_made": "Consumers created on the stream, the first one included.",
        }
        gauges = {
            "ready": "1 when the index is restored.",
            "blocks": "Resident blocks, summed over ranks.",
            "ranks": "Ranks in the index.",
            "evicted_ranks": "Ranks that were emptied because of a bound and have not been restored since.",
            "partial_ranks": "Ranks of which blocks may be missing, in the index or already at the worker.",
            "memory_bytes": "Estimated memory of the index.",
            "lag_seconds": "Time from publishing to applying the last batch.",
            "pending_messages": "Messages of the stream that are not applied yet.",
            "unverified_ranks": "Ranks that are stale, not compared with their worker, or have missed events since.",
            "resyncs_pending": "Ranks in the resync queue.",
            "resyncs_backing_off": "Ranks whose resync backs off after no answer, a false alarm or persistent drift.",
            "pending_bytes": "Size of the pending buffer; about 256 MiB at most.",
            "live_queue_messages": "Core NATS messages that wait to be applied; 8,192 at most.",
            "snapshot_sequence": "Stream sequence that the newest snapshot covers; 0 without one.",
            "silent_ranks": "Ranks without an event or heartbeat for several heartbeat intervals.",
            "stale_ranks": "Ranks without recent evidence of any kind.",
            "oldest_evidence_seconds": "Age of the newest evidence about the rank for which it is oldest.",
            "stream_checked_age_seconds": "Time since NATS reported the end of the stream; 0 before the first report.",
            "stream_stopped": "1 while the stream takes no messages, for example because its disk is full.",
            "quarantined_messages": "Messages in quarantine; 64 at most.",
        }
        labels = ["namespace", "component"]
        counts = {n: CounterMetricFamily(f"kvrouter_indexer_{n}", text, labels=labels) for n, text in counters.items()}
        now = time.monotonic()
        levels = {n: GaugeMetricFamily(f"kvrouter_indexer_{n}", text, labels=labels) for n, text in gauges.items()}
        for name, component in list(self._components.items()):
            of = [name.namespace, name.name]
            tally, progress, ranks = component.state.events.tally, component.progress, component.ranks
            for outcome in _OUTCOMES:
                events.add_metric([*of, outcome], getattr(tally, outcome))
            counts["batches"].add_metric(of, tally.batches)
            counts["repairs"].add_metric(of, tally.repairs)
            counts["evictions"].add_metric(of, tally.evictions)
            counts["stored_blocks"].add_metric(of, tally.stored_blocks)
            counts["removed_blocks"].add_metric(of, tally.removed_blocks)
            counts["consumers_made"].add_metric(of, component.ingest.recreations if component.ingest else 0)
            counts["resyncs"].add_metric(of, component.resync.resyncs)
            counts["refetches"].add_metric(of, component.resync.refetches)
            counts["false_alarms"].add_metric(of, component.resync.false_alarms)
            counts["live_events_dropped"].add_metric(of, component.live.dropped)
            snapshots = component.snapshots
            counts["snapshots_taken"].add_metric(of, snapshots.taken if snapshots else 0)
            counts["snapshots_unusable"].add_metric(of, snapshots.unusable if snapshots else 0)
            levels["snapshot_sequence"].add_metric(of, snapshots.current.stream_sequence if snapshots else 0)
            # In one pass: there are thousands, and all requests wait meanwhile.
            partial = silent = stale = verified = 0
            oldest = 0.0
            for info in ranks:
                standing = component.standing(info, now)
                partial += standing.partial
                silent += standing.silent
                stale += standing.stale
                verified += standing.verified
                if (since := standing.evidence_age) is not None and since > oldest:
                    oldest = since
            repair = component.stream_repair
            levels["stream_stopped"].add_metric(of, bool(repair and repair.error))
            counts["streams_recreated"].add_metric(of, repair.recreated if repair else 0)
            levels["unverified_ranks"].add_metric(of, len(ranks) - verified)
            levels["silent_ranks"].add_metric(of, silent)
            levels["stale_ranks"].add_metric(of, stale)
            levels["oldest_evidence_seconds"].add_metric(of, oldest)
            levels["stream_checked_age_seconds"].add_metric(of, age(progress.checked_at, now) or 0.0)
            levels["resyncs_pending"].add_metric(of, component.resync.pending)
            levels["resyncs_backing_off"].add_metric(of, component.resync.backing_off)
            levels["pending_bytes"].add_metric(of, component.state.events.pending.bytes)
            levels["live_queue_messages"].add_metric(of, component.live.queued)
            levels["ready"].add_metric(of, component.ready)
            levels["blocks"].add_metric(of, sum(info.blocks for info in ranks))
            levels["ranks"].add_metric(of, len(ranks))
            levels["evicted_ranks"].add_metric(of, sum(info.evicted for info in ranks))
            levels["partial_ranks"].add_metric(of, partial)
            levels["memory_bytes"].add_metric(of, sum(info.memory_bytes for info in ranks))
            levels["lag_seconds"].add_metric(of, component.state.events.lag_seconds)
            levels["pending_messages"].add_metric(of, max(0, progress.last_sequence - progress.applied))
            levels["quarantined_messages"].add_metric(of, len(component.state.events.quarantined))
        used = GaugeMetricFamily(
            "kvrouter_indexer_index_bytes", "Memory of the indexes of all components.", value=self._budget.used_bytes
        )
        bound = GaugeMetricFamily(
            "kvrouter_indexer_max_index_bytes",
            "Bound on the memory of the indexes of all components; 0 for none.",
            value=self._budget.max_bytes,
        )
        return [events, *counts.values(), *levels.values(), used, bound]


def expose_bounds(
    bounds: Bounds, components: Mapping[ComponentName, ComponentIndex], budget: MemoryBudget, *, max_blocks: int
) -> None:
    """Adds the bounds of an Indexer; those of a component show the fullest one.

    ``max_blocks`` limits the blocks of each component; 0 for no limit.
    """

    def fullest(used: Callable[[ComponentIndex], float]) -> Callable[[], float]:
        return lambda: max(map(used, list(components.values())), default=0.0)

    def blocks(component: ComponentIndex) -> int:
        return sum(info.blocks for info in component.ranks)

    bounds.add("index_bytes", lambda: budget.used_bytes, lambda: budget.max_bytes, when_full="evicts")
    bounds.add("index_blocks", fullest(blocks), max_blocks, when_full="evicts")
    bounds.add("pending_bytes", fullest(lambda each: each.state.events.pending.bytes), MAX_ALL_BYTES, when_full="drops")
    bounds.add("live_queue_messages", fullest(lambda each: each.live.queued), MAX_PENDING_MESSAGES, when_full="drops")
