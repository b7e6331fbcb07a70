"""Queries the services of a system, at given addresses or as registered in etcd."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import cast

import grpc.aio
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from kvrouter.cli.tls import command_tls
from kvrouter.cli.top.system_view import FrontendView, IndexerView, SchedulerView, System
from kvrouter.runtime.contracts import Frontend, Indexer, Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.runtime.errors import KvRouterError
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import frontend_pb2, indexer_pb2, scheduler_pb2
from kvrouter.v1.frontend_pb2 import GetWorkerHealthRequest
from kvrouter.v1.indexer_pb2 import GetStatsRequest
from kvrouter.v1.registry_pb2 import ServiceRegistration
from kvrouter.v1.scheduler_pb2 import GetStatusRequest
from prometheus_client import CollectorRegistry

_SCHEDULER = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
_FRONTEND = frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"]
_INDEXER = indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"]
_CALL_SECONDS = 2.0
"""Deadline of each call, which limits the delay of a frame."""
_DISCOVERY_SECONDS = 5.0
"""Maximum wait for etcd before the first frame."""
_DECISIONS, _HELD = 50, 5


@dataclass(frozen=True, slots=True)
class Where:
    """How to find the services of a system."""

    schedulers: Sequence[str]
    """Addresses, host:port. With these or ``indexers``, etcd is not used."""
    indexers: Sequence[str]
    etcd: str
    namespace: str
    frontends: Sequence[str] = ()


class Sources:
    """Queries all services. Created by ``open_sources``."""

    def __init__(self, where: Where, directory: Directory | None) -> None:
        self._where = where
        self._directory = directory
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def look(self) -> System:
        """Returns the current state. A service that does not answer is reported and costs at most one deadline."""
        schedulers, indexers, frontends = map(self.addresses, ("scheduler", "indexer", "frontend"))
        await self._close(self._channels.keys() - {*schedulers, *indexers, *frontends})
        scheduler_views, indexer_views, frontend_views = await asyncio.gather(
            asyncio.gather(*(self._ask_scheduler(address) for address in schedulers)),
            asyncio.gather(*(self._ask_indexer(address) for address in indexers)),
            asyncio.gather(*(self._ask_frontend(address) for address in frontends)),
        )
        return System(datetime.now(UTC).astimezone(), scheduler_views, indexer_views, frontend_views, self.note)

    def addresses(self, kind: str) -> list[str]:
        """Returns the addresses, host:port, of every ``scheduler``, ``indexer`` or ``frontend``."""
        if self._directory is None:
            where = self._where
            return list({"scheduler": where.schedulers, "indexer": where.indexers, "frontend": where.frontends}[kind])
        # A service that was killed and restarted at its address is registered twice until the first lease expires.
        return list(dict.fromkeys(each.endpoint for each in _by_id(self._directory.services(kind))))

    @property
    def note(self) -> str:
        """Why there is no service to query; empty if there is one."""
        if self._directory is None:
            return ""
        if not self._directory.is_synced:
            return f"etcd at {self._where.etcd} does not answer"
        if not self._directory.services("scheduler"):
            return f"no Scheduler is registered in namespace {self._where.namespace} of etcd at {self._where.etcd}"
        return ""

    async def close(self) -> None:
        """Closes all connections."""
        await self._close(list(self._channels))

    async def _ask_scheduler(self, address: str) -> SchedulerView:
        scheduler = cast(Scheduler, self._stub(_SCHEDULER, address, "scheduler"))
        request = GetStatusRequest(decisions=_DECISIONS, queued_requests=_HELD)
        try:
            return SchedulerView(address, await scheduler.get_status(request, deadline=Deadline.after(_CALL_SECONDS)))
        except KvRouterError as error:
            return SchedulerView(address, failure=_why(error))

    async def _ask_indexer(self, address: str) -> IndexerView:
        indexer = cast(Indexer, self._stub(_INDEXER, address, "indexer"))
        try:
            stats = await indexer.get_stats(GetStatsRequest(), deadline=Deadline.after(_CALL_SECONDS))
            return IndexerView(address, stats)
        except KvRouterError as error:
            return IndexerView(address, failure=_why(error))

    async def _ask_frontend(self, address: str) -> FrontendView:
        frontend = cast(Frontend, self._stub(_FRONTEND, address, "frontend"))
        try:
            health = await frontend.get_worker_health(GetWorkerHealthRequest(), deadline=Deadline.after(_CALL_SECONDS))
            return FrontendView(address, health)
        except KvRouterError as error:
            return FrontendView(address, failure=_why(error))

    def _stub(self, descriptor: ServiceDescriptor, address: str, role: str) -> object:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address, tls=command_tls(), role=role)
        return remote(descriptor, channel)

    async def _close(self, addresses: Iterable[str]) -> None:
        for address in list(addresses):
            await self._channels.pop(address).close()


@asynccontextmanager
async def open_sources(where: Where) -> AsyncIterator[Sources]:
    """Yields the sources. With discovery through etcd, they are complete once etcd has answered or after 5 s."""
    # Log lines would damage the drawing; the frames show what matters of them.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if where.schedulers or where.indexers:
        sources = Sources(where, None)
        try:
            yield sources
        finally:
            await sources.close()
        return
    directory = Directory(where.etcd, where.namespace, CollectorRegistry())
    async with asyncio.TaskGroup() as group:
        following = group.create_task(directory.run(), name="directory")
        sources = Sources(where, directory)
        try:
            async with asyncio.timeout(_DISCOVERY_SECONDS):
                await directory.synced()
        except TimeoutError:
            pass  # the frames show it
        try:
            yield sources
        finally:
            following.cancel()
            await sources.close()


def _why(error: KvRouterError) -> str:
    """Returns the reason of a failed call, for a failed connection only its last part: ``Connection refused``."""
    words = str(error)
    return words.rpartition(": ")[2] if error.code is grpc.StatusCode.UNAVAILABLE else words


def _by_id(services: Mapping[str, ServiceRegistration]) -> list[ServiceRegistration]:
    return [registration for _, registration in sorted(services.items())]
