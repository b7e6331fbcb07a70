"""Ingest over a transport that retains no messages: Core NATS, or the process itself if the workers are in it.

Missed events are fetched from the workers.
"""

from __future__ import annotations

import asyncio

import structlog
from kvrouter.indexer.index.event_applier import EventApplier
from kvrouter.indexer.index.messages import StreamMessage
from kvrouter.net.local.messages import LiveMessages, Message
from kvrouter.v1.names import ComponentName

log = structlog.get_logger(component="indexer")

MAX_PENDING_MESSAGES = 8192
_PENDING_BYTES = 128 << 20
_TOGETHER = 256


class LiveEvents:
    """Applies the events that a component's workers publish without a stream.

    At most 8,192 messages or 128 MiB wait to be applied. Further messages are dropped and counted.
    """

    def __init__(self, messages: LiveMessages, component: ComponentName, events: EventApplier) -> None:
        self._received_from = messages
        self._component = component
        self._events = events
        self._queue: asyncio.Queue[Message] = asyncio.Queue(MAX_PENDING_MESSAGES)
        self._bytes = 0
        self._applying = 0
        self.subscribed = asyncio.Event()
        self.dropped = 0
        """Messages dropped because the queue was full."""

    @property
    def queued(self) -> int:
        """Returns the number of messages that are not applied yet."""
        return self._queue.qsize() + self._applying

    async def run(self) -> None:
        """Subscribes and applies messages until cancelled. The client renews the subscription after a reconnect."""
        subscription = await self._received_from.subscribe(self._component.live_wildcard, cb=self._take)
        self.subscribed.set()
        try:
            while True:
                messages = [await self._queue.get()]
                while len(messages) < _TOGETHER and not self._queue.empty():
                    messages.append(self._queue.get_nowait())
                self._applying = len(messages)
                self._bytes -= sum(len(message.data) for message in messages)
                batch = [StreamMessage(message.subject, 0, message.data) for message in messages]
                if rest := batch[self._events.apply_at_once(batch) :]:
                    await asyncio.to_thread(self._events.apply, rest)
                self._applying = 0
        finally:
            if not self._received_from.is_closed:
                await subscription.unsubscribe()

    async def _take(self, message: Message) -> None:
        if self._queue.full() or self._bytes + len(message.data) > _PENDING_BYTES:
            self.dropped += 1
            if self.dropped & (self.dropped - 1) == 0:
                log.warning("resync.pending_events_dropped", component_name=str(self._component), dropped=self.dropped)
            return
        self._bytes += len(message.data)
        self._queue.put_nowait(message)
