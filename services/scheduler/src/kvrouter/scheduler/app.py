"""Assembles a Scheduler from its parts and runs it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

import structlog
from kvrouter.net.ticks import tick
from kvrouter.runtime.bounds import bounds_of
from kvrouter.runtime.process.context import Runtime
from kvrouter.scheduler.api.drains import Drains
from kvrouter.scheduler.api.request_reader import RequestReader
from kvrouter.scheduler.api.selection import Selector
from kvrouter.scheduler.api.service import SchedulerService
from kvrouter.scheduler.api.sessions import TICK_SECONDS, Sessions
from kvrouter.scheduler.api.status import Status
from kvrouter.scheduler.bookings.conversations import Conversations
from kvrouter.scheduler.bookings.ownership import BookingOwnership
from kvrouter.scheduler.bookings.statistics import BookingStatistics
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.bookings.updates import BookingUpdates
from kvrouter.scheduler.load.overload import OverloadDetector
from kvrouter.scheduler.load.pools import Pools, rank_load_gauges, reuse_ratio_gauge
from kvrouter.scheduler.load.reported_load import LoadListener
from kvrouter.scheduler.load.thresholds import ThresholdBoard
from kvrouter.scheduler.metrics import SchedulerMetrics, SyncMetrics
from kvrouter.scheduler.overlap.indexer_query import IndexerSource
from kvrouter.scheduler.overlap.indexers import RemoteIndexers
from kvrouter.scheduler.overlap.predictions import Predictions
from kvrouter.scheduler.policies.catalogue import INSTALLED
from kvrouter.scheduler.queue.queued_requests import QueuedRequests, queue_gauges
from kvrouter.scheduler.replication.channel import MAX_OUTGOING, Network, SyncLink
from kvrouter.scheduler.replication.nats_network import NatsNetwork
from kvrouter.scheduler.replication.peer_network import GRACE_SECONDS, MAX_QUEUED_EVENTS, PeerNetwork
from kvrouter.scheduler.replication.replicas import ReplicaSync
from kvrouter.scheduler.routing.decide import Decisions
from kvrouter.scheduler.routing.router import Router
from kvrouter.scheduler.settings import SchedulerSettings
from kvrouter.scheduler.workers.descriptors import write_descriptors

log = structlog.get_logger(component="scheduler")

_EXPIRY_SECONDS = 0.4
"""Interval between checks for expired leases and grace periods, in seconds; far below either."""
_PREDICTION_EXPIRY_SECONDS = 1.0
"""Interval at which expired predicted blocks are dropped, in seconds. They no longer count, but use memory."""


@asynccontextmanager
async def running(
    settings: SchedulerSettings,
    runtime: Runtime,
    indexers: IndexerSource | None = None,
    *,
    peers: PeerNetwork | None = None,
    rng: Random | None = None,
) -> AsyncIterator[SchedulerService]:
    """Runs a Scheduler with its background tasks while the context lasts. Yields the object behind its API.

    Args:
        settings: Its options.
        runtime: The services of its process: discovery, NATS, metrics, tasks.
        indexers: Returns the Indexer of a component; by default, the registered ones.
        peers: Other Schedulers, with which it shares its bookings in the place of those reached by NATS.
        rng: Source of randomness.
    """
    clock = time.monotonic
    options = settings.routing()
    metrics = SchedulerMetrics(runtime.registry)
    pools = Pools(runtime.directory, settings.accounting(), report_age_seconds=settings.load_report_age_seconds)
    scheduler = (time.time_ns(), runtime.instance_id)
    booking_table = BookingTable(scheduler)
    BookingStatistics(metrics).follow(booking_table)
    booking_ownership = BookingOwnership(booking_table, session_grace_seconds=settings.session_grace_seconds)
    decisions = Decisions(settings.decisions_kept, log_formulas=settings.log_formulas)
    listed, etcd = runtime.listed, runtime.etcd
    thresholds = ThresholdBoard(options.thresholds, etcd, settings.namespace, runtime.quarantine)
    remote_indexers = RemoteIndexers(runtime.directory, runtime.instance_id, runtime.call_streams.client("indexer"))
    # Listed workers publish no events; their blocks are predicted only where that is asked for.
    predicts = listed is None or not settings.kv_events
    predictions = None
    if predicts:
        later = asyncio.get_running_loop().call_soon
        predictions = Predictions(settings.prediction_limits(), clock, not settings.kv_events, later)
    conversations = Conversations(settings.conversations_kept, metrics, clock)
    conversations.follow(booking_table)
    if predictions is not None:
        predictions.follow(booking_table)
    overload = OverloadDetector(settings.overload_lag_ms)
    if ignored := settings.ignored_options():
        log.warning("options.ignored", options=ignored, mode=options.mode)
    for name, cause in INSTALLED.refused.items():
        log.warning("policy.refused", policy=name, cause=cause)
    sync = link = None
    network: Network | None = peers
    if settings.replica_sync:
        network = NatsNetwork(runtime.nats, runtime.directory, runtime.instance_id, runtime.quarantine)
    if network is not None:
        sync = ReplicaSync(
            booking_table,
            pools,
            SyncMetrics(runtime.registry),
            grace_seconds=settings.session_grace_seconds if peers is None else GRACE_SECONDS,
            clock=clock,
        )
        sync.follow()
        link = SyncLink(sync, network, runtime.directory, heartbeat_seconds=settings.replica_heartbeat_seconds)
    router = Router(
        pools,
        booking_ownership,
        decisions,
        indexers or remote_indexers,
        metrics,
        indexer_timeout_seconds=settings.indexer_timeout_ms / 1000,
        rng=rng or Random(),
        clock=clock,
        predictions=predictions,
        conversations=conversations,
        is_behind=lambda: overload.behind,
    )
    queued = QueuedRequests(router, metrics, max_queued_requests=settings.max_queued_requests, clock=clock)
    queued.follow(booking_table)
    reader = RequestReader(pools, thresholds, options, max_prompt_tokens=settings.max_prompt_tokens)
    selector = Selector(reader, router, queued, metrics)
    bookings = BookingUpdates(booking_table, booking_ownership, pools, metrics, clock)
    sessions = Sessions(
        booking_ownership,
        bookings,
        scheduler_id=runtime.instance_id,
        grace_seconds=settings.session_grace_seconds,
        clock=clock,
    )
    listener = LoadListener(runtime.messages, runtime.directory, pools.reports_of, metrics, clock, runtime.quarantine)
    if listed is not None:
        listed.on_load = lambda name, report: listener.take(name, report.SerializeToString())
    # Read when the metrics are scraped.
    metrics.behind.set_function(lambda: overload.behind)
    metrics.bookings.set_function(lambda: len(booking_table))
    metrics.sessions.set_function(lambda: booking_ownership.sessions)
    metrics.decisions.set_function(lambda: len(decisions))
    metrics.conversations.set_function(lambda: len(conversations))
    metrics.predicted_index_blocks.set_function(lambda: 0 if predictions is None else len(predictions))
    runtime.registry.register(rank_load_gauges(pools))
    runtime.registry.register(reuse_ratio_gauge(pools))
    runtime.registry.register(queue_gauges(queued))
    bounds = bounds_of(runtime.registry)
    bounds.add("decisions_kept", lambda: len(decisions), settings.decisions_kept, when_full="evicts")
    bounds.add("conversations", lambda: len(conversations), settings.conversations_kept, when_full="evicts")
    if predictions is not None:
        predicted = predictions
        bounds.add("predicted_blocks", lambda: predicted.most_blocks, settings.router_max_tree_size, when_full="evicts")
    if link is not None:
        replicated = link
        bounds.add("replication_events", lambda: replicated.most_outgoing, MAX_OUTGOING, when_full="drops")
    if peers is not None and sync is not None:
        sync.metrics.peers.set_function(lambda: peers.connected)
        bounds.add("peer_events", lambda: peers.most_queued, MAX_QUEUED_EVENTS, when_full="drops")
    if settings.max_queued_requests:
        bounds.add("queued_requests", lambda: queued.longest, settings.max_queued_requests)
    status = Status(
        pools,
        booking_ownership,
        decisions,
        thresholds,
        queued,
        scheduler_id=runtime.instance_id,
        mode=options.mode,
        clock=clock,
        sync=sync,
        directory_age=lambda: runtime.directory.age_seconds,
        ignored=lambda: runtime.directory.ignored,
    )
    service = SchedulerService(
        pools,
        selector,
        bookings,
        sessions,
        decisions,
        thresholds,
        status,
        Drains(runtime.directory, etcd if runtime.local is None else runtime.local.registry),
        is_ready=lambda: runtime.directory.is_synced and thresholds.synced and (link is None or link.settled),
    )
    tasks = [
        runtime.spawn(remote_indexers.run(), "indexers"),
        runtime.spawn(_every(_EXPIRY_SECONDS, bookings.expire), "expiry"),
        runtime.spawn(_every(TICK_SECONDS, sessions.close_silent), "silent sessions"),
        runtime.spawn(overload.run(), "overload detection"),
        runtime.spawn(queued.run(), "queued requests"),
    ]
    if etcd is not None:
        tasks.append(runtime.spawn(thresholds.run(), "thresholds"))
        tasks.append(runtime.spawn(write_descriptors(runtime.directory, etcd), "descriptors"))
    if listed is None:
        tasks.append(runtime.spawn(listener.run(), "load reports"))
    if link is not None:
        tasks.append(runtime.spawn(link.run(), "replica sync"))
        if peers is not None:
            tasks.append(runtime.spawn(peers.run(), "peers"))
        tasks.append(runtime.spawn(_every(_EXPIRY_SECONDS, link.expire), "orphans"))
    if predictions is not None:
        tasks.append(runtime.spawn(_every(_PREDICTION_EXPIRY_SECONDS, predictions.expire), "predictions"))
    try:
        yield service
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _every(seconds: float, action: Callable[[], None]) -> None:
    while True:
        await tick(seconds)
        action()
