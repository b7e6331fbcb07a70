"""Replica sync over NATS: one channel for each registered component."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from kvrouter.net.decoding import Quarantine
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.scheduler.replication.nats_channel import SyncChannel
from kvrouter.scheduler.replication.sync import ReplicaSync
from kvrouter.v1.names import ComponentName
from kvrouter.v1.sync_pb2 import ReplicaSyncEvent
from nats.aio.client import Client

_SETTLE_SECONDS = 3.0
"""Longest wait at start for the states of other Schedulers, seconds."""


class SyncLink:
    """Connects a ReplicaSync to NATS. ``run`` must be running."""

    def __init__(
        self,
        sync: ReplicaSync,
        connect: Callable[[], Awaitable[Client]],
        directory: Directory,
        *,
        heartbeat_seconds: float,
        quarantine: Quarantine | None = None,
    ) -> None:
        """Does not connect yet. ``connect`` returns the connection once NATS is reachable."""
        self._quarantine = Quarantine() if quarantine is None else quarantine
        self._sync = sync
        self._connect = connect
        self._directory = directory
        self._heartbeat_seconds = heartbeat_seconds
        self._channels: dict[ComponentName, SyncChannel] = {}
        self._give_up_settling = time.monotonic() + _SETTLE_SECONDS
        self._settled = False
        sync.send = self._send
        sync.metrics.remote_bookings.set_function(sync.remote_bookings)
        sync.metrics.replicas.set_function(sync.replicas)
        sync.metrics.incomplete.set_function(sync.incomplete)
        sync.metrics.unsent_waiting.set_function(lambda: self.outgoing)

    @property
    def settled(self) -> bool:
        """Whether the states of all ready Schedulers have arrived, or were waited for long enough."""
        if not self._settled:
            self._settled = time.monotonic() >= self._give_up_settling or self._has_all()
        return self._settled

    @property
    def most_outgoing(self) -> int:
        """Largest number of unsent replication events of one component."""
        return max((channel.outgoing.qsize() for channel in self._channels.values()), default=0)

    @property
    def outgoing(self) -> int:
        """Number of unsent events."""
        return sum(channel.outgoing.qsize() for channel in self._channels.values())

    async def run(self) -> None:
        """Follows the components until cancelled."""
        client = await self._connect()
        running: dict[ComponentName, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            async for directory in self._directory.changes():
                for gone in running.keys() - directory.components.keys():
                    del self._channels[gone]
                    running.pop(gone).cancel()
                for name in directory.components.keys() - running.keys():
                    channel = self._channels[name] = SyncChannel(
                        self._sync, name, client, self._heartbeat_seconds, self._quarantine
                    )
                    running[name] = group.create_task(channel.run(), name=f"sync of {name}")

    def expire(self) -> None:
        """Drops the bookings of gone Schedulers."""
        self._sync.expire(self._directory.services("scheduler").keys())

    def _send(self, component: ComponentName, event: ReplicaSyncEvent) -> None:
        channel = self._channels.get(component)
        if channel is None or not channel.put(event):
            self._sync.metrics.unsent.inc()

    def _has_all(self) -> bool:
        _, own_id = self._sync.booking_table.here
        services = self._directory.services("scheduler")
        others = {scheduler_id for scheduler_id, service in services.items() if service.ready} - {own_id}
        return self._directory.is_synced and all(
            name in self._channels
            and others
            <= {event_log.scheduler[1] for event_log in self._sync.of(name).logs if not event_log.state_requested}
            for name in self._directory.components
        )
