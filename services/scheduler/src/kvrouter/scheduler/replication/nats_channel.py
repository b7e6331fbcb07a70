"""Replica sync over Core NATS: sends and receives events, and fetches and serves states, on a channel per component.

Core NATS may lose messages. A slow reader, a lost connection or a full buffer shows as a gap in a Scheduler's sequence
or in its next heartbeat, and is repaired by fetching its state. Therefore nothing here waits for NATS, and
nothing is stored while NATS is away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field

import nats.errors
import structlog
from kvrouter.net.decoding import Quarantine, Undecodable, decode_message
from kvrouter.net.nats.client import or_cancelled
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.scheduler.identifiers import component_message
from kvrouter.scheduler.replication.event_log import EventLog
from kvrouter.scheduler.replication.replicas import Replicas, ReplicaSync
from kvrouter.scheduler.replication.state_transfer import Fetch, StateBroken, chunks
from kvrouter.v1.names import ComponentName, InvalidName, check_name
from kvrouter.v1.sync_pb2 import ReplicaSyncEvent, SyncStateRequest, SyncStateResponse
from nats.aio.client import Client
from nats.aio.msg import Msg

log = structlog.get_logger(component="scheduler")

MAX_OUTGOING = 65_536
"""Most events waiting to be sent. Only a stall of the event loop for seconds fills it."""
_MAX_PENDING_MESSAGES = 65_536
"""Messages that a subscription queues for its reader; further ones are dropped and counted."""
_MAX_PENDING_BYTES = 64 << 20
"""Bytes that a subscription queues for its reader."""
_MAX_ANSWERS = 256
"""Maximum number of waiting requests for this Scheduler's state. Further ones are dropped, and their senders retry."""
_CHUNK_SECONDS = 5.0
"""Longest wait for the next chunk of a state, seconds. Its sender makes a chunk in milliseconds."""
_CHUNKS_IN_FLIGHT = 8
"""Number of chunks sent before a flush: 1 MiB, against delays of events by a state."""
_INCARNATION_AHEAD_NS = 24 * 3600 * 10**9
"""Maximum lead of another Scheduler's clock, ns. An incarnation of next year would fence that Scheduler for a year."""


