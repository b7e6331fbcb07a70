"""Metrics of the relay, read from its ranks when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvrouter.engines.relay.relaying import RelayedRank, RelayedRanks
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_COUNTS = {
    "messages": "Messages of the engine that were applied.",
    "replayed": "Messages that were applied from a replay.",
    "duplicates": "Messages that were received again.",
    "gaps": "Times that messages were missing.",
    "losses": "Times that missing messages could not be replayed, so that the rank was emptied.",
    "restarts": "Restarts of the engine.",
    "malformed": "Messages that are none, or of another rank.",
}
_LEVELS = {
    "connected": "Whether the engine's publisher is connected.",
    "blocks": "Resident blocks of the rank.",
    "partial": "Whether blocks may be missing.",
    "unsent_events": "Events that wait to be published.",
    "restored_blocks": "Blocks of the state from which the rank resumed at the start.",
    "dropped_blocks": "Blocks of a state from which the rank could not resume at the start.",
    "state_age_seconds": "Time since the rank's snapshot was last up to date; -1 for none.",
    "state_failures": "Failed attempts to write the rank's snapshot since the last success.",
}


_RANK = ("worker_id", "dp_rank")


class RelayMetrics(Collector):
    """Counters and gauges of each rank."""

    def __init__(self, registry: CollectorRegistry, workers: Mapping[int, RelayedRanks]) -> None:
        """``workers`` has the ranks of each worker by its id, and may be filled later."""
        self._workers = workers
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Implements Collector."""
        for name, text in _COUNTS.items():
            counter = CounterMetricFamily(f"kvrouter_relay_{name}", text, labels=_RANK)
            for label, (relay, _, _) in self._ranks():
                counter.add_metric(label, getattr(relay.counts, name))
            yield counter
        doubts = CounterMetricFamily(
            "kvrouter_relay_copy_counting_doubts",
            "Reports that contradict the configured copy counting.",
            labels=_RANK,
        )
        for label, (_, _, publisher) in self._ranks():
            doubts.add_metric(label, publisher.stats().copy_counting_doubts)
        yield doubts
        left_out = CounterMetricFamily(
            "kvrouter_relay_left_out", "Events that were left out, by reason.", labels=(*_RANK, "reason")
        )
        for label, (_, translator, _) in self._ranks():
            for reason, count in sorted(translator.left_out.items()):
                left_out.add_metric([*label, reason], count)
        yield left_out
        levels = {
            name: GaugeMetricFamily(f"kvrouter_relay_{name}", text, labels=_RANK) for name, text in _LEVELS.items()
        }
        for label, (relay, _, publisher) in self._ranks():
            stats = publisher.stats()
            levels["connected"].add_metric(label, relay.counts.is_connected)
            levels["blocks"].add_metric(label, stats.blocks)
            levels["partial"].add_metric(label, stats.partial)
            levels["unsent_events"].add_metric(label, stats.unsent_events)
            levels["restored_blocks"].add_metric(label, relay.counts.restored_blocks)
            levels["dropped_blocks"].add_metric(label, relay.counts.dropped_blocks)
            age = stats.state_age_seconds
            levels["state_age_seconds"].add_metric(label, -1 if age is None else age)
            levels["state_failures"].add_metric(label, stats.state_failures)
        yield from levels.values()

    def _ranks(self) -> Iterator[tuple[list[str], RelayedRank]]:
        for worker_id, ranks in self._workers.items():
            for dp_rank, parts in ranks.items():
                yield [str(worker_id), str(dp_rank)], parts
