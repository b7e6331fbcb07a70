"""Metrics of the Scheduler, and of its replica sync."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from kvrouter.core import Observations
from kvrouter.runtime.telemetry.counter import Count, LoopCounter
from kvrouter.runtime.telemetry.histogram import LoopHistogram
from kvrouter.runtime.telemetry.metrics import model_label
from kvrouter.v1.common_pb2 import LowerTiers
from kvrouter.v1.scheduler_pb2 import TierTokens
from kvrouter.v1.texts import LOWER_TIER_NAMES
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
_QUEUED_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_TURNS = (1, 2, 4, 8, 16, 32, 64, 128)
_PAUSES = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800)
_HITS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)
_RATIOS = (0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 4, 8)
_BLOCKS_OFF = (-256, -64, -16, -4, -1, 0, 1, 4, 16, 64, 256)


class ReachableTokens(msgspec.Struct, frozen=True):
    """Cached tokens of a prompt."""

    chosen: int
    """On the rank of the request."""
    eligible: int
    """On the rank with most of them that could have been chosen."""
    any: int
    """On any rank."""


class SchedulerMetrics:
    """Counters and histograms; one object for each Scheduler."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        of_each = partial(LoopCounter, registry=registry)

        def of_one(name: str, text: str, buckets: Sequence[float]) -> Observations:
            return LoopHistogram(name, text, buckets=buckets, registry=registry).of()

        self.selections = of_each(
            "kvrouter_scheduler_selections", "Selections by mode and outcome, a gRPC code.", ["mode", "code"]
        )
        self.repeated = counter(
            "kvrouter_scheduler_repeated_selections", "Repeated selections, answered with the first outcome."
        )
        self.select_seconds = of_one(
            "kvrouter_scheduler_select_seconds",
            "Duration of a selection, the Indexer's query included, the time in the queue excluded.",
            buckets=_SECONDS,
        )
        self.queued = counter(
            "kvrouter_scheduler_queued_requests",
            "Queued requests by outcome: room, patience (sent without room), late, full, cancelled, refused.",
            ["outcome"],
        )
        self.queued_seconds = histogram(
            "kvrouter_scheduler_queued_seconds",
            "Time that requests which were sent had been queued.",
            buckets=_QUEUED_SECONDS,
        )
        self.behind = gauge(
            "kvrouter_scheduler_sharding_advised", "1 while clients are advised to shard requests over all Schedulers."
        )
        self.load_only = counter(
            "kvrouter_scheduler_load_only",
            "Selections that rest on load alone because no overlaps were available, by reason.",
            ["reason"],
        )
        self.bookings = gauge("kvrouter_scheduler_bookings", "Bookings that are not freed.")
        self.sessions = gauge("kvrouter_scheduler_sessions", "Sessions that are open or within their grace period.")
        self.decisions = gauge("kvrouter_scheduler_decisions_kept", "Past decisions that Explain can show.")
        self.conversations = gauge("kvrouter_scheduler_conversations", "Conversations whose rank is remembered.")
        self.conversation_turns = of_one(
            "kvrouter_scheduler_conversation_turns",
            "Number of a request in its conversation, from 1, at each request with a conversation.",
            buckets=_TURNS,
        )
        self.conversation_pauses = of_one(
            "kvrouter_scheduler_conversation_pause_seconds",
            "Time from the end of a conversation's request to its next one.",
            buckets=_PAUSES,
        )
        self.conversation_hits = of_one(
            "kvrouter_scheduler_conversation_hit_ratio",
            "Share of the prompt that workers found cached, of requests after the first of their conversation.",
            buckets=_HITS,
        )
        self.output_ratios = of_one(
            "kvrouter_scheduler_output_ratio",
            "Output tokens of a request over those that were expected.",
            buckets=_RATIOS,
        )
        self.predicted_index_blocks = gauge(
            "kvrouter_scheduler_predicted_index_blocks", "Blocks that ranks are predicted to hold, with --no-kv-events."
        )
        self.expired_leases = counter("kvrouter_scheduler_expired_leases", "Bookings whose lease expired.")
        self.lost_bookings = counter(
            "kvrouter_scheduler_session_bookings_dropped", "Bookings dropped with their session."
        )
        self.reasserted = counter(
            "kvrouter_scheduler_reasserted_bookings", "Bookings made at another Scheduler and re-asserted here."
        )
        self.unknown_frees = counter("kvrouter_scheduler_unknown_frees", "Frees of unknown bookings.")
        self.reports_quarantined = counter(
            "kvrouter_scheduler_load_reports_quarantined", "Load reports that were not used, by reason.", ["reason"]
        )
        self.predicted_blocks = of_each(
            "kvrouter_scheduler_predicted_cached_blocks",
            "Predicted cached blocks of requests whose worker reported its own count, without the last token's.",
            ["model"],
        )
        self.actual_blocks = of_each(
            "kvrouter_scheduler_actual_cached_blocks",
            "Cached blocks that the workers reported for the same requests.",
            ["model"],
        )
        self.blocks_off = of_one(
            "kvrouter_scheduler_cached_blocks_off",
            "Reported minus predicted cached blocks of a request.",
            buckets=_BLOCKS_OFF,
        )
        self.predictions = of_each(
            "kvrouter_scheduler_predictions", "Requests whose prediction was exact, low or high.", ["verdict"]
        )
        self.cached_tokens = of_each(
            "kvrouter_scheduler_cached_tokens",
            "Prompt tokens that the index had at the booking: on the chosen rank, on the best eligible one, and on the "
            "best of any.",
            ["model", "rank"],
        )
        self.lower_tier_tokens = of_each(
            "kvrouter_scheduler_lower_tier_tokens",
            "Prompt tokens that the index had on the chosen rank below device memory, at the booking.",
            ["model", "tier"],
        )
        self.audited_tier_tokens = of_each(
            "kvrouter_scheduler_audited_tier_tokens",
            "Cached prompt tokens below device memory, of ended requests: predicted, and reported by their workers.",
            ["model", "tier", "source"],
        )
        self._cached: dict[str, tuple[Count, ...]] = {}
        self._audited: dict[str, tuple[Count, Count]] = {}

    def count_cached(
        self, model: str, tokens: ReachableTokens, lower: LowerTiers | None = None, block_size: int = 0
    ) -> None:
        """Counts the cached tokens of a booked request, and the blocks that its rank loads from lower tiers."""
        counters = self._cached.get(model)
        if counters is None:
            label = model_label(model, self._cached)
            counters = tuple(self.cached_tokens.of(label, rank) for rank in ReachableTokens.__struct_fields__)
            self._cached[label] = counters
        chosen, eligible, any_rank = counters
        chosen.value += tokens.chosen
        eligible.value += tokens.eligible
        any_rank.value += tokens.any
        if lower is not None:
            label = model_label(model, self._cached)
            for field, blocks in lower.ListFields():
                self.lower_tier_tokens.of(label, field.name).value += blocks * block_size

    def audit_tiers(self, model: str, predicted: TierTokens | None, reported: TierTokens | None) -> None:
        """Compares the predicted tokens below device memory with the worker's report; None for no such tokens."""
        label = model_label(model, self._audited)
        for source, tokens in (("predicted", predicted), ("reported", reported)):
            for tier in LOWER_TIER_NAMES:
                self.audited_tier_tokens.of(label, tier, source).value += 0 if tokens is None else getattr(tokens, tier)

    def audit(self, model: str, predicted: int, actual: int) -> None:
        """Compares a prediction of cached blocks with the worker's report."""
        audited = self._audited.get(model)
        if audited is None:
            label = model_label(model, self._audited)
            audited = self.predicted_blocks.of(label), self.actual_blocks.of(label)
            self._audited[label] = audited
        audited[0].value += predicted
        audited[1].value += actual
        self.blocks_off.observe(actual - predicted)
        self.predictions.of("exact" if actual == predicted else "low" if actual > predicted else "high").value += 1


@dataclass(eq=False)
class ScrapedGauges(Collector):
    """Gauges read on each scrape."""

    documentation: Mapping[str, str]
    labels: Sequence[str]
    samples: Callable[[], Iterable[tuple[Sequence[str], Sequence[float]]]]
    """Returns label values, each with a value for every gauge or for the first ones."""

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Returns the families without samples: registering reads nothing."""
        return iter([GaugeMetricFamily(name, text, labels=self.labels) for name, text in self.documentation.items()])

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Returns the families with their samples."""
        families = list(self.describe())
        for labels, values in self.samples():
            for family, value in zip(families, values, strict=False):
                family.add_metric(labels, value)
        return iter(families)


class SyncMetrics:
    """Counters and gauges of one Scheduler with replica sync."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.sent = counter("kvrouter_scheduler_sync_sent", "Replication events sent, without heartbeats.")
        self.unsent = counter(
            "kvrouter_scheduler_sync_unsent",
            "Replication events that could not be sent; other Schedulers notice the gap and fetch the state.",
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
        self.peers = gauge("kvrouter_scheduler_peers", "Connected peers of --peer.")
        self.unsent_waiting = gauge("kvrouter_scheduler_sync_outgoing", "Replication events that wait to be sent.")
