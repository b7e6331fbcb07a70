"""Chooses the deciding Scheduler of a component by rendezvous hashing, unless it recently failed to answer."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Collection, Iterable
from typing import Protocol

import structlog
from kvrouter.frontend.schedulers.scheduler_connection import LocalConnection, SchedulerConnection, StreamConnection
from kvrouter.net import trace_context
from kvrouter.net.calls import CallStreamCounts
from kvrouter.net.ticks import tick
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.v1 import scheduler_pb2 as pb
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.names import ComponentName

log = structlog.get_logger(component="frontend")

_REGISTRATION_SECONDS = 1.0
"""Interval at which registrations of connected Schedulers are checked."""

_AVOIDED_SECONDS = 15.0
"""Time for which a Scheduler that did not answer is avoided, seconds: longer than the lease of a dead Scheduler."""


def rendezvous(component: ComponentName, scheduler_ids: Iterable[str], shard: int = 0) -> str | None:
    """Returns the Scheduler with the highest hash; None if there is none.

    All clients agree on it without communication. When a Scheduler leaves, only its components move. ``shard`` 0 is
    the whole component; if the component is sharded, each shard has a Scheduler of its own.
    """
    place = f"{component}#{shard}" if shard else str(component)

    def score(scheduler_id: str) -> bytes:
        return hashlib.sha256(f"{place}\0{scheduler_id}".encode()).digest()

    return max(scheduler_ids, key=score, default=None)


class SchedulerSource(Protocol):
    """Picks the Scheduler of a component or of one of its shards."""

    def pick(
        self, component: ComponentName, avoid: Collection[str] = (), shard: int = 0
    ) -> tuple[str, SchedulerConnection] | None:
        """Returns id and connection of the component's Scheduler; None if none is live.

        A Scheduler in ``avoid`` is picked only if there is no other. ``shard`` 0 is the whole component.
        """

    def everyone(self) -> list[Scheduler]:
        """Returns every Scheduler that may be picked."""

    def count(self) -> int:
        """Returns how many Schedulers may be picked."""

    def is_live(self, scheduler_id: str) -> bool:
        """Returns whether the Scheduler may be picked."""

    async def changed(self) -> None:
        """Returns when ``pick`` may return another Scheduler."""


class LocalScheduler:
    """Source of a single Scheduler in the same process, for a system without etcd."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._connection = LocalConnection(scheduler)

    def pick(
        self,
        component: ComponentName,  # noqa: ARG002 - it serves them all
        avoid: Collection[str] = (),  # noqa: ARG002 - there is no other
        shard: int = 0,  # noqa: ARG002
    ) -> tuple[str, SchedulerConnection] | None:
        """Returns the Scheduler."""
        return "local", self._connection

    def everyone(self) -> list[Scheduler]:
        """Returns the Scheduler."""
        return [self._connection.scheduler]

    def count(self) -> int:
        """Returns 1."""
        return 1

    def is_live(self, scheduler_id: str) -> bool:
        """Returns whether the id is that of the Scheduler."""
        return scheduler_id == "local"

    async def changed(self) -> None:
        """Never returns, because the choice never changes."""
        await asyncio.Event().wait()


