"""Replica sync over Core NATS: a subject for the events of each component, and one for the state of each Scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import nats.errors
import structlog
from kvrouter.net.decoding import Quarantine, Undecodable, decode_message
from kvrouter.net.nats.client import or_cancelled
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.scheduler.replication.channel import NotSent, SyncChannel
from kvrouter.scheduler.replication.state_transfer import StateBroken, chunks
from kvrouter.v1.names import ComponentName
from kvrouter.v1.sync_pb2 import ReplicaSyncEvent, SyncStateRequest, SyncStateResponse
from nats.aio.client import Client
from nats.aio.msg import Msg

log = structlog.get_logger(component="scheduler")

_MAX_ANSWERS = 256
"""Maximum number of waiting requests for this Scheduler's state. Further ones are dropped, and their senders retry."""
_CHUNK_SECONDS = 5.0
"""Longest wait for the next chunk of a state, seconds. Its sender makes a chunk in milliseconds."""
_CHUNKS_IN_FLIGHT = 8
"""Number of chunks sent before a flush: 1 MiB, against delays of events by a state."""


@dataclass(eq=False)
class NatsNetwork:
    """Implements Network with a NATS server and the registrations of Schedulers."""

    connect: Callable[[], Awaitable[Client]]
    """Returns the connection once NATS is reachable."""
    directory: Directory
    scheduler_id: str
    quarantine: Quarantine

    def __post_init__(self) -> None:
        self._client: Client | None = None

    async def open(self) -> None:
        """Implements Network."""
        self._client = await self.connect()

    def transport(self, component: ComponentName) -> NatsTransport:
        """Implements Network."""
        if self._client is None:
            raise AssertionError("open was not awaited")
        return NatsTransport(self._client, component, self.scheduler_id, self.quarantine)

    def live(self) -> Collection[str]:
        """Implements Network."""
        return self.directory.services("scheduler").keys()

    def expected(self) -> Collection[str]:
        """Implements Network."""
        services = self.directory.services("scheduler")
        return [scheduler_id for scheduler_id, service in services.items() if service.ready]


@dataclass(eq=False)
class NatsTransport:
    """Implements Transport."""

    client: Client
    component: ComponentName
    scheduler_id: str
    quarantine: Quarantine

    def __post_init__(self) -> None:
        self._asked: asyncio.Queue[str] = asyncio.Queue(_MAX_ANSWERS)

    @property
    def is_connected(self) -> bool:
        """Implements Transport."""
        return self.client.is_connected

    @asynccontextmanager
    async def receiving(self, channel: SyncChannel) -> AsyncIterator[None]:
        """Implements Transport."""

        async def take(message: Msg) -> None:
            try:
                event = decode_message(ReplicaSyncEvent, message.data)
            except Undecodable as error:
                self.quarantine.reject("nats", message.subject, error)
                channel.reject("unparsable")
            else:
                channel.take(event)

        async def take_request(message: Msg) -> None:
            if not message.reply or self._asked.full():
                channel.reject("state_request")
            else:
                self._asked.put_nowait(message.reply)

        events = await self.client.subscribe(self.component.sync_subject, cb=take)
        state_subject = self.component.sync_state_subject(self.scheduler_id)
        requests = await self.client.subscribe(state_subject, cb=take_request)
        try:
            async with asyncio.TaskGroup() as group:
                answering = group.create_task(self._answer(channel), name="sync: answer")
                try:
                    yield
                finally:
                    answering.cancel()
        finally:
            with suppress(nats.errors.Error):
                await events.unsubscribe()
                await requests.unsubscribe()

    async def send(self, event: ReplicaSyncEvent) -> None:
        """Implements Transport."""
        try:
            await self.client.publish(self.component.sync_subject, event.SerializeToString())
        except nats.errors.Error as error:
            raise NotSent(str(error)) from None

    async def state_of(self, scheduler_id: str) -> AsyncGenerator[SyncStateResponse]:
        """Implements Transport."""
        inbox = self.client.new_inbox()
        answers = await self.client.subscribe(inbox)
        try:
            request = SyncStateRequest(scheduler_id=self.scheduler_id)
            subject = self.component.sync_state_subject(scheduler_id)
            await self.client.publish(subject, request.SerializeToString(), inbox)
            while True:
                answer = await or_cancelled(answers.next_msg(timeout=_CHUNK_SECONDS))
                if answer.headers and answer.headers.get("Status"):
                    raise StateBroken("nobody answers on its state subject")
                yield decode_message(SyncStateResponse, answer.data)
        finally:
            with suppress(nats.errors.Error):
                await answers.unsubscribe()

    async def _answer(self, channel: SyncChannel) -> None:
        while True:
            reply = await self._asked.get()
            try:
                for number, chunk in enumerate(chunks(channel.replicas)):
                    await self.client.publish(reply, chunk.SerializeToString())
                    if number % _CHUNKS_IN_FLIGHT == _CHUNKS_IN_FLIGHT - 1:
                        await self.client.flush(_CHUNK_SECONDS)  # type: ignore[arg-type]  # declared as int
                    await asyncio.sleep(0)
            except (nats.errors.Error, ValueError) as error:
                # The reply subject may be invalid.
                log.info("replica.state_send_failed", component_name=str(self.component), cause=str(error))
