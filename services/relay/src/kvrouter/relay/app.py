"""Assembles a relay from its parts and runs it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import structlog
from kvrouter.engines.events.translation import TranslationOptions
from kvrouter.engines.relay.engine_sockets import EndpointRefused, Endpoints
from kvrouter.engines.relay.metrics import RelayMetrics
from kvrouter.engines.relay.relaying import EventSource, RelayedRanks, relaying
from kvrouter.publisher import worker as sdk
from kvrouter.publisher.config import WorkerConfig
from kvrouter.publisher.errors import DescriptorMismatch
from kvrouter.relay.settings import RelaySettings
from kvrouter.runtime.config.fields import ROLES, TRANSPORTS
from kvrouter.runtime.process.lifecycle import StartRefused
from kvrouter.runtime.telemetry.connection_metrics import CallerMetrics, expose_servers
from kvrouter.v1.common_pb2 import CopyCounting
from kvrouter.v1.names import ComponentName
from prometheus_client import CollectorRegistry

log = structlog.get_logger(component="relay")

_COPY_COUNTING = {"counted": CopyCounting.COPY_COUNTING_COUNTED, "set": CopyCounting.COPY_COUNTING_SET}


def worker_config(settings: RelaySettings, worker_id: int) -> WorkerConfig:
    """Returns the worker's configuration for the SDK.

    Raises:
        InvalidConfig: a setting is out of range.
    """
    return WorkerConfig(
        component=ComponentName(settings.namespace, settings.component),
        model=settings.model,
        block_size=settings.block_size,
        ranks=dict.fromkeys(
            range(settings.dp_start_rank, settings.dp_start_rank + settings.dp_size), settings.total_blocks
        ),
        worker_id=worker_id,
        etcd=settings.etcd_access(),
        nats=settings.nats_access(),
        bind=settings.bind,
        advertise=settings.advertise,
        tls=settings.tls_options(),
        service_token_file=settings.service_token_file,
        transport=TRANSPORTS[settings.transport],
        copy_counting=_COPY_COUNTING[settings.copy_counting],
        role=ROLES[settings.role],
        labels=settings.labels,
        lora_names=tuple(settings.lora_ids.values()),
        max_model_len=settings.max_model_len,
        load_report_seconds=0,
        lease_ttl_seconds=settings.lease_seconds,
        drain_seconds=settings.drain_seconds,
        state=settings.state,
        state_seconds=settings.state_seconds,
        # The engine says nothing of its lifetime. State and engine are compared by their last message instead.
        engine_incarnation=settings.kv_events if settings.state else "",
    )


@asynccontextmanager
async def running(settings: RelaySettings, registry: CollectorRegistry) -> AsyncIterator[sdk.Worker]:
    """Relays while the context lasts. Waits for the engine first, if it can repeat messages.

    Raises:
        InvalidConfig: a setting is out of range.
        StartRefused: the worker does not match its component's descriptor, or an endpoint cannot be used.
    """
    worker_id = settings.worker_id if settings.worker_id is not None else secrets.randbits(53) | 1
    config = worker_config(settings, worker_id)
    parts: RelayedRanks = {}
    RelayMetrics(registry, {worker_id: parts})
    changed = asyncio.Event()
    source = EventSource(
        {
            dp_rank: Endpoints.of_rank(settings.kv_events, settings.kv_replay, settings.kv_topic, dp_rank)
            for dp_rank in config.ranks
        },
        settings.engine,
        settings.queued_messages,
        settings.replay_seconds,
    )
    options = TranslationOptions(
        settings.block_size,
        {int(number): name for number, name in settings.lora_ids.items()},
        settings.full_reports,
        settings.offloaded_blocks,
    )
    async with AsyncExitStack() as stack:
        log.info("relay.waiting_for_engine", kv_events=settings.kv_events, kv_replay=settings.kv_replay)
        try:
            worker = await stack.enter_async_context(relaying(config, source, options, parts, changed.set))
        except EndpointRefused as error:
            raise StartRefused(f"--kv-events: {error}") from error
        except DescriptorMismatch as error:
            raise StartRefused(str(error)) from error
        CallerMetrics(registry, lambda: [worker.server.callers])
        expose_servers(registry, lambda: [worker.server.grpc])
        availability = _Availability(worker, parts, changed, settings.engine_grace_seconds)
        async with asyncio.TaskGroup() as tasks:
            announcing = tasks.create_task(availability.run())
            try:
                yield worker
            finally:
                announcing.cancel()


class _Availability:
    """Announces whether the worker takes requests: only while its engine is connected."""

    def __init__(
        self,
        worker: sdk.Worker,
        parts: RelayedRanks,
        changed: asyncio.Event,
        grace_seconds: float,
    ) -> None:
        """``changed`` is set when a rank's connection changes."""
        self._changed = changed
        self._worker = worker
        self._parts = parts
        self._grace_seconds = grace_seconds

    async def run(self) -> None:
        """Announces until cancelled."""
        self._changed.set()
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._is_connected() == self._worker.is_accepting:
                continue
            if not self._is_connected():
                try:
                    async with asyncio.timeout(self._grace_seconds):
                        await self._changed.wait()
                    continue
                except TimeoutError:
                    log.warning("relay.engine_away", worker_id=self._worker.config.worker_id)
            else:
                log.info("relay.engine_back", worker_id=self._worker.config.worker_id)
            self._worker.set_accepting(self._is_connected())

    def _is_connected(self) -> bool:
        return all(relay.counts.is_connected for relay, _, _ in self._parts.values())
