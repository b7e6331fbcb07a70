"""Replica sync over a network: sends and receives events, and fetches states, on a channel per component.

A network may lose messages. A slow reader, a lost connection or a full buffer shows as a gap in a Scheduler's sequence
or in its next heartbeat, and is repaired by fetching its state. Therefore nothing here waits for the network, and
nothing is stored while it is away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import structlog
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.scheduler.identifiers import component_message
from kvrouter.scheduler.replication.event_log import EventLog
from kvrouter.scheduler.replication.replicas import Replicas, ReplicaSync
from kvrouter.scheduler.replication.state_transfer import Fetch, StateBroken
from kvrouter.v1.names import ComponentName, InvalidName, check_name
from kvrouter.v1.sync_pb2 import ReplicaSyncEvent, SyncStateResponse

log = structlog.get_logger(component="scheduler")

MAX_OUTGOING = 65_536
"""Most events waiting to be sent. Only a stall of the event loop for seconds fills it."""
_INCARNATION_AHEAD_NS = 24 * 3600 * 10**9
"""Maximum lead of another Scheduler's clock, ns. An incarnation of next year would fence that Scheduler for a year."""


class NotSent(Exception):
    """An event was not sent; the message says why."""


class Transport(Protocol):
    """Carries the messages of one component."""

    @property
    def is_connected(self) -> bool:
        """Whether events can be sent."""

    def receiving(self, channel: SyncChannel) -> AbstractAsyncContextManager[None]:
        """Passes received events to the channel, and answers requests for its state, while the context lasts."""

    async def send(self, event: ReplicaSyncEvent) -> None:
        """Sends an event to the other Schedulers.

        Raises:
            NotSent: it was not sent.
        """

    def state_of(self, scheduler_id: str) -> AsyncGenerator[SyncStateResponse]:
        """Yields the state of another Scheduler as it arrives. Raises an exception if it does not come."""


class Network(Protocol):
    """Connects Schedulers."""

    async def open(self) -> None:
        """Returns once events can be sent."""

    def transport(self, component: ComponentName) -> Transport:
        """Returns what carries the messages of a component."""

    def live(self) -> Collection[str]:
        """Returns the ids of the Schedulers that are not gone."""

    def expected(self) -> Collection[str] | None:
        """Returns the ids of the Schedulers whose state is needed at the start; None if they are not known yet."""


