"""Reads counts and metrics of a running system."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

import aiohttp
from kvrouter.net.tls import Tls
from kvrouter.runtime.contracts import Indexer
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import indexer_pb2
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.indexer_pb2 import ComponentStats, EventCounts, GetStatsRequest
from kvrouter.v1.pages import whole
from prometheus_client.parser import text_string_to_metric_families

_CALL_SECONDS = 5.0
_SETTLE_SECONDS = 10.0
_POLL_SECONDS = 0.1


async def event_counts(indexer_target: str, tls: Tls | None = None, api_key: str = "") -> EventCounts | None:
    """Returns an Indexer's event counts over all components, once it has applied all events; None if it is away."""
    async with open_channel(indexer_target, tls=tls, role="indexer", api_key=api_key) as channel:
        indexer = cast("Indexer", remote(indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"], channel))
        try:
            components = await _settled(indexer)
        except KvRouterError:
            return None
    total = EventCounts()
    for component in components:
        for field, count in component.events.ListFields():
            setattr(total, field.name, getattr(total, field.name) + count)
    return total


def faulty_events(counts: EventCounts) -> int:
    """Returns the number of events that a sound run does not have: each means blocks that the index lacks."""
    return counts.gaps + counts.unknown_parents + counts.rejected + counts.unparsable


async def _settled(indexer: Indexer) -> Sequence[ComponentStats]:
    components: Sequence[ComponentStats] = ()
    try:
        async with asyncio.timeout(_SETTLE_SECONDS):
            while True:
                deadline = Deadline.after(_CALL_SECONDS)
                answer = await whole(partial(indexer.get_stats, deadline=deadline), GetStatsRequest())
                components = answer.components
                if all(one.applied_stream_sequence >= one.last_stream_sequence for one in components):
                    return components
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        return components


async def histogram_quantile(addresses: Iterable[str], metric: str, share: float) -> float | None:
    """Returns the upper bound of a quantile of a Prometheus histogram, over all processes (host:port) together.

    The unit is the metric's. None if a process does not answer or lacks the histogram, or if there are no observations.
    Infinite if the quantile is beyond the last bucket.
    """
    buckets: defaultdict[float, float] = defaultdict(float)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_CALL_SECONDS)) as session:
        for address in addresses:
            try:
                async with session.get(f"http://{address}/metrics") as response:
                    text = await response.text()
            except (aiohttp.ClientError, TimeoutError, OSError):
                return None
            found = bucket_counts(text, metric)
            if not found:
                return None
            for bound, count in found.items():
                buckets[bound] += count
    return quantile_bound(buckets, share)


def bucket_counts(text: str, metric: str) -> dict[float, float]:
    """Returns a histogram's cumulative counts by upper bound, summed over label sets; empty if it is absent."""
    counts: defaultdict[float, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        if family.name == metric:
            for sample in family.samples:
                if sample.name == f"{metric}_bucket":
                    counts[float(sample.labels["le"])] += sample.value
    return dict(counts)


def quantile_bound(buckets: dict[float, float], share: float) -> float | None:
    """Returns the lowest upper bound that covers a share of the observations; None if there are none."""
    total = buckets.get(math.inf, 0.0)
    if not total:
        return None
    return min(bound for bound, count in buckets.items() if count >= share * total)
