"""Assembles a relay from its parts and runs it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import structlog
from kvrouter.publisher import worker as sdk
from kvrouter.publisher.adapters.translation import EventTranslator, TranslationOptions
from kvrouter.publisher.config import WorkerConfig
from kvrouter.publisher.errors import DescriptorMismatch
from kvrouter.publisher.journal.resume import discard, positions
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.relay.engine_sockets import EndpointRefused, Endpoints, EngineSockets
from kvrouter.relay.metrics import RelayMetrics
from kvrouter.relay.rank_relay import RankRelay, Start, read_start
from kvrouter.relay.settings import RelaySettings
from kvrouter.runtime.config.worker_options import ROLES, TRANSPORTS
from kvrouter.runtime.process.lifecycle import StartRefused
from kvrouter.v1.common_pb2 import CopyCounting
from kvrouter.v1.names import ComponentName
from prometheus_client import CollectorRegistry

log = structlog.get_logger(component="relay")

_NO_POSITION = -1
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
        ranks=dict.fromkeys(range(settings.dp_size), settings.total_blocks),
        worker_id=worker_id,
        etcd=settings.etcd,
        nats=settings.nats,
        bind=settings.bind,
        advertise=settings.advertise,
        transport=TRANSPORTS[settings.transport],
        copy_counting=_COPY_COUNTING[settings.copy_counting],
        role=ROLES[settings.role],
        labels=settings.labels,
        lora_names=tuple(settings.lora_ids.values()),
        max_model_len=settings.max_model_len,
        load_report_seconds=0,
        lease_ttl_seconds=settings.lease_seconds,
        drain_seconds=settings.drain_seconds,
        journal_path=settings.journal_path,
        # The engine says nothing of its lifetime. Journal and engine are compared by their last message instead.
        engine_incarnation=settings.kv_events if settings.journal_path else "",
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
    parts: dict[int, tuple[RankRelay, EventTranslator, RankPublisher]] = {}
    RelayMetrics(registry, parts)
    async with AsyncExitStack() as stack:
        try:
            sockets = {
                dp_rank: await stack.enter_async_context(
                    EngineSockets(
                        Endpoints.of_rank(settings.kv_events, settings.kv_replay, settings.kv_topic, dp_rank),
                        high_water_mark=settings.queued_messages,
                        replay_seconds=settings.replay_seconds,
                    )
                )
                for dp_rank in config.ranks
            }
        except EndpointRefused as error:
            raise StartRefused(f"--kv-events: {error}") from error
        log.info("relay.waiting_for_engine", kv_events=settings.kv_events, kv_replay=settings.kv_replay)
        starts = await _read_starts(sockets, positions(config))
        if not all(start.resumes for start in starts.values()):
            discard(config)
        try:
            worker = await stack.enter_async_context(sdk.running(config))
        except DescriptorMismatch as error:
            raise StartRefused(str(error)) from error
        if not worker.resumed:
            starts = await _read_starts(sockets, {}, starts)
        availability = _Availability(worker, parts, settings.engine_grace_seconds)
        options = TranslationOptions(
            settings.block_size,
            {int(number): name for number, name in settings.lora_ids.items()},
            settings.full_reports,
        )
        for dp_rank in config.ranks:
            translator = EventTranslator(worker.rank(dp_rank), options)
            relay = RankRelay(dp_rank, sockets[dp_rank], translator, settings.engine, availability.changed.set)
            parts[dp_rank] = relay, translator, worker.rank(dp_rank)
        async with asyncio.TaskGroup() as tasks:
            following = [tasks.create_task(relay.run(starts[rank])) for rank, (relay, _, _) in parts.items()]
            following.append(tasks.create_task(availability.run()))
            try:
                yield worker
            finally:
                for task in following:
                    task.cancel()


async def _read_starts(
    sockets: dict[int, EngineSockets], known: dict[int, int], former: dict[int, Start] | None = None
) -> dict[int, Start]:
    """Returns the start of each rank, from its journal's position if it is known.

    Starts in ``former`` that begin with the engine's oldest message are kept.
    """
    starts = {}
    for dp_rank, each in sockets.items():
        start = former.get(dp_rank) if former else None
        if start is not None and start.position >= 0:
            if start.rest is not None:
                await start.rest.aclose()
            start = None
        starts[dp_rank] = start or await read_start(each, known.get(dp_rank, _NO_POSITION))
    return starts


class _Availability:
    """Announces that the worker takes no requests while its engine is disconnected."""

    def __init__(
        self,
        worker: sdk.Worker,
        parts: dict[int, tuple[RankRelay, EventTranslator, RankPublisher]],
        grace_seconds: float,
    ) -> None:
        self.changed = asyncio.Event()
        """Set when a rank's connection changes."""
        self._worker = worker
        self._parts = parts
        self._grace_seconds = grace_seconds

    async def run(self) -> None:
        """Announces until cancelled."""
        self.changed.set()
        while True:
            await self.changed.wait()
            self.changed.clear()
            if self._is_connected() == self._worker.is_accepting:
                continue
            if not self._is_connected():
                try:
                    async with asyncio.timeout(self._grace_seconds):
                        await self.changed.wait()
                    continue
                except TimeoutError:
                    log.warning("relay.engine_away", worker_id=self._worker.config.worker_id)
            else:
                log.info("relay.engine_back", worker_id=self._worker.config.worker_id)
            self._worker.set_accepting(self._is_connected())

    def _is_connected(self) -> bool:
        return all(relay.counts.is_connected for relay, _, _ in self._parts.values())
