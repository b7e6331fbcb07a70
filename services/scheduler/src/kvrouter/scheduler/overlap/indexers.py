"""The registered Indexers behind one interface, with failover."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import grpc.aio
from kvrouter.runtime.contracts import Indexer
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.runtime.errors import KvRouterError
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import indexer_pb2
from kvrouter.v1.indexer_pb2 import FindMatchesRequest, FindMatchesResponse
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ServiceRegistration

_DESCRIPTOR = indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"]


class RemoteIndexers:
    """Finds Indexers in the Directory. Callable, so that it is an ``IndexerSource``."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, Indexer] = {}
        self._avoided: set[str] = set()

    def __call__(self, component: ComponentName) -> Indexer | None:
        """Returns the ready Indexers of a component as one; None if there are none."""
        endpoints = [
            registration.endpoint
            for _, registration in sorted(self._directory.services("indexer").items())
            if registration.ready and _covers(registration, component)
        ]
        return cast(Indexer, _Failover(self, endpoints)) if endpoints else None

    def stub(self, endpoint: str) -> Indexer:
        """Returns a stub of the Indexer at an address."""
        stub = self._stubs.get(endpoint)
        if stub is None:
            channel = self._channels[endpoint] = open_channel(endpoint)
            stub = self._stubs[endpoint] = cast(Indexer, remote(_DESCRIPTOR, channel))
        return stub

    def preferred(self, endpoints: list[str]) -> list[str]:
        """Returns the addresses, with those whose last call failed at the end."""
        return sorted(endpoints, key=lambda endpoint: endpoint in self._avoided)

    def note(self, endpoint: str, *, answered: bool) -> None:
        """Records whether the last call to an address was answered."""
        if answered:
            self._avoided.discard(endpoint)
        else:
            self._avoided.add(endpoint)

    async def run(self) -> None:
        """Closes the channels of Indexers that unregistered; on exit, all channels."""
        try:
            async for directory in self._directory.changes():
                live = {registration.endpoint for registration in directory.services("indexer").values()}
                self._avoided &= live
                await self._close(self._channels.keys() - live)
        finally:
            await self._close(self._channels.keys())

    async def _close(self, endpoints: Iterable[str]) -> None:
        for endpoint in list(endpoints):
            del self._stubs[endpoint]
            await self._channels.pop(endpoint).close()


class _Failover:
    """Queries one Indexer after another within one deadline, those first whose last call was answered."""

    def __init__(self, indexers: RemoteIndexers, endpoints: list[str]) -> None:
        self._indexers = indexers
        self._endpoints = endpoints

    async def find_matches(self, request: FindMatchesRequest, *, deadline: Deadline) -> FindMatchesResponse:
        """Returns the first answer.

        Raises:
            KvRouterError: every Indexer failed; this is the last one's error.
        """
        last: KvRouterError | None = None
        for endpoint in self._indexers.preferred(self._endpoints):
            answered = False
            try:
                response = await self._indexers.stub(endpoint).find_matches(request, deadline=deadline)
                answered = True
            except KvRouterError as error:
                last = error.untraced()
            else:
                return response
            finally:
                # Also if the caller's timeout cancels the call.
                self._indexers.note(endpoint, answered=answered)
        assert last is not None  # noqa: S101 - there is one endpoint at least
        raise last.untraced()


def _covers(registration: ServiceRegistration, component: ComponentName) -> bool:
    return not registration.components or any(
        (each.namespace, each.name) == (component.namespace, component.name) for each in registration.components
    )
