"""The registered Indexers behind one interface, with failover."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from kvrouter.net import trace_context
from kvrouter.net.calls import CallStreamCounts
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.runtime.rpc import call_stream_client, remote_on_call_stream
from kvrouter.scheduler.identifiers import component_message
from kvrouter.scheduler.overlap.indexer_query import OverlapIndex
from kvrouter.v1 import indexer_pb2
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.errors import DependencyAway, KvRouterError
from kvrouter.v1.names import ComponentName
from kvrouter.v1.packed_pb2 import PackedFindMatchesRequest, PackedLocalHashes

_DESCRIPTOR = indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"]


@dataclass(frozen=True, slots=True)
class _Connection:
    stub: Any
    """Has the calls of the Indexer in encoded form."""
    running: asyncio.Task[None]
    """Keeps the call stream open until it is cancelled."""


@dataclass(eq=False)
class RemoteIndexers:
    """Finds Indexers in the Directory, and queries them on call streams. Callable, as an ``IndexerSource``.

    ``run`` must be running.

    ``client_name`` is the name of this Scheduler for the Indexers' logs.
    """

    directory: Directory
    client_name: str
    counts: CallStreamCounts
    _connections: dict[str, _Connection] = field(default_factory=dict, init=False)
    _registered: object = field(default=None, init=False)
    _ready: dict[ComponentName, _Failover | None] = field(default_factory=dict, init=False)
    """The ready Indexers of components among those registered."""
    _avoided: set[str] = field(default_factory=set, init=False)
    _group: asyncio.TaskGroup | None = field(default=None, init=False)

    def __call__(self, component: ComponentName) -> OverlapIndex | None:
        """Returns the ready Indexers of a component as one; None if there are none."""
        registered = self.directory.services("indexer")
        if registered is not self._registered:
            self._registered, self._ready = registered, {}
        if component not in self._ready:
            endpoints = self.directory.ready_indexers(component)
            self._ready[component] = _Failover(self, endpoints) if endpoints else None
        return self._ready[component]

    def stub(self, endpoint: str) -> Any:
        """Returns a stub of the Indexer at an address.

        Raises:
            DependencyAway: ``run`` is not running, because the Scheduler is starting or stopping.
        """
        connection = self._connections.get(endpoint)
        if connection is None:
            if self._group is None:
                raise DependencyAway("the Scheduler is starting or stopping")
            client = call_stream_client(
                endpoint, client_name=self.client_name, counts=self.counts, tls=self.directory.tls, role="indexer"
            )
            running = self._group.create_task(
                client.run(), name=f"call stream to {endpoint}", context=trace_context.background()
            )
            connection = self._connections[endpoint] = _Connection(remote_on_call_stream(_DESCRIPTOR, client), running)
        return connection.stub

    def preferred(self, endpoints: list[str]) -> list[str]:
        """Returns the addresses, with those whose last call failed at the end."""
        return sorted(endpoints, key=self._avoided.__contains__)

    def note(self, endpoint: str, *, answered: bool) -> None:
        """Records whether the last call to an address was answered."""
        if answered:
            self._avoided.discard(endpoint)
        else:
            self._avoided.add(endpoint)

    async def run(self) -> None:
        """Stays connected to the registered Indexers until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            try:
                async for directory in self.directory.changes():
                    live = {registration.endpoint for registration in directory.services("indexer").values()}
                    self._avoided &= live
                    for endpoint in self._connections.keys() - live:
                        self._connections.pop(endpoint).running.cancel()
                    for endpoint in live:
                        self.stub(endpoint)
            finally:
                self._group = None
                for connection in self._connections.values():
                    connection.running.cancel()
                self._connections.clear()


class _Failover:
    """Queries one Indexer after another within one deadline, those first whose last call was answered."""

    def __init__(self, indexers: RemoteIndexers, endpoints: list[str]) -> None:
        self._indexers = indexers
        self._endpoints = endpoints

    async def find_matches_of_hashes(
        self, component: ComponentName, local_hashes: bytes, *, block_size: int, deadline: Deadline
    ) -> bytes:
        """Returns the first answer.

        Raises:
            KvRouterError: every Indexer failed; this is the last one's error.
        """
        request = PackedFindMatchesRequest(
            component=_component(component), local_hashes=PackedLocalHashes(hashes=local_hashes), block_size=block_size
        )
        last: KvRouterError | None = None
        for endpoint in self._indexers.preferred(self._endpoints):
            answered = False
            try:
                response: bytes = await self._indexers.stub(endpoint).find_matches_encoded(request, deadline=deadline)
                answered = True
            except KvRouterError as error:
                last = error.untraced()
            else:
                return response
            finally:
                # Also if the caller cancels the call.
                self._indexers.note(endpoint, answered=answered)
        assert last is not None  # noqa: S101 - there is one endpoint at least
        raise last.untraced()


@lru_cache(maxsize=64)
def _component(name: ComponentName) -> Component:
    return component_message(name)
