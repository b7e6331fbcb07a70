"""Wiring of an Indexer: builds its objects from the settings and runs them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from kvrouter.core import MemoryBudget
from kvrouter.indexer.api.service import IndexerService
from kvrouter.indexer.replica.component import Limits
from kvrouter.indexer.replica.metrics import IndexerMetrics, expose_bounds
from kvrouter.indexer.replica.replica import Replica
from kvrouter.indexer.settings import IndexerSettings, default_max_index_bytes
from kvrouter.indexer.snapshots.coordinator import SnapshotHome, SnapshotOptions
from kvrouter.runtime.bounds import bounds_of
from kvrouter.runtime.process.context import Runtime

log = structlog.get_logger(component="indexer")


@asynccontextmanager
async def running(settings: IndexerSettings, runtime: Runtime) -> AsyncIterator[IndexerService]:
    """Runs an Indexer for as long as the context is open, and yields its service.

    The service answers immediately. Its calls raise NotReady until etcd and NATS are reachable and the requested
    component is restored.
    """
    max_bytes = default_max_index_bytes() if settings.max_index_bytes is None else settings.max_index_bytes
    log.info("index.bounded", max_bytes=max_bytes, is_default=settings.max_index_bytes is None)
    budget = MemoryBudget(max_bytes)
    limits = Limits(settings.max_index_blocks, budget, settings.worker_grace_seconds, settings.compare_seconds)
    options = SnapshotOptions(
        settings.snapshot_threshold,
        settings.snapshot_check_seconds,
        settings.snapshot_lock_seconds,
        settings.reset_states,
        settings.reset_states_even_if_others_live,
    )
    home = (
        None if runtime.etcd is None else SnapshotHome(runtime.etcd, runtime.instance_id, options, runtime.quarantine)
    )
    replica = Replica(
        runtime.instance_id,
        runtime.directory,
        runtime.messages,
        runtime.keys,
        limits,
        fetches=settings.resync_fetches,
        home=home,
        quarantine=runtime.quarantine,
        states=None if runtime.local is None else runtime.local.states,
    )
    metrics = IndexerMetrics(runtime.registry, replica.components, budget)
    expose_bounds(bounds_of(runtime.registry), replica.components, budget, max_blocks=settings.max_index_blocks or 0)
    following = runtime.spawn(replica.run(), "indexer")
    try:
        yield IndexerService(replica, metrics, budget, max_prompt_tokens=settings.max_prompt_tokens)
    finally:
        following.cancel()
        await asyncio.wait({following})
