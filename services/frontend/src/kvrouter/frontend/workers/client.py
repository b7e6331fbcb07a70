"""Starts attempts of requests at workers, over connections that are kept open."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from typing import Protocol

from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.workers.attempt import Dispatch, WorkerAttempt
from kvrouter.frontend.workers.connection import Probe, WorkerConnection
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.net.calls import CallStreamCounts
from kvrouter.net.tls import Tls
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import WorkerRegistration


class WorkerPool:
    """One connection per worker address. Beyond ``max_connections`` the least recently used idle ones are closed."""

    def __init__(
        self,
        client_name: str,
        max_connections: int = 4096,
        *,
        counts: CallStreamCounts | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Connects to nobody yet.

        Args:
            client_name: Name of this Frontend in the logs of workers.
            max_connections: Number of connections above which idle ones are closed.
            counts: Counts all call streams.
            tls: Encrypts connections; None for plain text.
        """
        self._tls = tls
        self.counts = CallStreamCounts() if counts is None else counts
        self._client_name = client_name
        self.max_connections = max_connections
        self._connections: OrderedDict[str, WorkerConnection] = OrderedDict()
        self._serving_streams: set[str] = set()
        """Addresses of the workers registered as serving call streams."""

    def __len__(self) -> int:
        return len(self._connections)

    def update(self, components: Mapping[ComponentName, ComponentView]) -> None:
        """Applies the registrations: opens call streams to workers serving them."""
        self._serving_streams = {
            registration.endpoint
            for view in components.values()
            for registration in view.workers.values()
            if registration.serves_call_stream
        }
        for endpoint in self._serving_streams & self._connections.keys():
            self._connections[endpoint].open_stream()

    async def forget(self, endpoint: str) -> None:
        """Closes the connection to a worker that left, unless a call runs on it."""
        connection = self._connections.get(endpoint)
        if connection is not None and connection.idle:
            del self._connections[endpoint]
            await connection.close()

    async def probe(self, endpoint: str) -> Probe:
        """Checks a worker's health; see ``WorkerConnection.probe``."""
        connection = self.connection(endpoint)
        await self._close_surplus()
        return await connection.probe()

    async def close(self) -> None:
        """Cancels running calls and closes all connections."""
        async with asyncio.TaskGroup() as group:
            while self._connections:
                group.create_task(self._connections.popitem()[1].close())

    def connection(self, endpoint: str) -> WorkerConnection:
        """Returns the connection to a worker, which the first call opens."""
        connection = self._connections.get(endpoint)
        if connection is None:
            connection = self._connections[endpoint] = WorkerConnection(
                endpoint, self._client_name, self.counts, self._tls
            )
            if endpoint in self._serving_streams:
                connection.open_stream()
        self._connections.move_to_end(endpoint)
        return connection

    async def _close_surplus(self) -> None:
        surplus = len(self._connections) - self.max_connections
        if surplus <= 0:
            return
        idle = [endpoint for endpoint, connection in self._connections.items() if connection.idle]
        for endpoint in idle[:surplus]:
            await self._connections.pop(endpoint).close()


_ANSWER_SECONDS = 0.5


class Workers(Protocol):
    """Where attempts are started: at the workers' Generate, or at another API of theirs."""

    @property
    def health(self) -> WorkerHealth:
        """The health of the workers."""

    def can_prefill(self, worker: WorkerRegistration) -> bool:
        """Returns whether a prefill worker can compute the prompt of a request started here."""

    def start(self, dispatch: Dispatch) -> WorkerAttempt:
        """Starts a request at a worker. The caller waits for ``ended``, or cancels the attempt."""

    async def answers(self, endpoint: str) -> bool:
        """Returns whether a worker is registered and answers a probe soon."""

    async def is_reachable(self, endpoint: str) -> bool:
        """Returns False if a worker refuses connections now. There may be a connection already."""

    async def abort(self, endpoint: str, request_id: str) -> bool:
        """Aborts a request a worker may still run. Returns whether the worker could be reached soon."""


class WorkerClient:
    """Calls workers, limits their output, and records their health."""

    def __init__(self, pool: WorkerPool, health: WorkerHealth, metrics: FrontendMetrics) -> None:
        self._pool = pool
        self.metrics = metrics
        self.health = health

    def can_prefill(self, worker: WorkerRegistration) -> bool:  # noqa: ARG002 - any can
        """Returns True: every worker has a Generate."""
        return True

    def start(self, dispatch: Dispatch) -> WorkerAttempt:
        """Starts a request at a worker, and limits its output.

        The attempt leaves a worker that stops answering probes as soon as ``may_leave`` returns True.
        """
        endpoint, deadline = dispatch.endpoint, dispatch.deadline
        attempt = WorkerAttempt(dispatch, self.health.begin(endpoint, dispatch.prompt_tokens), self.metrics)
        encoded = dispatch.request.encode(dispatch.prompt)
        connection = self._pool.connection(endpoint)
        attempt.start(lambda receiver: connection.generate(encoded, receiver, deadline=deadline))
        return attempt

    async def answers(self, endpoint: str) -> bool:
        """Returns whether a worker is registered and answers a probe within half a second."""
        return endpoint in self.health.endpoints() and await self._probe(endpoint) is Probe.ANSWERED

    async def is_reachable(self, endpoint: str) -> bool:
        """Returns False if a worker refuses connections now. Costs nothing if there is a connection already."""
        is_connected = self._pool.connection(endpoint).is_connected
        return is_connected or await self._probe(endpoint) is not Probe.UNREACHABLE

    async def _probe(self, endpoint: str) -> Probe:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await self._pool.probe(endpoint)
        except TimeoutError:
            return Probe.SILENT

    async def abort(self, endpoint: str, request_id: str) -> bool:
        """Aborts a request a worker may still run. Returns whether the worker could be reached soon."""
        return await self._pool.connection(endpoint).abort(request_id)
