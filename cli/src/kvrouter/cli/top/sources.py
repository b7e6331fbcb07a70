"""Finds the services of a system, at given addresses or as registered in etcd."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import structlog
from kvrouter.cli.connections import command_api_key, command_etcd, command_tls, open_service
from kvrouter.cli.errors import CommandFailed
from kvrouter.runtime.contracts import SERVICES, Scheduler
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.runtime.overview.services import ServiceQueries, registered_addresses
from kvrouter.runtime.overview.system import System
from kvrouter.runtime.rpc import remote
from prometheus_client import CollectorRegistry

_DISCOVERY_SECONDS = 5.0
"""Maximum wait for etcd before the first frame."""

_START = "Start a system with kvrouter up or kvrouter serve, or name a running one with --etcd or --scheduler"


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
        self._queries = ServiceQueries(self.addresses, lambda: self.note, command_tls, command_api_key)

    async def look(self) -> System:
        """Returns the current state. A service that does not answer is reported and costs at most one deadline."""
        return await self._queries.look()

    def addresses(self, kind: str) -> list[str]:
        """Returns the addresses, host:port, of every ``scheduler``, ``indexer`` or ``frontend``."""
        if self._directory is None:
            where = self._where
            return list({"scheduler": where.schedulers, "indexer": where.indexers, "frontend": where.frontends}[kind])
        return registered_addresses(self._directory, kind)

    @property
    def note(self) -> str:
        """Why there is no service to query; empty if there is one."""
        if self._directory is None:
            return ""
        if not self._directory.is_synced:
            return f"etcd at {self._where.etcd} does not answer. {_START}"
        if not self._directory.services("scheduler"):
            where = f"namespace {self._where.namespace} of etcd at {self._where.etcd}"
            return f"no Scheduler is registered in {where}. {_START}"
        return ""

    async def close(self) -> None:
        """Closes all connections."""
        await self._queries.close()


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
    directory = Directory(command_etcd(where.etcd), where.namespace, CollectorRegistry(), tls=command_tls())
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


@asynccontextmanager
async def open_schedulers(where: Where) -> AsyncIterator[dict[str, Scheduler]]:
    """Yields the Schedulers of a system by address, for calls. They connect at their first call.

    Raises:
        CommandFailed: no Scheduler can be found.
    """
    async with open_sources(where) as sources:
        addresses, note = sources.addresses("scheduler"), sources.note
    if note:
        raise CommandFailed(note)
    async with AsyncExitStack() as stack:
        schedulers: dict[str, Scheduler] = {}
        for address in addresses:
            channel = await stack.enter_async_context(open_service(address, "scheduler"))
            schedulers[address] = remote(SERVICES["scheduler"], channel)
        yield schedulers