class RemoteSchedulers:
    """Source of the Schedulers registered and ready, which may include one in this process."""

    def __init__(
        self,
        directory: Directory,
        own: tuple[str, Scheduler] | None = None,
        *,
        client_name: str = "frontend",
        counts: CallStreamCounts | None = None,
    ) -> None:
        """``own`` is the id and object of a Scheduler in this process.

        ``client_name`` names this Frontend in the logs of Schedulers; ``counts`` counts its call streams to them.

        The own Scheduler is called without a socket, and it is used while no Scheduler is ready. Otherwise rendezvous
        hashing decides as for any other Scheduler, so several processes with a Frontend and a Scheduler agree on
        one.
        """
        self._directory = directory
        self._own = None if own is None else (own[0], LocalConnection(own[1]))
        self._client_name = client_name
        self._counts = CallStreamCounts() if counts is None else counts
        self._connections: dict[str, StreamConnection] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def pick(
        self, component: ComponentName, avoid: Collection[str] = (), shard: int = 0
    ) -> tuple[str, SchedulerConnection] | None:
        """Returns id and connection of the component's Scheduler; one in ``avoid`` only if there is no other."""
        ready = self._ready()
        scheduler_id = rendezvous(component, ready - set(avoid) or ready, shard)
        return None if scheduler_id is None else (scheduler_id, self._connection(scheduler_id))

    def everyone(self) -> list[Scheduler]:
        """Returns every Scheduler that may be picked."""
        return [self._connection(scheduler_id).scheduler for scheduler_id in self._ready()]

    def count(self) -> int:
        """Returns how many Schedulers may be picked."""
        return len(self._ready())

    def is_live(self, scheduler_id: str) -> bool:
        """Returns whether the Scheduler is registered and ready."""
        return scheduler_id in self._ready()

    def _ready(self) -> set[str]:
        ready = {key for key, registration in self._directory.services("scheduler").items() if registration.ready}
        return ready or ({self._own[0]} if self._own is not None else ready)

    def _connection(self, scheduler_id: str) -> SchedulerConnection:
        if self._own is not None and scheduler_id == self._own[0]:
            return self._own[1]
        endpoint = self._directory.services("scheduler")[scheduler_id].endpoint
        connection = self._connections.get(endpoint)
        if connection is None:
            connection = self._connections[endpoint] = StreamConnection(
                endpoint, client_name=self._client_name, counts=self._counts, tls=self._directory.tls
            )
            keeping = asyncio.create_task(
                self._keep(endpoint, connection), name=f"call stream to {endpoint}", context=trace_context.background()
            )
            self._tasks.add(keeping)
            keeping.add_done_callback(self._tasks.discard)
        return connection

    async def _keep(self, endpoint: str, connection: StreamConnection) -> None:
        """Keeps a connection open until its Scheduler is no longer registered and has answered its calls.

        The address may be somebody else's from then on, who would be shown the service token.
        """
        running = asyncio.create_task(connection.run())
        try:
            # Calls end without a notice.
            while not running.done() and (connection.running_calls or self._is_registered(endpoint)):
                await tick(_REGISTRATION_SECONDS)
        finally:
            del self._connections[endpoint]
            running.cancel()
            await asyncio.wait({running})

    def _is_registered(self, endpoint: str) -> bool:
        return any(registration.endpoint == endpoint for registration in self._directory.services("scheduler").values())

    async def changed(self) -> None:
        """Returns at the next change of the registrations."""
        await self._directory.changed()

    async def aclose(self) -> None:
        """Closes the call streams."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))


class SchedulerChoice:
    """The Schedulers of one component or shard, and which of them to avoid."""

    def __init__(self, component: ComponentName, source: SchedulerSource, shard: int) -> None:
        self._component = component
        self._source = source
        self._shard = shard
        self._until: dict[str, float] = {}

    @property
    def avoided(self) -> Collection[str]:
        """Ids of the Schedulers to avoid."""
        now, live = time.monotonic(), self._source.is_live
        # A Scheduler that left and registers again is another process, or has recovered.
        self._until = {each: until for each, until in self._until.items() if now < until and live(each)}
        return self._until.keys()

    def avoid(self, scheduler_id: str, cause: str) -> None:
        """Avoids a Scheduler for 15 s if there is another."""
        if scheduler_id not in self.avoided:
            log.info("scheduler.avoided", scheduler=scheduler_id, component_name=str(self._component), cause=cause)
        self._until[scheduler_id] = time.monotonic() + _AVOIDED_SECONDS

    def pick(self) -> tuple[str, SchedulerConnection] | None:
        """Returns the Scheduler to open a session at: an avoided one if there is no other, None if none is live."""
        return self._source.pick(self._component, self.avoided, self._shard)

    def better_than(self, scheduler_id: str) -> tuple[str, SchedulerConnection] | None:
        """Returns the Scheduler to move to; None if the given one is the choice."""
        return self._other(scheduler_id, self.avoided)

    def instead_of(self, scheduler_id: str) -> tuple[str, SchedulerConnection] | None:
        """Returns the Scheduler to move to if the given one does not answer; None if there is none."""
        return self._other(scheduler_id, {*self.avoided, scheduler_id})

    async def answers(self, scheduler_id: str, connection: SchedulerConnection, seconds: float) -> bool:
        """Returns whether a Scheduler answers a call in time. One that does not is avoided."""
        try:
            # The cheapest call that needs the Scheduler's event loop.
            deadline = Deadline.after(seconds)
            await connection.scheduler.list_busy_thresholds(pb.ListBusyThresholdsRequest(), deadline=deadline)
        except KvRouterError as error:
            self.avoid(scheduler_id, error.message)
            return False
        return True

    async def changed(self) -> None:
        """Returns when the choice may have changed."""
        try:
            async with asyncio.timeout(_AVOIDED_SECONDS if self._until else None):
                await self._source.changed()
        except TimeoutError:
            return

    def _other(self, scheduler_id: str, avoided: Collection[str]) -> tuple[str, SchedulerConnection] | None:
        other = self._source.pick(self._component, avoided, self._shard)
        return None if other is None or other[0] == scheduler_id or other[0] in avoided else other