@dataclass(eq=False)
class SyncChannel:
    """Connects the replicas of one component to NATS. ``run`` must be running."""

    sync: ReplicaSync
    component: ComponentName
    client: Client
    heartbeat_seconds: float
    quarantine: Quarantine

    def __post_init__(self) -> None:
        self._replicas: Replicas = self.sync.of(self.component)
        self._metrics = self.sync.metrics
        self._here = self.sync.booking_table.here
        self._asked: asyncio.Queue[str] = asyncio.Queue(_MAX_ANSWERS)
        self._state_requested = asyncio.Event()
        self._announce = asyncio.Event()
        # (encoded message, whether it counts as an event: heartbeats do not)
        self.outgoing: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue(MAX_OUTGOING)

    def put(self, event: ReplicaSyncEvent) -> bool:
        """Queues an event to send. Returns False if the queue is full or NATS is away."""
        if not self.client.is_connected or self.outgoing.full():
            return False
        self.outgoing.put_nowait((event.SerializeToString(), not event.HasField("heartbeat")))
        return True

    async def run(self) -> None:
        """Runs until cancelled."""
        events = await self.client.subscribe(
            self.component.sync_subject,
            cb=self._take,
            pending_msgs_limit=_MAX_PENDING_MESSAGES,
            pending_bytes_limit=_MAX_PENDING_BYTES,
        )
        state_subject = self.component.sync_state_subject(self._here[1])
        requests = await self.client.subscribe(state_subject, cb=self._take_request)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send(), name="sync: send")
                group.create_task(self._beat(), name="sync: heartbeat")
                group.create_task(self._repair(), name="sync: repair")
                group.create_task(self._answer(), name="sync: answer")
        finally:
            with suppress(nats.errors.Error):
                await events.unsubscribe()
                await requests.unsubscribe()

    async def _take(self, message: Msg) -> None:
        known = len(self._replicas.logs)
        try:
            event = decode_message(ReplicaSyncEvent, message.data)
            if (event.incarnation, event.scheduler_id) == self._here:
                return
            refusal = self._refusal(event)
            if refusal:
                self._reject(refusal, message)
            else:
                self._replicas.receive(event)
        except Undecodable as error:
            self.quarantine.reject("nats", message.subject, error)
            self._reject("unparsable", message)
        except Exception:
            # A failure of one message must not end the subscription.
            self._metrics.quarantined.labels(reason="internal").inc()
            log.exception("replica.message_failed", subject=message.subject)
        if self._replicas.pause() is not None:
            self._state_requested.set()
        if len(self._replicas.logs) > known:
            self._announce.set()
        # Yields, since a backlog of messages would occupy the event loop.
        await asyncio.sleep(0)

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
        incarnations = self._replicas.incarnations
        if is_far_ahead and incarnations.current(event.scheduler_id) != event.incarnation:
            # If its clock really is ahead, the Scheduler itself confirms the incarnation.
            incarnations.dispute(event.scheduler_id, self._replicas.clock())
        elif event.incarnation:
            return ""
        return "bad_incarnation"

    async def _take_request(self, message: Msg) -> None:
        if not message.reply or self._asked.full():
            self._reject("state_request", message)
        else:
            self._asked.put_nowait(message.reply)

    async def _send(self) -> None:
        while True:
            encoded, counts = await self.outgoing.get()
            try:
                await self.client.publish(self.component.sync_subject, encoded)
                self._metrics.sent.inc(counts)
            except nats.errors.Error as error:
                self._metrics.unsent.inc(counts)
                log.debug("replica.event_send_failed", component_name=str(self.component), cause=str(error))

    async def _beat(self) -> None:
        while True:
            # Queued after the events, so that it does not overtake those that it counts.
            self.put(self._replicas.announcer.heartbeat())
            with suppress(TimeoutError):
                async with asyncio.timeout(self.heartbeat_seconds):
                    # A new Scheduler should learn of this one at once.
                    await self._announce.wait()
            self._announce.clear()

    async def _repair(self) -> None:
        while True:
            self._state_requested.clear()
            lacking, disputed = self._replicas.due()
            async with asyncio.TaskGroup() as group:
                for event_log in lacking:
                    group.create_task(self._fetch(event_log), name=f"state of {event_log.scheduler[1]}")
                for scheduler_id in disputed:
                    group.create_task(self._ask_incarnation(scheduler_id), name=f"incarnation of {scheduler_id}")
            if not lacking and not disputed:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._replicas.pause()):
                        await self._state_requested.wait()

    async def _ask_incarnation(self, scheduler_id: str) -> None:
        """Asks a Scheduler for its incarnation: the first chunk of its state contains it."""
        request = SyncStateRequest(scheduler_id=self._here[1]).SerializeToString()
        subject = self.component.sync_state_subject(scheduler_id)
        try:
            answer = await self.client.request(subject, request, timeout=_CHUNK_SECONDS)
            chunk = decode_message(SyncStateResponse, answer.data)
            if chunk.scheduler_id != scheduler_id or not chunk.incarnation:
                raise StateBroken(
                    f"expected an answer of {scheduler_id!r}, received one of {chunk.scheduler_id[:64]!r}"
                )
        except Exception as error:
            self._replicas.incarnations.unanswered(scheduler_id, self._replicas.clock())
            log.info(
                "replica.incarnation_unconfirmed",
                origin=scheduler_id,
                component_name=str(self.component),
                cause=repr(error),
            )
        else:
            self._replicas.settle(scheduler_id, chunk.incarnation)

    async def _fetch(self, event_log: EventLog) -> None:
        """Fetches the state of an incarnation. A failed fetch is repeated while the state is needed."""
        inbox = self.client.new_inbox()
        answers = await self.client.subscribe(inbox)
        fetch = Fetch(self._replicas, event_log)
        try:
            subject = self.component.sync_state_subject(event_log.scheduler[1])
            await self.client.publish(subject, SyncStateRequest(scheduler_id=self._here[1]).SerializeToString(), inbox)
            while True:
                answer = await or_cancelled(answers.next_msg(timeout=_CHUNK_SECONDS))
                if answer.headers and answer.headers.get("Status"):
                    raise StateBroken("nobody answers on its state subject")
                if fetch.take(decode_message(SyncStateResponse, answer.data)):
                    break
                await asyncio.sleep(0)
            outcome, cause = "done", ""
        except Exception as error:
            fetch.give_up()
            outcome, cause = "failed", repr(error)
        finally:
            with suppress(nats.errors.Error):
                await answers.unsubscribe()
        self._metrics.repairs.labels(outcome=outcome).inc()
        log.info("replica.state_received", origin=event_log.scheduler[1], outcome=outcome, cause=cause)

    async def _answer(self) -> None:
        while True:
            reply = await self._asked.get()
            try:
                for number, chunk in enumerate(chunks(self._replicas)):
                    await self.client.publish(reply, chunk.SerializeToString())
                    if number % _CHUNKS_IN_FLIGHT == _CHUNKS_IN_FLIGHT - 1:
                        await self.client.flush(_CHUNK_SECONDS)  # type: ignore[arg-type]  # declared as int
                    await asyncio.sleep(0)
            except (nats.errors.Error, ValueError) as error:
                # The reply subject may be invalid.
                log.info("replica.state_send_failed", component_name=str(self.component), cause=str(error))

    def _reject(self, reason: str, message: Msg) -> None:
        self._metrics.quarantined.labels(reason=reason).inc()
        log.debug("replica.message_quarantined", reason=reason, subject=message.subject)


_SETTLE_SECONDS = 3.0
"""Longest wait at start for the states of other Schedulers, seconds."""


@dataclass(eq=False)
class SyncLink:
    """Connects a ReplicaSync to NATS. ``run`` must be running."""

    sync: ReplicaSync
    connect: Callable[[], Awaitable[Client]]
    """Returns the connection once NATS is reachable."""
    directory: Directory
    _: KW_ONLY
    heartbeat_seconds: float
    quarantine: Quarantine = field(default_factory=Quarantine)

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
        client = await self.connect()
        running: dict[ComponentName, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            async for directory in self.directory.changes():
                for gone in running.keys() - directory.components.keys():
                    del self._channels[gone]
                    running.pop(gone).cancel()
                for name in directory.components.keys() - running.keys():
                    channel = self._channels[name] = SyncChannel(
                        self.sync, name, client, self.heartbeat_seconds, self.quarantine
                    )
                    running[name] = group.create_task(channel.run(), name=f"sync of {name}")

    def expire(self) -> None:
        """Drops the bookings of gone Schedulers."""
        self.sync.expire(self.directory.services("scheduler").keys())

    def _send(self, component: ComponentName, event: ReplicaSyncEvent) -> None:
        channel = self._channels.get(component)
        if channel is None or not channel.put(event):
            self.sync.metrics.unsent.inc()

    def _has_all(self) -> bool:
        _, own_id = self.sync.booking_table.here
        services = self.directory.services("scheduler")
        others = {scheduler_id for scheduler_id, service in services.items() if service.ready} - {own_id}
        return self.directory.is_synced and all(
            name in self._channels
            and others
            <= {event_log.scheduler[1] for event_log in self.sync.of(name).logs if not event_log.state_requested}
            for name in self.directory.components
        )
