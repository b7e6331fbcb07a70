"""Calls the registered Indexers on behalf of clients that ask about the index."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import cast

from kvrouter.runtime.contracts import Indexer
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import indexer_pb2
from kvrouter.v1.errors import DependencyAway
from kvrouter.v1.names import ComponentName

_DESCRIPTOR = indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"]


class IndexerClient:
    """Opens a channel to each Indexer at its first use."""

    def __init__(self, directory: Directory, own: Indexer | None = None) -> None:
        """``own`` is an Indexer in this process, which is used instead."""
        self._directory = directory
        self._own = own
        self._stubs: dict[str, Indexer] = {}
        self._channels = AsyncExitStack()

    async def indexer(self, component: ComponentName) -> Indexer:
        """Returns a stub of a ready Indexer of a component.

        Raises:
            DependencyAway: there is none.
        """
        if self._own is not None:
            return self._own
        endpoints = self._directory.ready_indexers(component)
        if not endpoints:
            raise DependencyAway(f"no Indexer of {component} is registered and ready")
        return await self._stub(endpoints[0])

    async def close(self) -> None:
        """Closes the channels."""
        await self._channels.aclose()

    async def _stub(self, endpoint: str) -> Indexer:
        stub = self._stubs.get(endpoint)
        if stub is None:
            channel = open_channel(endpoint, tls=self._directory.tls, role="indexer")
            stub = self._stubs[endpoint] = cast(Indexer, remote(_DESCRIPTOR, channel))
            await self._channels.enter_async_context(channel)
        return stub
