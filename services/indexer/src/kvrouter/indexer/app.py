"""Puts an Indexer together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrouter.indexer.api.service import IndexerService
from kvrouter.indexer.replica.component import Limits
from kvrouter.indexer.replica.metrics import IndexerMetrics
from kvrouter.indexer.replica.replica import Replica
from kvrouter.indexer.settings import IndexerSettings
from kvrouter.indexer.snapshots.coordinator import SnapshotHome, SnapshotOptions
from kvrouter.runtime.process.context import Runtime


@asynccontextmanager
async def running(settings: IndexerSettings, runtime: Runtime) -> AsyncIterator[IndexerService]:
    """An Indexer's object with the tasks that keep it up to date, while the context lasts.

    It answers at once, with NotReady until etcd and NATS are there and a component is restored.
    """
    limits = Limits(
        settings.max_index_blocks, settings.max_index_bytes, settings.worker_grace_seconds, settings.compare_seconds
    )
    options = SnapshotOptions(
        settings.snapshot_threshold,
        settings.snapshot_check_seconds,
        settings.snapshot_lock_seconds,
        settings.reset_states,
        settings.reset_states_even_if_others_live,
    )
    home = SnapshotHome(runtime.etcd_endpoints, runtime.instance_id, options, runtime.quarantine)
    replica = Replica(
        runtime.instance_id,
        runtime.directory,
        runtime.nats,
        runtime.keys,
        limits,
        fetches=settings.resync_fetches,
        home=home,
        quarantine=runtime.quarantine,
    )
    metrics = IndexerMetrics(runtime.registry, replica.components)
    following = runtime.spawn(replica.run(), "indexer")
    try:
        yield IndexerService(replica, metrics, max_prompt_tokens=settings.max_prompt_tokens)
    finally:
        following.cancel()
        await asyncio.wait({following})