@dataclass(eq=False)
class SyncChannel:
    """Connects the replicas of one component to a network. ``run`` must be running."""

    sync: ReplicaSync
    component: ComponentName
    transport: Transport
    heartbeat_seconds: float

    def __post_init__(self) -> None:
        self.replicas: Replicas = self.sync.of(self.component)
        """The Schedulers of the component."""
        self._metrics = self.sync.metrics
        self._here = self.sync.booking_table.here
        self._state_requested = asyncio.Event()
        self._announce = asyncio.Event()
        self.outgoing: asyncio.Queue[ReplicaSyncEvent] = asyncio.Queue(MAX_OUTGOING)
        """Events to send."""

    def put(self, event: ReplicaSyncEvent) -> bool:
        """Queues an event to send. Returns False if the queue is full or the network is away."""
        if not self.transport.is_connected or self.outgoing.full():
            return False
        self.outgoing.put_nowait(event)
        return True

    def announce(self) -> None:
        """Sends a heartbeat soon, for a Scheduler that does not know this one."""
        self._announce.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        async with self.transport.receiving(self), asyncio.TaskGroup() as group:
            group.create_task(self._send(), name="sync: send")
            group.create_task(self._beat(), name="sync: heartbeat")
            group.create_task(self._repair(), name="sync: repair")

    def take(self, event: ReplicaSyncEvent) -> None:
        """Applies a received event. Never raises because of its content."""
        known = len(self.replicas.logs)
        try:
            if (event.incarnation, event.scheduler_id) == self._here:
                return
            if refusal := self._refusal(event):
                self.reject(refusal)
            else:
                self.replicas.receive(event)
        except Exception:
            # A failure of one message must not end the subscription.
            self._metrics.quarantined.labels(reason="internal").inc()
            log.exception("replica.message_failed", component_name=str(self.component))
        if self.replicas.pause() is not None:
            self._state_requested.set()
        if len(self.replicas.logs) > known:
            self.announce()

    def reject(self, reason: str) -> None:
        """Counts a message that is not used."""
        self._metrics.quarantined.labels(reason=reason).inc()
        log.debug("replica.message_quarantined", reason=reason, component_name=str(self.component))

    def _refusal(self, event: ReplicaSyncEvent) -> str:
        """Returns why an event is not meant for this component's replicas; empty if it is."""
        if event.component != component_message(self.component):
            return "other_component"
        if event.scheduler_id == self._here[1]:
            return "own_id"
        try:
            check_name(event.scheduler_id)
        except InvalidName:
            return "bad_id"
        is_far_ahead = event.incarnation > time.time_ns() + _INCARNATION_AHEAD_NS
        incarnations = self.replicas.incarnations
        if is_far_ahead and incarnations.current(event.scheduler_id) != event.incarnation:
            # If its clock really is ahead, the Scheduler itself confirms the incarnation.
            incarnations.dispute(event.scheduler_id, self.replicas.clock())
        elif event.incarnation:
            return ""
        return "bad_incarnation"

    async def _send(self) -> None:
        while True:
            event = await self.outgoing.get()
            counts = "heartbeat" not in event
            try:
                await self.transport.send(event)
                self._metrics.sent.inc(counts)
            except NotSent as error:
                self._metrics.unsent.inc(counts)
                log.debug("replica.event_send_failed", component_name=str(self.component), cause=str(error))

    async def _beat(self) -> None:
        while True:
            # Queued after the events, so that it does not overtake those that it counts.
            self.put(self.replicas.announcer.heartbeat())
            with suppress(TimeoutError):
                async with asyncio.timeout(self.heartbeat_seconds):
                    # A new Scheduler should learn of this one at once.
                    await self._announce.wait()
            self._announce.clear()

    async def _repair(self) -> None:
        while True:
            self._state_requested.clear()
            lacking, disputed = self.replicas.due()
            async with asyncio.TaskGroup() as group:
                for event_log in lacking:
                    group.create_task(self._fetch(event_log), name=f"state of {event_log.scheduler[1]}")
                for scheduler_id in disputed:
                    group.create_task(self._ask_incarnation(scheduler_id), name=f"incarnation of {scheduler_id}")
            if not lacking and not disputed:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.replicas.pause()):
                        await self._state_requested.wait()

    async def _ask_incarnation(self, scheduler_id: str) -> None:
        """Asks a Scheduler for its incarnation: the first chunk of its state contains it."""
        try:
            async with aclosing(self.transport.state_of(scheduler_id)) as state:
                chunk = await anext(state)
            if chunk.scheduler_id != scheduler_id or not chunk.incarnation:
                raise StateBroken(
                    f"expected an answer of {scheduler_id!r}, received one of {chunk.scheduler_id[:64]!r}"
                )
        except Exception as error:
            self.replicas.incarnations.unanswered(scheduler_id, self.replicas.clock())
            log.info(
                "replica.incarnation_unconfirmed",
                origin=scheduler_id,
                component_name=str(self.component),
                cause=repr(error),
            )
        else:
            self.replicas.settle(scheduler_id, chunk.incarnation)

    async def _fetch(self, event_log: EventLog) -> None:
        """Fetches the state of an incarnation. A failed fetch is repeated while the state is needed."""
        fetch = Fetch(self.replicas, event_log)
        try:
            async with aclosing(self.transport.state_of(event_log.scheduler[1])) as state:
                async for chunk in state:
                    if fetch.take(chunk):
                        break
                    await asyncio.sleep(0)
                else:
                    raise StateBroken("it ended before its last chunk")
            outcome, cause = "done", ""
        except Exception as error:
            fetch.give_up()
            outcome, cause = "failed", repr(error)
        self._metrics.repairs.labels(outcome=outcome).inc()
        log.info("replica.state_received", origin=event_log.scheduler[1], outcome=outcome, cause=cause)


_SETTLE_SECONDS = 3.0
"""Longest wait at start for the states of other Schedulers, seconds."""


@dataclass(eq=False)
class SyncLink:
    """Connects a ReplicaSync to a network. ``run`` must be running."""

    sync: ReplicaSync
    network: Network
    directory: Directory
    """Has the components."""
    _: KW_ONLY
    heartbeat_seconds: float

    def __post_init__(self) -> None:
        self._channels: dict[ComponentName, SyncChannel] = {}
        self._give_up_settling = time.monotonic() + _SETTLE_SECONDS
        self._settled = False
        self.sync.send = self._send
        self.sync.metrics.remote_bookings.set_function(self.sync.remote_bookings)
        self.sync.metrics.replicas.set_function(self.sync.replicas)
        self.sync.metrics.incomplete.set_function(self.sync.incomplete)
        self.sync.metrics.unsent_waiting.set_function(lambda: self.outgoing)

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
        await self.network.open()
        running: dict[ComponentName, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            async for directory in self.directory.changes():
                for gone in running.keys() - directory.components.keys():
                    del self._channels[gone]
                    running.pop(gone).cancel()
                for name in directory.components.keys() - running.keys():
                    transport = self.network.transport(name)
                    channel = self._channels[name] = SyncChannel(self.sync, name, transport, self.heartbeat_seconds)
                    running[name] = group.create_task(channel.run(), name=f"sync of {name}")

    def expire(self) -> None:
        """Drops the bookings of gone Schedulers."""
        self.sync.expire(self.network.live())

    def _send(self, component: ComponentName, event: ReplicaSyncEvent) -> None:
        channel = self._channels.get(component)
        if channel is None or not channel.put(event):
            self.sync.metrics.unsent.inc()

    def _has_all(self) -> bool:
        expected = self.network.expected()
        if expected is None:
            return False
        others = set(expected) - {self.sync.booking_table.here[1]}
        return self.directory.is_synced and all(
            name in self._channels
            and others
            <= {event_log.scheduler[1] for event_log in self.sync.of(name).logs if not event_log.state_requested}
            for name in self.directory.components
        )
